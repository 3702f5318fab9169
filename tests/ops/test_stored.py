"""Stored kernels against qwix, and against loops and tables in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix

from maxlite.ops.stored import (
    NF4_LEVELS,
    code_dtype,
    code_shape,
    codes_for,
    contracted_dims,
    dequantize_kernel,
    expand_scale,
    kernel_shape,
    pack,
    quantize_kernel,
    scale_shape,
    stored_product,
    stored_type,
    unpack,
)

QTYPES = ("int8", "int4", "nf4", "fp8")
# einsum, sizes of x, sizes of the kernel
PRODUCTS = {
    "BTD,DF->BTF": ((2, 3, 12), (12, 10)),
    "BTD,DNH->BTNH": ((2, 3, 12), (12, 2, 4)),
    "BTNH,NHD->BTD": ((2, 3, 4, 6), (4, 6, 10)),
    "BTKGV,KGVD->BTD": ((2, 3, 2, 2, 4), (2, 2, 4, 10)),
    "ERD,EDF->ERF": ((3, 4, 12), (3, 12, 10)),
}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def dequantized(codes, scale, contracted, qtype):
    """In float64 by numpy, element by element in the order of the summed dimensions."""
    codes = np.asarray(codes)
    if qtype in ("int4", "nf4"):
        bits = codes.view(np.uint8)
        halves = np.stack([bits & 15, bits >> 4], contracted[-1] + 1)
        codes = halves.reshape(kernel_shape(codes, contracted, qtype)).astype(int)
        codes = np.where(codes > 7, codes - 16, codes) if qtype == "int4" else NF4_LEVELS[codes]
    levels, scale = codes.astype(np.float64), np.asarray(scale, np.float64)
    shape, first, last = levels.shape, contracted[0], contracted[-1] + 1
    flat = levels.reshape(-1, np.prod(shape[first:last]), np.prod(shape[last:], dtype=int))
    scales = scale.reshape(flat.shape[0], -1, flat.shape[2])
    size = -(-flat.shape[1] // scales.shape[1])
    return np.stack([flat[:, row] * scales[:, row // size] for row in range(flat.shape[1])], 1).reshape(shape)


@pytest.mark.parametrize("tile", (None, 4))
@pytest.mark.parametrize("qtype", QTYPES)
def test_codes_and_scales_are_those_of_qwix(qtype, tile):
    kernel = normal(3, 16, 10)
    theirs = {"int8": jnp.int8, "int4": jnp.int4, "nf4": "nf4", "fp8": jnp.float8_e4m3fn}[qtype]
    tiled = {} if tile is None else {1: tile}
    expected = qwix.quantize(jnp.asarray(kernel), theirs, channelwise_axes=(0, 2), tiled_axes=tiled)
    codes, scale = quantize_kernel(jnp.asarray(kernel), (1,), qtype, tile)
    np.testing.assert_allclose(scale, expected.scale, rtol=2e-6)
    values, others = (np.asarray(array.astype(jnp.float32)) for array in (unpack(codes, (1,), qtype), expected.qvalue))
    # There the largest element of a tile is between two levels.
    chosen_alike = np.abs(others) < {"int8": 127, "int4": 7}.get(qtype, np.inf)
    np.testing.assert_array_equal(values[chosen_alike], others[chosen_alike])
    made = dequantize_kernel(codes, scale, (1,), qtype, jnp.dtype("float32"))
    errors = [np.abs(floats - kernel) for floats in (np.asarray(made), np.asarray(qwix.dequantize(expected)))]
    np.testing.assert_allclose(*errors, atol=1e-5)


@pytest.mark.parametrize("magnitude", (1e-30, 1.0, 1e30))
@pytest.mark.parametrize("tile", (None, 6))
@pytest.mark.parametrize(("qtype", "highest"), [("int8", 127), ("int4", 7)])
def test_an_integer_moves_by_half_its_scale_at_most(qtype, highest, tile, magnitude):
    for dtype in (jnp.float32, jnp.bfloat16):
        kernel = jnp.asarray(normal(4, 6, 10) * magnitude, dtype)
        # Between two levels, on the largest, and nothing at all.
        kernel = kernel.at[..., 0].set(jnp.arange(24).reshape(4, 6) * magnitude / 2).at[..., 1].set(0)
        codes, scale = quantize_kernel(kernel, (0, 1), qtype, tile)
        values = np.asarray(unpack(codes, (0, 1), qtype))
        assert values.min() >= -highest and values.max() == highest
        error = np.abs(dequantized(codes, scale, (0, 1), qtype) - np.asarray(kernel, np.float64))
        assert (error <= np.asarray(expand_scale(scale, kernel.shape, (0, 1)), np.float64) / 2 * (1 + 5e-5)).all()


@pytest.mark.parametrize("qtype", QTYPES)
def test_a_kernel_of_zeros_stays_one(qtype):
    codes, scale = quantize_kernel(jnp.zeros((8, 4)), (0,), qtype, 4)
    assert (np.asarray(dequantize_kernel(codes, scale, (0,), qtype, jnp.dtype("float32"))) == 0).all()


def test_levels_of_nf4_are_taken_as_they_are_and_between_them_the_nearest():
    kernel = jnp.asarray(np.stack([NF4_LEVELS, NF4_LEVELS * 3], 1))
    codes, scale = quantize_kernel(kernel, (0,), "nf4")
    np.testing.assert_array_equal(scale, [[1, 3]])
    np.testing.assert_array_equal(unpack(codes, (0,), "nf4")[:, 0], np.arange(16))
    wide = normal(200, 6)
    codes, scale = quantize_kernel(jnp.asarray(wide), (0,), "nf4", 50)
    ratio = wide[..., None] / np.asarray(expand_scale(scale, wide.shape, (0,)))[..., None]
    np.testing.assert_array_equal(unpack(codes, (0,), "nf4"), np.abs(ratio - NF4_LEVELS).argmin(-1))


@pytest.mark.parametrize(("qtype", "values"), [("int4", range(-8, 8)), ("nf4", range(16))])
@pytest.mark.parametrize("contracted", [(0,), (1,), (0, 1), (1, 2)])
def test_two_values_a_byte(qtype, values, contracted):
    grid = np.resize(np.array(values, np.int8), (6, 4, 8))
    grid = np.random.default_rng(0).permuted(grid.reshape(-1)).reshape(grid.shape)
    codes = pack(jnp.asarray(grid), contracted, qtype)
    assert codes.shape == code_shape(grid.shape, contracted, qtype) and codes.dtype == code_dtype(qtype)
    assert kernel_shape(codes, contracted, qtype) == grid.shape
    np.testing.assert_array_equal(unpack(codes, contracted, qtype), grid)
    bits = np.moveaxis(np.asarray(codes).view(np.uint8), contracted[-1], 0)
    np.testing.assert_array_equal(bits & 15, np.moveaxis(grid, contracted[-1], 0)[0::2] & 15)


@pytest.mark.parametrize(
    ("shape", "contracted", "tile", "expected"),
    [
        ((64, 8, 16), (0,), None, (1, 8, 16)),
        ((64, 8, 16), (0,), 32, (2, 8, 16)),
        ((8, 16, 64), (0, 1), None, (1, 1, 64)),
        ((8, 16, 64), (0, 1), 8, (8, 2, 64)),
        ((8, 16, 64), (0, 1), 16, (8, 1, 64)),
        ((8, 16, 64), (0, 1), 32, (4, 1, 64)),
        ((8, 16, 64), (0, 1), 48, (3, 1, 64)),
        ((8, 16, 64), (0, 1), 500, (1, 1, 64)),
        ((172, 64), (0,), 64, (3, 64)),
        ((5, 4, 172, 64), (2,), 43, (5, 4, 4, 64)),
    ],
)
def test_scales_have_the_number_of_tiles(shape, contracted, tile, expected):
    assert scale_shape(shape, contracted, tile) == expected


@pytest.mark.parametrize("tile", (2, 5, 8, 12, 20, 24, 100))
@pytest.mark.parametrize("qtype", QTYPES)
def test_tiles_run_through_the_summed_dimensions_in_order(qtype, tile):
    kernel = normal(3, 4, 6, 5)
    codes, scale = quantize_kernel(jnp.asarray(kernel), (1, 2), qtype, tile)
    count = -(-24 // tile)
    assert scale.shape[1] * scale.shape[2] == count
    size = -(-24 // count)
    largest = {"int8": 127.5, "int4": 7.5, "nf4": 1, "fp8": 448}[qtype]
    flat = kernel.reshape(3, 24, 5)
    expected = np.stack([np.abs(flat[:, size * i : size * (i + 1)]).max(1) / largest for i in range(count)], 1)
    np.testing.assert_allclose(np.asarray(scale).reshape(3, count, 5), expected, rtol=3e-6)
    made = dequantize_kernel(codes, scale, (1, 2), qtype, jnp.dtype("float32"))
    np.testing.assert_allclose(made, dequantized(codes, scale, (1, 2), qtype), rtol=1e-6)
    np.testing.assert_array_equal(codes_for(jnp.asarray(kernel), scale, (1, 2), qtype), codes)


@pytest.mark.parametrize("tile", (None, 4, 10))
@pytest.mark.parametrize("qtype", QTYPES)
@pytest.mark.parametrize("equation", PRODUCTS)
def test_products_are_those_of_the_dequantized_kernel(equation, qtype, tile):
    x, kernel = (jnp.asarray(normal(*shape, seed=seed)) for seed, shape in enumerate(PRODUCTS[equation]))
    contracted = contracted_dims(equation)
    codes, scale = quantize_kernel(kernel, contracted, qtype, tile)
    plain = dequantized(codes, scale, contracted, qtype)
    expected = np.einsum(equation, x, plain)
    y = stored_product(equation, x, codes, scale, qtype)
    assert y.dtype == x.dtype
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    half = stored_product(equation, x.astype(jnp.bfloat16), codes, scale, qtype)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.parametrize("tile", (None, 4))
@pytest.mark.parametrize("equation", PRODUCTS)
def test_the_gradient_is_that_of_the_dequantized_kernel(equation, tile):
    x, kernel = (jnp.asarray(normal(*shape, seed=seed)) for seed, shape in enumerate(PRODUCTS[equation]))
    contracted = contracted_dims(equation)
    codes, scale = quantize_kernel(kernel, contracted, "int4", tile)
    plain = jnp.asarray(dequantized(codes, scale, contracted, "int4"), jnp.float32)
    found = jax.grad(lambda x: jnp.sum(jnp.sin(stored_product(equation, x, codes, scale, "int4"))))(x)
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(jnp.einsum(equation, x, plain))))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_layers_are_made_floats_one_at_a_time_in_the_backward_pass_too():
    layers, dim = 12, 256
    codes, scale = quantize_kernel(jnp.asarray(normal(layers, dim, dim)) / 16, (1,), "nf4", 64)

    def loss(x, codes, scale):
        def layer(x, arrays):
            return jnp.tanh(stored_product("BTD,DF->BTF", x, *arrays, "nf4")), None

        return jnp.sum(jax.lax.scan(layer, x, (codes, scale))[0])

    step = jax.jit(jax.value_and_grad(loss))
    memory = step.lower(jnp.ones((1, 4, dim)), codes, scale).compile().memory_analysis()
    kernel = 4 * dim * dim
    assert memory.temp_size_in_bytes < 5 * kernel < layers * kernel


def test_shape_and_dtype_tell_how_a_kernel_is_stored():
    for qtype in QTYPES:
        codes, _ = quantize_kernel(jnp.ones((2, 6, 4)), (1,), qtype)
        assert stored_type(codes.shape, codes.dtype, (2, 6, 4), (1,)) == qtype
        assert stored_type(codes.shape, str(codes.dtype), (2, 10, 4), (1,)) is None
    assert stored_type((2, 7, 4), "int8", (2, 7, 4), (1,)) == "int8"
