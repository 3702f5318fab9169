"""Kernels in few bits: how they are packed, rounded, multiplied and made floats again.

A stored kernel is two arrays. `codes` has the kernel's shape: int8, or float8_e4m3fn; int4 and nf4 are two values a
byte, neighbours in the last summed dimension, the first one in the low half. Shape and dtype tell how a kernel is
stored: bytes of int4 are int8, because it has a sign, those of nf4 uint8. `scale`, float32, has the kernel's
dimensions, but in place of the summed ones the number of tiles: runs of summed elements, counted through the summed
dimensions in order, that share a scale. An element is its code's level times its scale. Levels of integers and fp8
are the numbers themselves, those of nf4 the 16 of NormalFloat (Dettmers et al. 2023, arXiv:2305.14314, appendix E).
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.ops.nibbles import pack_nibbles, unpack_nibbles
from maxlite.ops.product import product

NF4_LEVELS = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453]
    + [-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0]
    + [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
    + [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    np.float32,
)
# What the largest element of a tile becomes. With integers that is nearly half a step further than they go: it is
# rounded by half a step like any other, and all are rounded more finely. At just half a step the last bit of a
# division, which may be computed in several ways, would choose between two codes.
_LARGEST = {"int8": 127.4999, "int4": 7.49999, "nf4": 1.0, "fp8": 448.0}
_DTYPES = {"int8": jnp.int8, "int4": jnp.int8, "nf4": jnp.uint8, "fp8": jnp.float8_e4m3fn}
_PACKED = ("int4", "nf4")


def contracted_dims(equation: str) -> tuple[int, ...]:
    """Returns the dimensions of an einsum's second operand that it sums over: neighbours, in order."""
    operands, output = equation.split("->")
    return tuple(place for place, letter in enumerate(operands.split(",")[1]) if letter not in output)


def code_dtype(qtype: str) -> jnp.dtype:
    """Returns the dtype of `codes`."""
    return jnp.dtype(_DTYPES[qtype])


def is_packed(qtype: str) -> bool:
    """Says whether two values make a byte."""
    return qtype in _PACKED


def code_shape(shape: Sequence[int], contracted: Sequence[int], qtype: str) -> tuple[int, ...]:
    """Returns the shape of `codes` for a kernel of `shape`; two values a byte need an even last summed size."""
    halved = contracted[-1] if is_packed(qtype) else None
    assert halved is None or shape[halved] % 2 == 0, shape
    return tuple(size // 2 if place == halved else size for place, size in enumerate(shape))


def stored_type(
    codes_shape: Sequence[int], dtype: jnp.dtype | str, shape: Sequence[int], contracted: Sequence[int]
) -> str | None:
    """Returns as what a kernel of `shape` is stored by codes of such a shape and dtype; None if as nothing known."""
    for qtype, known in _DTYPES.items():
        fits = not is_packed(qtype) or shape[contracted[-1]] % 2 == 0
        if jnp.dtype(dtype) == known and fits and tuple(codes_shape) == code_shape(shape, contracted, qtype):
            return qtype
    return None


def kernel_shape(codes: jax.Array, contracted: Sequence[int], qtype: str) -> tuple[int, ...]:
    """Returns the shape of the kernel that `codes` stand for."""
    doubled = contracted[-1] if is_packed(qtype) else None
    return tuple(size * 2 if place == doubled else size for place, size in enumerate(codes.shape))


def scale_shape(shape: Sequence[int], contracted: Sequence[int], tile_size: int | None) -> tuple[int, ...]:
    """Returns the shape of `scale`; tile_size: None for one scale a channel.

    Tiles have at most tile_size elements, and are as large as each other but for the last. Where they do not end
    with rows of the summed dimensions, the first of these has them all.
    """
    total = math.prod(shape[place] for place in contracted)
    tile_size = min(total, tile_size or total)
    tiles, left = dict.fromkeys(contracted, 1), tile_size
    for place in reversed(contracted):
        if shape[place] % left == 0:
            tiles[place], left = shape[place] // left, 1
        elif left % shape[place] == 0:
            left //= shape[place]
        else:
            tiles = dict.fromkeys(contracted, 1) | {contracted[0]: -(-total // tile_size)}
            break
    return tuple(tiles.get(place, size) for place, size in enumerate(shape))


def quantize_kernel(
    kernel: jax.Array, contracted: Sequence[int], qtype: str, tile_size: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Rounds each element to the nearest level.

    contracted: which dimensions are summed. Others, as those of layers or of experts, may stand before them.
    Returns: codes, scale. An integer's element moves by half its scale at most.
    """
    shape = scale_shape(kernel.shape, contracted, tile_size)
    tiles = _tiled(kernel.astype(jnp.float32), contracted, _num_tiles(shape, contracted))
    # Where all are zero any scale serves but zero.
    largest = jnp.max(jnp.abs(tiles), axis=2) / _LARGEST[qtype]
    scale = jnp.maximum(largest, jnp.finfo(jnp.float32).tiny)
    return codes_for(kernel, scale.reshape(shape), contracted, qtype), scale.reshape(shape)


def codes_for(kernel: jax.Array, scale: jax.Array, contracted: Sequence[int], qtype: str) -> jax.Array:
    """Returns the codes whose levels are nearest to the kernel's elements by the scales given."""
    scaled = kernel.astype(jnp.float32) / expand_scale(scale, kernel.shape, contracted)
    if qtype == "fp8":
        return jnp.clip(scaled, -_LARGEST[qtype], _LARGEST[qtype]).astype(jnp.float8_e4m3fn)
    if qtype == "nf4":
        midpoints = (NF4_LEVELS[1:] + NF4_LEVELS[:-1]) / 2
        values = jnp.zeros(scaled.shape, jnp.int8)
        for point in midpoints:
            values += scaled > point
    else:
        highest = math.floor(_LARGEST[qtype])
        values = jnp.clip(jnp.round(scaled), -highest - 1, highest).astype(jnp.int8)
    return pack(values, contracted, qtype)


def pack(values: jax.Array, contracted: Sequence[int], qtype: str) -> jax.Array:
    """values: int8 of the kernel's shape: the numbers, of nf4 the places among its levels. Returns: codes."""
    if not is_packed(qtype):
        return values
    return jax.lax.bitcast_convert_type(pack_nibbles(values, contracted[-1]), code_dtype(qtype))


def unpack(codes: jax.Array, contracted: Sequence[int], qtype: str) -> jax.Array:
    """Undoes `pack`: int8 of the kernel's shape; fp8 as it is."""
    if not is_packed(qtype):
        return codes
    values = unpack_nibbles(jax.lax.bitcast_convert_type(codes, jnp.uint8), contracted[-1])
    return values & 15 if qtype == "nf4" else values


def dequantize_kernel(
    codes: jax.Array, scale: jax.Array, contracted: Sequence[int], qtype: str, dtype: jnp.dtype
) -> jax.Array:
    """Returns the kernel as floats."""
    levels = _levels(codes, contracted, qtype)
    return (levels * expand_scale(scale, levels.shape, contracted)).astype(dtype)


def expand_scale(scale: jax.Array, shape: Sequence[int], contracted: Sequence[int]) -> jax.Array:
    """Returns the scale of each element of a kernel of `shape`, float32; of one tile, what broadcasts to it."""
    count = _num_tiles(scale.shape, contracted)
    if count == 1:
        return scale
    before, total, after = _flat_sizes(shape, contracted)
    size = -(-total // count)
    wide = jnp.broadcast_to(scale.reshape(before, count, 1, after), (before, count, size, after))
    return wide.reshape(before, count * size, after)[:, :total].reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 4))
def stored_product(equation: str, x: jax.Array, codes: jax.Array, scale: jax.Array, qtype: str) -> jax.Array:
    """Returns the einsum of x and a stored kernel, in x's dtype, in which alone it has a gradient.

    The backward pass makes the kernel anew, so that the floats of one layer are all there ever are.
    """
    contracted = contracted_dims(equation)
    # Inside the loop over new tokens the floats are the same each time: the compiler would make those of all layers
    # before it, and keep them.
    x, codes = jax.lax.optimization_barrier((x, codes))
    if _num_tiles(scale.shape, contracted) > 1:
        return product(equation, x, dequantize_kernel(codes, scale, contracted, qtype, x.dtype))
    y: jax.Array = product(equation, x, _levels(codes, contracted, qtype).astype(x.dtype))
    return (y * _along_output(equation, scale)).astype(x.dtype)


def _forward(
    equation: str, x: jax.Array, codes: jax.Array, scale: jax.Array, qtype: str
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return stored_product(equation, x, codes, scale, qtype), (codes, scale)


def _backward(
    equation: str, qtype: str, residuals: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, None, None]:
    codes, scale = residuals
    contracted = contracted_dims(equation)
    operands, output = equation.split("->")
    left, right = operands.split(",")
    if _num_tiles(scale.shape, contracted) > 1:
        kernel = dequantize_kernel(codes, scale, contracted, qtype, gradient.dtype)
    else:
        kernel = _levels(codes, contracted, qtype).astype(gradient.dtype)
        gradient = (gradient * _along_output(equation, scale)).astype(gradient.dtype)
    return jnp.einsum(f"{output},{right}->{left}", gradient, kernel), None, None


stored_product.defvjp(_forward, _backward)


def _levels(codes: jax.Array, contracted: Sequence[int], qtype: str) -> jax.Array:
    """float32 of the kernel's shape."""
    values = unpack(codes, contracted, qtype)
    return jnp.asarray(NF4_LEVELS)[values] if qtype == "nf4" else values.astype(jnp.float32)


def _along_output(equation: str, scale: jax.Array) -> jax.Array:
    """A scale of one tile, in the dimensions of the output that the kernel has too."""
    operands, output = equation.split("->")
    sizes = dict(zip(operands.split(",")[1], scale.shape, strict=True))
    return scale.reshape([sizes.get(letter, 1) for letter in output])


def _num_tiles(scale_shape: Sequence[int], contracted: Sequence[int]) -> int:
    return math.prod(scale_shape[place] for place in contracted)


def _flat_sizes(shape: Sequence[int], contracted: Sequence[int]) -> tuple[int, int, int]:
    """Elements before, in and after the summed dimensions."""
    first, last = contracted[0], contracted[-1]
    assert list(contracted) == list(range(first, last + 1)), "summed dimensions are neighbours"
    return math.prod(shape[:first]), math.prod(shape[first : last + 1]), math.prod(shape[last + 1 :])


def _tiled(kernel: jax.Array, contracted: Sequence[int], count: int) -> jax.Array:
    """Returns [before, tiles, elements, after], the last tile filled up with zeros."""
    before, total, after = _flat_sizes(kernel.shape, contracted)
    size = -(-total // count)
    flat = jnp.pad(kernel.reshape(before, total, after), ((0, 0), (0, count * size - total), (0, 0)))
    return flat.reshape(before, count, size, after)
