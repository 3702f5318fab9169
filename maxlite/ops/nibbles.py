"""Two numbers of four bits in a byte."""

import jax
import jax.numpy as jnp


def pack_nibbles(values: jax.Array, axis: int) -> jax.Array:
    """Returns two neighbours along `axis` in one byte, the first in its low bits.

    values: int8 from -8 to 7, or uint8 from 0 to 15; an even number along `axis`.
    Returns: uint8, half as many along `axis`.
    """
    axis %= values.ndim
    bits = jax.lax.bitcast_convert_type(values, jnp.uint8).reshape(*_paired(values.shape, axis))
    low, high = (jax.lax.index_in_dim(bits, part, axis + 1, keepdims=False) for part in (0, 1))
    return (low & 0xF) | (high << 4)


def unpack_nibbles(packed: jax.Array, axis: int) -> jax.Array:
    """Returns int8 from -8 to 7, twice as many along `axis`. Numbers from 0 to 15 are what this leaves of `& 15`.

    packed: uint8, of pack_nibbles.
    """
    axis %= packed.ndim
    # Shifted where they stand, without two halves to be joined, so that this can be a part of what reads them.
    shifts = jnp.array([4, 0], jnp.int8).reshape(2, *(1,) * (packed.ndim - 1 - axis))
    both = jax.lax.bitcast_convert_type(jnp.expand_dims(packed, axis + 1), jnp.int8) << shifts
    return (both >> 4).reshape(*packed.shape[:axis], -1, *packed.shape[axis + 1 :])


def _paired(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] // 2, 2, *shape[axis + 1 :])
