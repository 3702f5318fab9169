"""Numbers of a key-value cache in few bits: each is rounded to nearest once, when its token is written.

A key has a few features that are far larger than the others, and a scale for all of them would leave the others none
of the few bits. So the features are mixed before they are rounded, by an orthogonal matrix of entries of about one
size, which spreads the large ones over all (QuaRot, Ashkboos et al. 2024, arXiv:2404.00456). Products with keys stay
what they are when the queries are mixed too; a sum of values is unmixed once.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.ops.nibbles import pack_nibbles, unpack_nibbles

# What the largest number of those that share a scale becomes. In int8 that is an integer, and the number stays exact;
# in int4 nearly half a step further, by which all steps are smaller. At just half a step the last bit of a division
# would choose between two codes. No number is off by more than half a step.
_LARGEST = {"int8": 127.0, "int4": 7.4999}
_BITS = {"int8": 8, "int4": 4}


class RoundedSlots(NamedTuple):
    """A token's mixed numbers as integers times a scale.

    codes: [B, S, ..., H] int8; of int4 [B, S, ..., H/2] uint8, two numbers a byte.
    scale: float32, as many dimensions as the numbers, with size 1 along those that share a scale.
    """

    codes: jax.Array
    scale: jax.Array


def empty_rounded_slots(shape: tuple[int, ...], dtype: str, axis: str) -> RoundedSlots:
    """Returns zeros. shape: [B, S, ..., H]; dtype: int8 or int4, then H is even.

    axis: "dkv", the H numbers of a token and head share a scale, or "heads_and_dkv", all of a token do.
    """
    assert dtype == "int8" or shape[-1] % 2 == 0, "checked with the config"
    scales = (*shape[:-1], 1) if axis == "dkv" else (*shape[:2], *(1,) * (len(shape) - 2))
    codes = jnp.zeros(shape, jnp.int8) if dtype == "int8" else jnp.zeros((*shape[:-1], shape[-1] // 2), jnp.uint8)
    return RoundedSlots(codes, jnp.zeros(scales, jnp.float32))


def round_as(slots: RoundedSlots, numbers: jax.Array) -> RoundedSlots:
    """Returns numbers [B, T, ..., H], mixed and rounded to the integers of `slots`, with scales for as many of them."""
    dtype = _dtype(slots)
    shared = tuple(dim for dim in range(2, numbers.ndim) if slots.scale.shape[dim] == 1)
    numbers = mixed(numbers.astype(jnp.float32))
    scale = jnp.max(jnp.abs(numbers), axis=shared, keepdims=True) / _LARGEST[dtype]
    end = 2 ** (_BITS[dtype] - 1)
    steps = jnp.round(numbers / jnp.where(scale == 0.0, 1.0, scale))
    codes = jnp.clip(steps, -end, end - 1).astype(jnp.int8)
    return RoundedSlots(codes if dtype == "int8" else pack_nibbles(codes, -1), scale)


def integers(slots: RoundedSlots, dtype: jnp.dtype) -> jax.Array:
    """Returns the mixed numbers without their scale: [B, S, ..., H], which any float dtype holds exactly."""
    codes = slots.codes if _dtype(slots) == "int8" else unpack_nibbles(slots.codes, -1)
    return codes.astype(dtype)


def mixed_numbers(slots: RoundedSlots, dtype: jnp.dtype) -> jax.Array:
    """Returns the mixed numbers: [B, S, ..., H]."""
    return (integers(slots, jnp.dtype(jnp.float32)) * slots.scale).astype(dtype)


def mixed(x: jax.Array) -> jax.Array:
    """Mixes the last dimension: [..., H] -> [..., H]."""
    return _times(x, _mixing(x.shape[-1]))


def unmixed(x: jax.Array) -> jax.Array:
    """Undoes `mixed`."""
    return _times(x, _mixing(x.shape[-1]).T)


def _times(x: jax.Array, matrix: np.ndarray) -> jax.Array:
    made = jnp.matmul(x, matrix.astype(x.dtype), precision="highest", preferred_element_type=jnp.float32)
    return made.astype(x.dtype)


@functools.cache
def _mixing(size: int) -> np.ndarray:
    """An orthogonal matrix: Sylvester's of the power of two in `size`, times the cosines of what is left."""
    rest = size
    matrix = np.ones((1, 1))
    while rest % 2 == 0:
        rest //= 2
        matrix = np.kron(matrix, [[1.0, 1.0], [1.0, -1.0]]) / np.sqrt(2.0)
    frequency, place = np.mgrid[:rest, :rest]
    cosines = np.sqrt(np.where(frequency == 0, 1.0, 2.0) / rest) * np.cos(np.pi * (place + 0.5) * frequency / rest)
    return np.kron(matrix, cosines).astype(np.float32)


def _dtype(slots: RoundedSlots) -> str:
    return "int8" if slots.codes.dtype == jnp.int8 else "int4"
