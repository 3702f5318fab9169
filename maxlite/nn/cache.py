"""The key-value cache, as plain pytrees: an argument of the forward pass and a result of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlite.config.compute_schema import ComputeConfig
from maxlite.ops.kv_quantization import RoundedSlots, empty_rounded_slots, mixed, mixed_numbers, round_as, unmixed

# Numbers of the tokens in each slot: as they are, or rounded with quantize_kvcache.
Slots = jax.Array | RoundedSlots


class LayerCache(NamedTuple):
    """Keys (rotated) and values of one layer: key, value: [B, S, K, H]."""

    key: Slots
    value: Slots


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


def empty_slots(shape: tuple[int, ...], compute: ComputeConfig) -> Slots:
    """Returns slots for numbers [B, S, ..., H], in the form that the config asks for."""
    if compute.quantize_kvcache:
        return empty_rounded_slots(shape, compute.kv_quant_dtype, compute.kv_quant_axis)
    return jnp.zeros(shape, compute.dtype)


def write_slots(stored: Slots, new: jax.Array, index: jax.Array) -> Slots:
    """Writes `new` [B, T, ...] into `stored` [B, S, ...] at slots index .. index + T - 1, in the form stored."""
    if isinstance(stored, RoundedSlots):
        codes, scale = round_as(stored, new)
        return RoundedSlots(_write(stored.codes, codes, index), _write(stored.scale, scale, index))
    return _write(stored, new, index)


def read_slots(stored: Slots, dtype: jnp.dtype) -> jax.Array:
    """Returns the numbers [B, S, ..., H] as they are stored: rounded ones are mixed, see as_stored."""
    return mixed_numbers(stored, dtype) if isinstance(stored, RoundedSlots) else stored


def as_stored(x: jax.Array, stored: Slots) -> jax.Array:
    """Returns x [..., H] so that its products with stored numbers are those with the numbers themselves."""
    return mixed(x) if isinstance(stored, RoundedSlots) else x


def as_written(x: jax.Array, stored: Slots) -> jax.Array:
    """Returns a sum of stored numbers [..., H] as one of the numbers that were written."""
    return unmixed(x) if isinstance(stored, RoundedSlots) else x


def write_tokens(cache: Cache, positions: jax.Array, segment_ids: jax.Array) -> Cache:
    """Notes the tokens [B, T] about to be written; their keys and values follow layer by layer."""
    return cache._replace(
        positions=_write(cache.positions, positions, cache.index),
        segment_ids=_write(cache.segment_ids, segment_ids, cache.index),
        index=cache.index + jnp.int32(positions.shape[1]),
    )


def _write(stored: jax.Array, new: jax.Array, index: jax.Array) -> jax.Array:
    starts = (0, index) + (0,) * (stored.ndim - 2)
    return jax.lax.dynamic_update_slice(stored, new.astype(stored.dtype), starts)
