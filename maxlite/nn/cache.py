"""The key-value cache, as plain pytrees: an argument of the forward pass and a result of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class LayerCache(NamedTuple):
    """Keys (rotated) and values of one layer: key, value: [B, S, K, H]."""

    key: jax.Array
    value: jax.Array


class Cache(NamedTuple):
    """What a model remembers of the tokens so far.

    layers: for each layer group, what each block of its pattern keeps (keys and values: a LayerCache), stacked over
        the repeats; for decoding, where layers are taken apart, a tuple of the repeats instead.
    positions: [B, S] int32, the position of the token in each slot.
    segment_ids: [B, S] int32, 0 where a slot holds nothing.
    index: int32, the slot that the next token is written to, the same in all rows.
    """

    layers: dict[str, Any]
    positions: jax.Array
    segment_ids: jax.Array
    index: jax.Array


def write_slots(stored: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    """Writes `new` [B, T, ...] into `stored` [B, S, ...] at slots index .. index + T - 1."""
    starts = (0, index) + (0,) * (stored.ndim - 2)
    return jax.lax.dynamic_update_slice(stored, new.astype(stored.dtype), starts)


def write_tokens(cache: Cache, positions: jax.Array, segment_ids: jax.Array) -> Cache:
    """Notes the tokens [B, T] about to be written; their keys and values follow layer by layer."""
    return cache._replace(
        positions=write_slots(cache.positions, positions, cache.index),
        segment_ids=write_slots(cache.segment_ids, segment_ids, cache.index),
        index=cache.index + jnp.int32(positions.shape[1]),
    )
