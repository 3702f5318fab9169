"""Rounded products against numpy, against qwix's own, and against the products of floats."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwix._src.core import dot_general_qt

from maxlite.config.quant_schema import QuantRule
from maxlite.ops.quantized import HEADROOM, RMS_RANGE, quantized_product, round_to_codes

INT8 = QuantRule(".*", "int8", "int8", "int8")
# equation, x, kernel: the widths rise, fall, and are several dimensions.
SHAPES = {
    "BTD,DF->BTF": ((2, 7, 32), (32, 64)),
    "BTF,FD->BTD": ((2, 7, 64), (64, 32)),
    "BTD,DNH->BTNH": ((2, 7, 32), (32, 4, 8)),
    "BTNH,NHD->BTD": ((2, 7, 4, 8), (4, 8, 32)),
    "BTKGV,KGVD->BTD": ((2, 7, 2, 2, 8), (2, 2, 8, 24)),
}
EQUATIONS = pytest.mark.parametrize("equation", SHAPES)


def inputs(equation, dtype=jnp.float32):
    """x, kernel, and a gradient for the product."""
    random = np.random.default_rng(0)
    x, kernel = (random.normal(size=shape).astype(dtype) for shape in SHAPES[equation])
    made = np.einsum(equation, x.astype(np.float32), kernel.astype(np.float32)).shape
    return x, kernel, random.normal(size=made).astype(dtype)


def both_ways(product):
    """A function of x, kernel and the product's gradient: the product and the gradients of x and kernel."""

    def run(x, kernel, gradient):
        y, backward = jax.vjp(product, x, kernel)
        return y, *backward(gradient)

    return run


def ways_of_rule(equation, rule):
    return both_ways(lambda x, kernel: quantized_product(equation, x, kernel, rule))


@functools.cache
def of_rule(equation, rule, dtype=jnp.float32):
    return jax.jit(ways_of_rule(equation, rule))(*inputs(equation, dtype))


def of_floats(equation):
    x, kernel, gradient = (np.asarray(array, np.float64) for array in inputs(equation))
    left, right, made = equation.replace("->", ",").split(",")
    of_x = np.einsum(f"{made},{right}->{left}", gradient, kernel)
    return np.einsum(equation, x, kernel), of_x, np.einsum(f"{left},{made}->{right}", x, gradient)


def distance(found, expected):
    found, expected = (np.asarray(array, np.float32) for array in (found, expected))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(("qtype", "largest"), [("int8", 127), ("int4", 7)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_code_is_off_by_half_a_step_at_most(qtype, largest, dtype):
    array = np.random.default_rng(0).normal(size=(16, 40)).astype(dtype)
    rounded = jax.jit(lambda array: round_to_codes(array, qtype, (1,)))(array)
    codes, scale = np.asarray(rounded.qvalue, np.float64), np.asarray(rounded.scale, np.float64)
    assert rounded.qvalue.dtype == jnp.int8 and scale.shape == (16, 1)
    assert np.all(np.abs(codes * scale - np.asarray(array, np.float64)) <= scale * 0.5000001)
    # The largest of each row has the last code, whatever its sign.
    assert np.all(np.abs(codes).max(axis=1) == largest) and {-largest, largest} <= {codes.min(), codes.max()}


def test_zeros_have_codes():
    rounded = round_to_codes(np.zeros((2, 3), np.float32), "int8", (1,))
    np.testing.assert_array_equal(rounded.qvalue, 0)
    assert np.all(np.isfinite(rounded.scale))


@EQUATIONS
def test_it_is_numpys_product_of_codes_and_scales(equation):
    x, kernel, _ = (np.asarray(array, np.float64) for array in inputs(equation))
    count = sum(letter not in equation.split("->")[1] for letter in equation.split("->")[0].split(",")[1])
    rows, matrix = x.reshape(14, -1), kernel.reshape(np.prod(kernel.shape[:count]), -1)
    of_rows, of_columns = np.abs(rows).max(axis=1, keepdims=True) / 127.5, np.abs(matrix).max(axis=0) / 127.5
    row_codes = np.clip(np.round(rows / of_rows / HEADROOM), -127, 127)
    expected = (
        (row_codes @ np.clip(np.round(matrix / of_columns / HEADROOM), -127, 127)) * of_rows * of_columns * HEADROOM**2
    )
    found = of_rule(equation, INT8)[0]
    np.testing.assert_allclose(np.asarray(found).reshape(14, -1), expected, rtol=1e-4, atol=1e-4)


@EQUATIONS
@pytest.mark.parametrize(("named", "qtypes"), [("int8", ("int8",) * 3), ("fp8", ("fp8", "fp8", "fp8_e5m2"))])
def test_it_is_qwixs_own_forward_and_backward(equation, named, qtypes):
    dtypes = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}
    weight, act, bwd = (dtypes[name] for name in qtypes)
    method = f"absmax,{HEADROOM}"
    config = dot_general_qt.DotGeneralQtConfig(
        lhs_qtype=act,
        rhs_qtype=weight,
        dlhs_grad_qtype=bwd,
        drhs_grad_qtype=bwd,
        lhs_calibration_method=method,
        rhs_calibration_method=method,
        dlhs_grad_calibration_method=method,
        drhs_grad_calibration_method=method,
    )
    x, kernel, gradient = inputs(equation)
    count = x.ndim + kernel.ndim - gradient.ndim
    dims = ((tuple(range(x.ndim - count // 2, x.ndim)), tuple(range(count // 2))), ((), ()))
    theirs = jax.jit(both_ways(lambda x, kernel: dot_general_qt.dot_general_qt(x, kernel, dims, config)))(
        x, kernel, gradient
    )
    for ours, expected in zip(of_rule(equation, QuantRule(".*", *qtypes)), theirs, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


NEARLY = {
    INT8: (0.002, 0.015),
    QuantRule(".*", "fp8", "fp8", "fp8_e5m2"): (0.01, 0.08),
    INT8._replace(tile_size=8): (0.002, 0.015),
    QuantRule(".*", "int4", "int8", "int8"): (0.004, 0.15),
    INT8._replace(calibration="rms"): (0.002, 0.04),
}
# The last two are a number of codes and a way to scales, in which one equation is like the other.
FEW = ("BTD,DNH->BTNH", "BTKGV,KGVD->BTD")


@pytest.mark.parametrize(
    ("equation", "rule", "least", "most"),
    [
        (equation, rule, *bounds)
        for number, (rule, bounds) in enumerate(NEARLY.items())
        for equation in (SHAPES if number < 3 else FEW)
    ],
    ids=str,
)
def test_products_and_gradients_are_nearly_those_of_floats(equation, rule, least, most):
    for found, expected in zip(of_rule(equation, rule), of_floats(equation), strict=True):
        assert least < distance(found, expected) < most


@EQUATIONS
@pytest.mark.parametrize("rule", [QuantRule(".*", "int8", "int8"), QuantRule(".*", "int4")], ids=str)
def test_without_bwd_qtype_gradients_are_those_of_floats(equation, rule):
    found, expected = of_rule(equation, rule), of_floats(equation)
    assert distance(found[0], expected[0]) > 0.001
    for ours, floats in zip(found[1:], expected[1:], strict=True):
        np.testing.assert_allclose(ours, floats, rtol=1e-5, atol=1e-5)


def test_tiles_run_through_all_summed_dimensions():
    """One large element spoils the scale of its tile and of no other."""
    x, kernel = np.ones((1, 1, 4, 8), np.float32), np.full((4, 8, 3), 0.01, np.float32)
    kernel[0, 0] = 100
    tiled, whole = (
        jax.jit(functools.partial(quantized_product, "BTNH,NHD->BTD", rule=rule))(x, kernel)
        for rule in (QuantRule(".*", "int8", None, None, size) for size in (16, None))
    )
    np.testing.assert_allclose(whole, 100, rtol=1e-2)
    # The second tile's 16 elements keep their values.
    np.testing.assert_allclose(np.asarray(tiled) - np.asarray(whole), 0.16, rtol=2e-2)


@pytest.mark.parametrize("tile_size", [None, 20])
def test_what_rms_cuts_off_has_no_gradient(tile_size):
    x = np.random.default_rng(0).normal(size=(1, 3, 200)).astype(np.float32)
    x[0, 1, 30] = 40 * RMS_RANGE
    rule = INT8._replace(calibration="rms", tile_size=tile_size)
    if tile_size is not None:
        # In a tile of 20 one element is never more than root 20 root mean squares.
        rule = rule._replace(tile_size=100)
    kernel = np.ones((200, 2), np.float32)
    gradient = jax.jit(jax.grad(lambda x: quantized_product("BTD,DF->BTF", x, kernel, rule).sum()))(x)
    cut = np.zeros(x.shape, bool)
    cut[0, 1, 30] = True
    np.testing.assert_array_equal(np.asarray(gradient) == 0, cut)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_results_have_the_dtype_of_what_goes_in(dtype):
    for rule in (INT8, QuantRule(".*", "int8"), INT8._replace(tile_size=8), QuantRule(".*", "fp8", "fp8", "fp8_e5m2")):
        for found, expected in zip(of_rule("BTD,DF->BTF", rule, dtype), of_floats("BTD,DF->BTF"), strict=True):
            assert found.dtype == dtype and distance(found, expected) < 0.1


@pytest.mark.parametrize(
    ("rule", "count"), [(INT8, 3), (INT8._replace(bwd_qtype=None), 1), (INT8._replace(tile_size=8), 2)]
)
def test_codes_are_multiplied_as_integers(rule, count):
    """Tiles of less than 128 are multiplied as floats; the backward pass has none."""
    program = str(jax.make_jaxpr(ways_of_rule("BTD,DF->BTF", rule))(*inputs("BTD,DF->BTF")))
    assert len(re.findall(r"preferred_element_type=int32", program)) == count


def test_the_narrower_operand_of_the_kernels_gradient_comes_first():
    def order(equation):
        program = str(jax.make_jaxpr(lambda *arrays: ways_of_rule(equation, INT8)(*arrays)[2])(*inputs(equation)))
        return re.findall(
            r"dot_general\[\s*dimension_numbers=\(\(\[0, 1\], \[0, 1\]\)", program
        ), "transpose" in program

    assert order("BTD,DF->BTF")[1] is False and order("BTF,FD->BTD")[1] is True
