"""Products whose operands are rounded to few bits, in the forward and the backward pass.

An operand becomes codes and scales: a scale for each channel, which is what its summed dimensions share, so that codes
are multiplied with codes and the scales act on the result. The backward pass multiplies the codes of the forward pass
with a gradient that is rounded in its turn: it takes the codes' scales first, because it sums over other dimensions.
Rounding counts as the identity for gradients (Bengio et al. 2013, arXiv:1308.3432). Rounding and tiles are qwix's.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from qwix._src.core import dot_general, qarray

from maxlite.config.quant_schema import QuantRule

DTYPES = {"int8": jnp.int8, "int4": jnp.int4, "fp8": jnp.float8_e4m3fn, "fp8_e5m2": jnp.float8_e5m2}
# So much above the largest magnitude scales reach: qwix makes that one half a step more than the last code, where
# noise in its last bit would decide between two codes, on each mesh anew.
HEADROOM = 1.0001
# calibration=rms: values up to so many root mean squares have codes, larger ones are cut off.
RMS_RANGE = 7
# An array as it is, or as qwix's codes and scales.
Operand = Any


class Dims(NamedTuple):
    """Dimensions that a product sums over: the last of x, and as many, the first, of the kernel."""

    x: tuple[int, ...]
    kernel: tuple[int, ...]


def quantized_product(equation: str, x: jax.Array, kernel: jax.Array, rule: QuantRule) -> jax.Array:
    """Returns the einsum of two operands that are rounded as the rule says, in x's dtype.

    equation: as "BTNH,NHD->BTD": the dimensions summed are the last of x, the first of the kernel.
    """
    operands, output = equation.split("->")
    left, right = operands.split(",")
    count = sum(letter not in output for letter in right)
    assert left[-count:] == right[:count] and output == left[:-count] + right[count:], equation
    if rule.tile_size is not None and count > 1:
        # Tiles run through all of them.
        x = x.reshape(*x.shape[:-count], -1)
        kernel = kernel.reshape(-1, *kernel.shape[count:])
        count = 1
    return _product(Dims(tuple(range(x.ndim - count, x.ndim)), tuple(range(count))), rule, x, kernel)


def round_to_codes(
    array: jax.Array, qtype: str, shared: tuple[int, ...], over: tuple[str, ...] = (), calibration: str = "absmax"
) -> qarray.QArray:
    """Returns codes and scales of an array.

    shared: dimensions whose elements share a scale. over: mesh axes that cut these, inside of a shard_map.
    Codes of int4 are kept as int8: products of both at once are fast nowhere.
    """
    return codes_by_scale(array, qtype, _bound(array, shared, over, calibration))


def codes_by_scale(
    array: jax.Array, qtype: str, largest: jax.Array, spread: Callable[[jax.Array], jax.Array] = lambda scale: scale
) -> qarray.QArray:
    """Returns codes and scales of an array, of which `largest` are the largest magnitudes.

    spread: makes of the scales what broadcasts with the array.
    """
    # In float32: bfloat16 has too few digits to say which code is nearest.
    largest = largest.astype(jnp.float32) * HEADROOM
    scale, _ = qarray.compute_scale_zero_point({"absmax": largest}, DTYPES[qtype])
    rounded = qarray.quantize_with_scale_zero_point(array.astype(jnp.float32), DTYPES[qtype], spread(scale), None)
    return _widened(dataclasses.replace(rounded, scale=scale))


def named(operand: Operand) -> Operand:
    """Gives codes and scales the name by which a remat policy keeps them."""
    return jax.tree.map(lambda part: checkpoint_name(part, "quantization"), operand)


def dot(left: Operand, right: Operand, summed: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    """Returns the product of codes, or arrays, summed over some dimensions of each; what is left stands in order.

    An array's dtype is the result's; of codes alone it is float32.
    """
    if isinstance(left, qarray.QArray) and _is_float(right):
        left = left.astype(right.dtype)
    elif isinstance(right, qarray.QArray) and _is_float(left):
        right = right.astype(left.dtype)
    return dot_general.dot_general(left, right, (summed, ((), ())))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(dims: Dims, rule: QuantRule, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _forward(dims, rule, x, kernel)[0]


def _forward(dims: Dims, rule: QuantRule, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[Operand, Operand]]:
    coded_x = _operand(x, rule.act_qtype, dims.x, rule)
    coded_kernel = _operand(kernel, rule.weight_qtype, dims.kernel, rule)
    y = dot(coded_x, coded_kernel, (dims.x, dims.kernel)).astype(x.dtype)
    if rule.bwd_qtype is None or rule.tile_size is not None or rule.calibration != "absmax":
        # Not rounded; or the backward pass sums across tiles; or it must know what was cut off.
        return y, (x, kernel)
    return y, (named(coded_x), named(coded_kernel))


def _backward(
    dims: Dims, rule: QuantRule, residuals: tuple[Operand, Operand], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    free = tuple(range(x.ndim - len(dims.x)))
    made = tuple(range(len(free), gradient.ndim))
    out_dims = tuple(range(len(dims.kernel), kernel.ndim))
    for_x, codes = _for_backward(gradient, kernel, rule.weight_qtype, (made, out_dims), rule)
    x_gradient = dot(for_x, codes, (made, out_dims))
    for_kernel, codes = _for_backward(gradient, x, rule.act_qtype, (free, free), rule)
    # Of a product that sums over the first dimensions of both, XLA's CPU compiler is fast with the narrower one first.
    if math.prod(x.shape) < gradient.size:
        kernel_gradient = dot(codes, for_kernel, (free, free))
    else:
        turned = dot(for_kernel, codes, (free, free))
        count = len(out_dims)
        kernel_gradient = turned.transpose((*range(count, turned.ndim), *range(count)))
    if rule.calibration != "absmax":
        x_gradient = _cut(x_gradient, x, rule.act_qtype, dims.x, rule)
        kernel_gradient = _cut(kernel_gradient, kernel, rule.weight_qtype, dims.kernel, rule)
    return x_gradient.astype(gradient.dtype), kernel_gradient.astype(gradient.dtype)


_product.defvjp(_forward, _backward)


def _operand(array: jax.Array, qtype: str | None, summed: tuple[int, ...], rule: QuantRule) -> Operand:
    if qtype is None:
        return array
    if rule.tile_size is None:
        return round_to_codes(array, qtype, summed, calibration=rule.calibration)
    method = f"absmax,{HEADROOM}" if rule.calibration == "absmax" else f"rms,{RMS_RANGE * HEADROOM}"
    channels = tuple(dim for dim in range(array.ndim) if dim not in summed)
    how = qarray.HowToQuantize(
        qtype=DTYPES[qtype],
        channelwise_axes=channels,
        tiled_axes=dict.fromkeys(summed, rule.tile_size),
        calibration_method=method,
    )
    return _widened(qarray.quantize(array.astype(jnp.float32), how))


def _for_backward(
    gradient: jax.Array,
    operand: Operand,
    qtype: str | None,
    summed: tuple[tuple[int, ...], tuple[int, ...]],
    rule: QuantRule,
) -> tuple[Operand, Operand]:
    """The gradient and the operand that it is multiplied with, both rounded for the dimensions that are summed."""
    if rule.bwd_qtype is None:
        return gradient, operand
    if isinstance(operand, qarray.QArray):
        gradient, operand = gradient * _along(operand.scale, gradient, summed), operand.qvalue
    elif qtype is not None:
        operand = round_to_codes(operand, qtype, summed[1])
    return round_to_codes(gradient, rule.bwd_qtype, summed[0]), operand


def _along(scale: jax.Array, gradient: jax.Array, summed: tuple[tuple[int, ...], tuple[int, ...]]) -> jax.Array:
    """The scale of an operand in those dimensions of the gradient that the two have in common."""
    sizes = dict(zip(summed[0], (scale.shape[dim] for dim in summed[1]), strict=True))
    return scale.reshape([sizes.get(dim, 1) for dim in range(gradient.ndim)])


def _bound(array: jax.Array, shared: tuple[int, ...], over: tuple[str, ...], calibration: str) -> jax.Array:
    """The largest magnitude that has a code."""
    if calibration != "absmax":
        squares = jnp.mean(jnp.square(array.astype(jnp.float32)), axis=shared, keepdims=True)
        squares = jax.lax.pmean(squares, over) if over else squares
        return jnp.sqrt(squares) * RMS_RANGE
    largest = jnp.max(jnp.abs(array), axis=shared, keepdims=True)
    return jax.lax.pmax(largest, over) if over else largest


def _cut(
    gradient: jax.Array, array: jax.Array, qtype: str | None, summed: tuple[int, ...], rule: QuantRule
) -> jax.Array:
    """What was cut off has no gradient."""
    if qtype is None:
        return gradient
    if rule.tile_size is None:
        return jnp.where(jnp.abs(array) <= _bound(array, summed, (), rule.calibration), gradient, 0)
    (dim,) = summed
    tiles = (*array.shape[:dim], -1, rule.tile_size, *array.shape[dim + 1 :])
    inside = jnp.abs(array.reshape(tiles)) <= _bound(array.reshape(tiles), (dim + 1,), (), rule.calibration)
    return jnp.where(inside.reshape(array.shape), gradient, 0)


def _is_float(operand: Operand) -> bool:
    return not isinstance(operand, qarray.QArray) and operand.dtype.itemsize > 1


def _widened(operand: qarray.QArray) -> qarray.QArray:
    if operand.qvalue.dtype != jnp.int4:
        return operand
    return qarray.QArray(operand.qvalue.astype(jnp.int8), operand.scale, None, jnp.int8)
