"""Stored kernels against qwix, and against loops and tables in numpy."""

import functools

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
TILES = (None, 4, 10)

# One program each, not one for every operation.
quantize = jax.jit(quantize_kernel, static_argnums=(1, 2, 3))
unpacked = jax.jit(unpack, static_argnums=(1, 2))


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
    of_qwix = functools.partial(qwix.quantize, qtype=theirs, channelwise_axes=(0, 2), tiled_axes=tiled)
    expected = jax.jit(of_qwix)(kernel)
    codes, scale = quantize(kernel, (1,), qtype, tile)
    np.testing.assert_allclose(scale, expected.scale, rtol=2e-6)
    values, others = (np.asarray(array, np.float32) for array in (unpacked(codes, (1,), qtype), expected.qvalue))
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
        kernel = (normal(4, 6, 10) * magnitude).astype(dtype)
        # Between two levels, on the largest, and nothing at all.
        kernel[..., 0], kernel[..., 1] = np.arange(24).reshape(4, 6) * magnitude / 2, 0
        codes, scale = quantize(kernel, (0, 1), qtype, tile)
        values = np.asarray(unpacked(codes, (0, 1), qtype))
        assert values.min() >= -highest and values.max() == highest
        error = np.abs(dequantized(codes, scale, (0, 1), qtype) - np.asarray(kernel, np.float64))
        assert (
            error <= np.asarray(expand_scale(np.asarray(scale), kernel.shape, (0, 1)), np.float64) / 2 * (1 + 5e-5)
        ).all()


@pytest.mark.parametrize("qtype", QTYPES)
def test_a_kernel_of_zeros_stays_one(qtype):
    codes, scale = quantize(np.zeros((8, 4), np.float32), (0,), qtype, 4)
    assert (np.asarray(dequantize_kernel(codes, scale, (0,), qtype, jnp.dtype("float32"))) == 0).all()


def test_levels_of_nf4_are_taken_as_they_are_and_between_them_the_nearest():
    kernel = np.stack([NF4_LEVELS, NF4_LEVELS * 3], 1)
    codes, scale = quantize(kernel, (0,), "nf4")
    np.testing.assert_array_equal(scale, [[1, 3]])
    np.testing.assert_array_equal(np.asarray(unpacked(codes, (0,), "nf4"))[:, 0], np.arange(16))
    wide = normal(200, 6)
    codes, scale = quantize(wide, (0,), "nf4", 50)
    ratio = wide[..., None] / np.asarray(expand_scale(scale, wide.shape, (0,)))[..., None]
    np.testing.assert_array_equal(unpacked(codes, (0,), "nf4"), np.abs(ratio - NF4_LEVELS).argmin(-1))


@pytest.mark.parametrize(("qtype", "values"), [("int4", range(-8, 8)), ("nf4", range(16))])
@pytest.mark.parametrize("contracted", [(0,), (1,), (0, 1), (1, 2)])
def test_two_values_a_byte(qtype, values, contracted):
    grid = np.resize(np.array(values, np.int8), (6, 4, 8))
    grid = np.random.default_rng(0).permuted(grid.reshape(-1)).reshape(grid.shape)
    codes, again = jax.jit(lambda grid: (codes := pack(grid, contracted, qtype), unpack(codes, contracted, qtype)))(
        grid
    )
    assert codes.shape == code_shape(grid.shape, contracted, qtype) and codes.dtype == code_dtype(qtype)
    assert kernel_shape(codes, contracted, qtype) == grid.shape
    np.testing.assert_array_equal(again, grid)
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


@pytest.mark.parametrize(
    ("qtype", "tile"),
    [
        *(("int4", tile) for tile in (2, 5, 8, 12, 20, 24, 100)),
        *((qtype, tile) for qtype in ("int8", "nf4", "fp8") for tile in (5, 12, 100)),
    ],
)
def test_tiles_run_through_the_summed_dimensions_in_order(qtype, tile):
    kernel = normal(3, 4, 6, 5)

    @jax.jit
    def run(kernel):
        codes, scale = quantize_kernel(kernel, (1, 2), qtype, tile)
        made = dequantize_kernel(codes, scale, (1, 2), qtype, jnp.dtype("float32"))
        return codes, scale, made, codes_for(kernel, scale, (1, 2), qtype)

    codes, scale, made, same_codes = run(kernel)
    count = -(-24 // tile)
    assert scale.shape[1] * scale.shape[2] == count
    size = -(-24 // count)
    largest = {"int8": 127.5, "int4": 7.5, "nf4": 1, "fp8": 448}[qtype]
    flat = kernel.reshape(3, 24, 5)
    expected = np.stack([np.abs(flat[:, size * i : size * (i + 1)]).max(1) / largest for i in range(count)], 1)
    np.testing.assert_allclose(np.asarray(scale).reshape(3, count, 5), expected, rtol=3e-6)
    np.testing.assert_allclose(made, dequantized(codes, scale, (1, 2), qtype), rtol=1e-6)
    np.testing.assert_array_equal(same_codes, codes)


# Every equation with every type and with every tile, and every type with every tile.
@pytest.mark.parametrize(
    ("equation", "qtype", "tile"),
    [
        (equation, qtype, TILES[(i + j) % len(TILES)])
        for i, equation in enumerate(PRODUCTS)
        for j, qtype in enumerate(QTYPES)
    ],
)
def test_products_and_their_gradients_are_those_of_the_dequantized_kernel(equation, qtype, tile):
    x, kernel = (normal(*shape, seed=seed) for seed, shape in enumerate(PRODUCTS[equation]))
    contracted = contracted_dims(equation)
    codes, scale = quantize(kernel, contracted, qtype, tile)

    @jax.jit
    def run(x, half, codes, scale):
        def total(x):
            y = stored_product(equation, x, codes, scale, qtype)
            return jnp.sum(jnp.sin(y)), y

        gradient, y = jax.grad(total, has_aux=True)(x)
        return y, gradient, stored_product(equation, half, codes, scale, qtype)

    y, gradient, half = run(x, x.astype(jnp.bfloat16), codes, scale)
    plain = dequantized(codes, scale, contracted, qtype)
    expected = np.einsum(equation, x, plain)
    assert y.dtype == x.dtype
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    left, right, product = equation.replace("->", ",").split(",")
    expected_gradient = np.einsum(f"{product},{right}->{left}", np.cos(expected), plain)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-5)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(half, np.float32), expected, atol=0.02 * np.abs(expected).max())


def test_layers_are_made_floats_one_at_a_time_in_the_backward_pass_too():
    layers, dim = 12, 256
    kernels = jax.ShapeDtypeStruct((layers, dim, dim), jnp.float32)
    codes, scale = jax.eval_shape(lambda kernels: quantize_kernel(kernels, (1,), "nf4", 64), kernels)

    def loss(x, codes, scale):
        def layer(x, arrays):
            return jnp.tanh(stored_product("BTD,DF->BTF", x, *arrays, "nf4")), None

        return jnp.sum(jax.lax.scan(layer, x, (codes, scale))[0])

    step = jax.jit(jax.value_and_grad(loss))
    memory = step.lower(np.ones((1, 4, dim), np.float32), codes, scale).compile().memory_analysis()
    kernel = 4 * dim * dim
    assert memory.temp_size_in_bytes < 5 * kernel < layers * kernel


def test_shape_and_dtype_tell_how_a_kernel_is_stored():
    for qtype in QTYPES:
        kernel = jax.ShapeDtypeStruct((2, 6, 4), jnp.float32)
        codes, _ = jax.eval_shape(lambda kernel, qtype=qtype: quantize_kernel(kernel, (1,), qtype), kernel)
        assert stored_type(codes.shape, codes.dtype, (2, 6, 4), (1,)) == qtype
        assert stored_type(codes.shape, str(codes.dtype), (2, 10, 4), (1,)) is None
    assert stored_type((2, 7, 4), "int8", (2, 7, 4), (1,)) == "int8"
