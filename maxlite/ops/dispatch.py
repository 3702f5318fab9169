"""Tokens on the way to the devices that hold their experts, and back; each function is what one device does.

Two ways: rows sorted by expert, as many as there are (`dropless`), or buffers of a fixed size for each expert and row
of the batch, which drop what does not fit (`with_capacity`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlite.ops.experts import Places, RowGroups, from_experts, group_by_expert, row_groups, to_experts

MeshAxes = tuple[str, ...]
# The experts' gated MLPs on rows sorted by expert [R, D]; without groups, on buffers [E, R, D].
RunExperts = Callable[[jax.Array, RowGroups | None], jax.Array]


def dropless(run: RunExperts, slots: jax.Array, experts: jax.Array, num_experts: int, axes: MeshAxes) -> jax.Array:
    """Runs each slot through its expert, wherever that is.

    slots: [M, D], a row for each choice of each token.
    experts: [..., k] int32, in the same order.
    axes: mesh axes that the experts lie along.
    Returns: [M, D].
    """
    places, groups = group_by_expert(experts, num_experts)
    rows = to_experts(slots, places)
    if not axes:
        return from_experts(run(rows, groups), places)
    counts = jax.lax.all_gather(groups.sizes, axes)
    devices, k = counts.shape[0], experts.shape[-1]
    # A token's choices differ, so it sends no more than one row to each expert there.
    width = slots.shape[0] // k * min(k, num_experts // devices)
    arrived = row_groups(jnp.sum(_arriving(counts, axes), axis=0), slots.shape[0])
    exchange = Exchange(axes, width, rows.shape[0], devices * width + arrived.blocks[-1])
    return from_experts(_move(exchange, True, counts, run(_move(exchange, False, counts, rows), arrived)), places)


def with_capacity(run: RunExperts, slots: jax.Array, places: Places, num_experts: int, axes: MeshAxes) -> jax.Array:
    """Runs each slot that `places` of `group_by_capacity` has room for through its expert.

    slots: [M, D].
    axes: mesh axes that the experts lie along.
    Returns: [M, D], zeros for slots that were dropped.
    """
    buffers = to_experts(slots, places).reshape(num_experts, -1, slots.shape[-1])
    if axes:
        # [E, R, D] of one device -> [E/P, P x R, D], all devices' for the experts here.
        buffers = jax.lax.all_to_all(buffers, axes, 0, 1, tiled=True)
    buffers = run(buffers, None)
    if axes:
        buffers = jax.lax.all_to_all(buffers, axes, 1, 0, tiled=True)
    return from_experts(buffers.reshape(-1, slots.shape[-1]), places)


class Exchange(NamedTuple):
    """Between devices along `axes`, each with its own rows sorted by expert and with an equal share of the experts.

    axes: mesh axes that the experts lie along.
    width: as many rows one device may send to another.
    num_sent: rows of a device's own, with padding at the end.
    num_received: rows that it gets at most, with padding at the end.
    """

    axes: MeshAxes
    width: int
    num_sent: int
    num_received: int


class _Slices(NamedTuple):
    """What a device sends and gets, one slice of rows for each expert: the arguments of `lax.ragged_all_to_all`.

    Each [E] int32: where a slice begins here, its rows, where it begins at its receiver; rows of each slice that comes.
    """

    here: jax.Array
    rows: jax.Array
    there: jax.Array
    arriving: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _move(exchange: Exchange, home: bool, counts: jax.Array, rows: jax.Array) -> jax.Array:
    """Takes rows [num_sent, D] sorted by expert to [num_received, D], sorted by the experts here; or those home.

    counts: [P, E] int32, all devices' rows for each expert. Every row has one place there, so the gradient is the way
    back.
    """
    slices = _slices(counts, exchange.axes, home)
    length = exchange.num_sent if home else exchange.num_received
    # XLA has no ragged exchange on CPUs.
    padded = functools.partial(_padded_all_to_all, exchange.axes, exchange.width, length)
    ragged = functools.partial(_ragged_all_to_all, exchange.axes, length)
    return jax.lax.platform_dependent(rows, slices, cpu=padded, default=ragged)


def _move_forward(exchange: Exchange, home: bool, counts: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _move(exchange, home, counts, rows), counts


def _move_backward(exchange: Exchange, home: bool, counts: jax.Array, gradient: jax.Array) -> tuple[None, jax.Array]:
    return None, _move(exchange, not home, counts, gradient)


_move.defvjp(_move_forward, _move_backward)


def _arriving(counts: jax.Array, axes: MeshAxes) -> jax.Array:
    """[P, E/P]: rows that each device sends here, for each expert here."""
    devices, num_experts = counts.shape
    return counts.reshape(devices, devices, num_experts // devices)[:, jax.lax.axis_index(axes)]


def _slices(counts: jax.Array, axes: MeshAxes, home: bool) -> _Slices:
    """Slices are listed receiver by receiver, and those that come sender by sender, each by expert."""
    devices, num_experts = counts.shape
    here = jax.lax.axis_index(axes)
    # starts[s, e]: where device s has its rows for expert e.
    starts = _sums_before(counts)
    # places[d, e, s]: where device d, which holds it, has the rows for its expert e that came from s.
    by_holder = counts.reshape(devices, devices, -1).transpose(1, 2, 0)
    places = _sums_before(by_holder.reshape(devices, -1)).reshape(by_holder.shape)
    arriving = _arriving(counts, axes).reshape(num_experts)
    own_starts, own_places = starts[here], places[:, :, here].reshape(num_experts)
    if not home:
        return _Slices(own_starts, counts[here], own_places, arriving)
    began = starts.reshape(devices, devices, -1)[:, here].reshape(num_experts)
    return _Slices(places[here].T.reshape(num_experts), arriving, began, counts[here])


def _sums_before(sizes: jax.Array) -> jax.Array:
    """Sums of all that is to the left in the last dimension."""
    return jnp.cumsum(sizes, axis=-1) - sizes


def _ragged_all_to_all(axes: MeshAxes, length: int, rows: jax.Array, slices: _Slices) -> jax.Array:
    output = jnp.zeros((length, rows.shape[1]), rows.dtype)
    return jax.lax.ragged_all_to_all(rows, output, *slices, axis_name=axes)


def _padded_all_to_all(axes: MeshAxes, width: int, length: int, rows: jax.Array, slices: _Slices) -> jax.Array:
    """The same by an exchange of equal parts: `width` rows, zeros at their end, from each device to each."""
    devices = jax.lax.axis_size(axes)
    here, sent = slices.here.reshape(devices, -1), slices.rows.reshape(devices, -1)
    packed = jnp.take(rows, jax.vmap(lambda *of: _sources(width, rows.shape[0], *of))(here, sent), axis=0, **_ZEROS)
    came = jax.lax.all_to_all(packed, axes, 0, 0, tiled=True).reshape(devices * width, -1)
    arriving = slices.arriving.reshape(devices, -1)
    begins = (_sums_before(arriving) + width * jnp.arange(devices)[:, None]).reshape(-1)
    places = jax.lax.all_to_all(slices.there, axes, 0, 0, tiled=True)
    # Slices as they follow each other in the result; those of no rows share a place with the next, and go last.
    by_place = jnp.argsort(jnp.where(slices.arriving == 0, length, places))
    return jnp.take(
        came, _sources(length, came.shape[0], begins[by_place], slices.arriving[by_place]), axis=0, **_ZEROS
    )


_ZEROS: dict[str, Any] = {"mode": "fill", "fill_value": 0}


def _sources(length: int, outside: int, begins: jax.Array, sizes: jax.Array) -> jax.Array:
    """Where each of `length` rows comes from when slices follow each other: [length]; `outside` after the last."""
    ends = jnp.cumsum(sizes)
    place = jnp.arange(length)
    of_slice = jnp.minimum(jnp.searchsorted(ends, place, side="right"), sizes.size - 1)
    return jnp.where(place < ends[-1], begins[of_slice] + place - (ends - sizes)[of_slice], outside)


def capacity(factor: float, length: int, num_experts_per_tok: int, num_experts: int) -> int:
    """Returns the tokens of one row that an expert has room for: `factor` times an even share, rounded up."""
    return min(length, -int(-factor * length * num_experts_per_tok // num_experts))


def group_by_capacity(experts: jax.Array, real: jax.Array, num_experts: int, room: int) -> Places:
    """Gives each row's tokens, in order of position, a place with their experts, while there is `room`.

    experts: [R, T, k] int32.
    real: [R, T] bool; padding gets no place.
    """
    num_rows, length, k = experts.shape
    wanted = jnp.where(real[:, :, None], experts, num_experts).reshape(num_rows, length * k)
    chosen = wanted[:, :, None] == jnp.arange(num_experts)
    before = jnp.cumsum(chosen, axis=1, dtype=jnp.int32)
    rank = jnp.sum(jnp.where(chosen, before, 0), axis=-1) - 1
    num_slots, num_places = experts.size, num_experts * num_rows * room
    place = (wanted * num_rows + jnp.arange(num_rows)[:, None]) * room + rank
    fits = (wanted < num_experts) & (rank < room)
    inverse = jnp.where(fits, place, num_places).reshape(-1)
    empty = jnp.full(num_places, num_slots, jnp.int32)
    return Places(empty.at[inverse].set(jnp.arange(num_slots, dtype=jnp.int32), mode="drop"), inverse)
