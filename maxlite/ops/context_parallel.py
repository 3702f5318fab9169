"""Attention over rows whose tokens lie on several devices: keys and values are gathered, or go round in a ring.

A causal row cut into equal runs gives the last device all the work. So rows may come in the balanced order, in which
a device holds one run near the row's start and the mirrored one near its end: all devices then see equally many keys,
and in a ring they do so in every step.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from maxlite.ops.attention_types import LEAST_MAXIMUM, AttentionOptions, ContextParallel, QueryShard, Tokens
from maxlite.ops.flash_attention import flash_backward, flash_forward, mean_gradient_of, sinks_gradient

# Of options, query [B, T, K, G, H], key [B, S, K, H], value [B, S, K, Hv], the tokens of both, sinks [K, G]
# or None, and by keyword `shard`, a QueryShard: which tokens of the row the queries are, for kernels that must know it
# before the program runs. Returns [B, T, K, G, Hv].
Kernel = Callable[..., jax.Array]


def balanced_order(length: int, num_shards: int) -> np.ndarray:
    """Returns which token of a row lies at each place, [length] int32, when each shard is to have equal work.

    The row is cut into 2 * num_shards runs; shard i holds runs i and 2 * num_shards - 1 - i.

    Raises:
        ValueError: the length is not a multiple of 2 * num_shards.
    """
    return _order(length, num_shards, load_balance=True)


def _order(length: int, num_shards: int, load_balance: bool) -> np.ndarray:
    starts, size = _run_starts(length, num_shards, load_balance)
    return (starts.reshape(-1, 1) + np.arange(size, dtype=np.int32)).reshape(-1)


def _run_starts(length: int, num_shards: int, load_balance: bool) -> tuple[np.ndarray, int]:
    """Where each run of each shard starts in the row, [num_shards, runs] int32, and the length of a run."""
    num_runs = num_shards * (2 if load_balance else 1)
    if length % num_runs:
        raise ValueError(f"a row of {length} tokens cannot be cut into {num_runs} equal runs for {num_shards} shards")
    starts = np.arange(0, length, length // num_runs, dtype=np.int32)
    if load_balance:
        starts = np.stack([starts[:num_shards], starts[: num_shards - 1 : -1]], axis=1)
    return starts.reshape(num_shards, -1), length // num_runs


def context_attention(
    options: AttentionOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array | None,
    segment_ids: jax.Array | None,
    sinks: jax.Array | None,
    *,
    axes: tuple[str, ...],
    context_parallel: ContextParallel,
    kernel: Kernel,
) -> jax.Array:
    """Attention of this device's queries to the keys of all devices along `axes`; to be called inside shard_map.

    query, key, value: [B, T, K, G, H], [B, T, K, H], [B, T, K, Hv] of this device's tokens.
    positions, segment_ids: [B, T] int32 of this device's tokens; positions matter to a chunk only.
    sinks: [K, G] float32.
    axes: mesh axes of more than one device along which the rows are cut.
    kernel: attends when keys and values are gathered; it is given keys in the order of the row. A ring has its own.
    Returns: [B, T, K, G, Hv].
    """
    sharing = _Sharing(options, axes, jax.lax.axis_size(axes), query.shape[1], context_parallel.load_balance)
    # Integers, so small that a ring of them would only add to the number of messages.
    ids = sharing.gathered((positions if options.chunk is not None else None, segment_ids))
    device = jax.lax.axis_index(axes)
    if context_parallel.strategy == "ring":
        return _ring_attention(sharing, query, key, value, ids, sinks)
    assert context_parallel.strategy == "all_gather", context_parallel.strategy
    query_tokens = sharing.tokens_of(device, ids)
    key, value, ids = sharing.in_row_order((*sharing.gathered((key, value)), ids))
    key_tokens = Tokens.of_rows(key.shape[1], *ids)
    shard = QueryShard(sharing.order(), device)
    return kernel(options, query, key, value, query_tokens, key_tokens, sinks, shard=shard)


class _Overlap(NamedTuple):
    """Which of a shard's queries and of another's keys meet, as ranges of tokens, for pairs of shards that do."""

    queries: slice
    keys: slice


class _Sharing(NamedTuple):
    """How rows are shared out, static and hashable: `length` tokens on each of `num_shards` devices along `axes`."""

    options: AttentionOptions
    axes: tuple[str, ...]
    num_shards: int
    length: int
    load_balance: bool

    def order(self) -> np.ndarray:
        """Place in its row of each token of each shard: [num_shards, length] int32."""
        return _order(self.length * self.num_shards, self.num_shards, self.load_balance).reshape(self.num_shards, -1)

    def gathered(self, arrays: Any) -> Any:
        """A tree of [B, length, ...] of each shard -> [B, num_shards * length, ...], one shard after another."""
        return jax.tree.map(functools.partial(jax.lax.all_gather, axis_name=self.axes, axis=1, tiled=True), arrays)

    def in_row_order(self, arrays: Any) -> Any:
        """The same after `gathered`, but in the order of the row."""
        if not self.load_balance:
            return arrays

        def reordered(array: jax.Array) -> jax.Array:
            # Slices and a reversal, because the gradient of a take would be a scatter.
            runs = array.reshape(array.shape[0], self.num_shards, 2, -1, *array.shape[2:])
            return jnp.concatenate([runs[:, :, 0], runs[:, ::-1, 1]], axis=1).reshape(array.shape)

        return jax.tree.map(reordered, arrays)

    def tokens_of(self, shard: jax.Array, ids: tuple) -> Tokens:
        """One shard's tokens, of the gathered positions and segment_ids of all."""
        starts, size = _run_starts(self.length * self.num_shards, self.num_shards, self.load_balance)
        order = (jnp.asarray(starts)[shard][:, None] + jnp.arange(size, dtype=jnp.int32)).reshape(-1)
        start = shard * self.length
        return Tokens(
            order, *jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, start, self.length, axis=1), ids)
        )

    def sees(self) -> np.ndarray:
        """Whether a run of a shard's queries may see one of a shard's keys: [query shard, key shard, runs, runs]."""
        starts, size = _run_starts(self.length * self.num_shards, self.num_shards, self.load_balance)
        before = starts[:, None, :, None] - starts[None, :, None, :]
        reach = self.options.reach
        # The nearest pair of two runs is `before - size + 1` tokens apart.
        near = np.full(before.shape, True) if reach is None else before - size + 1 < reach
        return (before >= 0) & near

    def steps(self) -> list[range]:
        """Ranges of how many devices keys must travel; distances at which no device sees anything are left out."""
        sees = np.any(self.sees(), axis=(2, 3))
        devices = np.arange(self.num_shards)
        distances = [step for step in range(self.num_shards) if sees[devices, devices - step].any()]
        breaks = [index for index, step in enumerate(distances) if index == 0 or step != distances[index - 1] + 1]
        return [
            range(distances[first], distances[last - 1] + 1)
            for first, last in zip(breaks, [*breaks[1:], len(distances)], strict=True)
        ]

    def overlaps(self, steps: range) -> tuple[list[_Overlap | None], np.ndarray]:
        """The kinds of overlaps in these steps, and which of them each device has: [query shard, key shard] int32."""
        sees, kinds = self.sees(), []
        table = np.zeros((self.num_shards, self.num_shards), np.int32)
        for device in range(self.num_shards):
            for step in steps:
                pair = sees[device, device - step]
                overlap = _Overlap(self._range(pair.any(axis=1)), self._range(pair.any(axis=0))) if pair.any() else None
                if overlap not in kinds:
                    kinds.append(overlap)
                table[device, device - step] = kinds.index(overlap)
        return kinds, table

    def _range(self, runs: np.ndarray) -> slice:
        """The tokens of a shard from its first to its last run that is True."""
        size, (marked,) = self.length // len(runs), np.nonzero(runs)
        return slice(int(marked[0]) * size, int(marked[-1] + 1) * size)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_attention(
    sharing: _Sharing, query: jax.Array, key: jax.Array, value: jax.Array, ids: tuple, sinks: jax.Array | None
) -> jax.Array:
    """The ring: arrays of this device, but positions and segment_ids of all -> [B, T, K, G, Hv]."""
    return _ring_forward(sharing, query, key, value, ids, sinks)[0]


def _ring_forward(
    sharing: _Sharing, query: jax.Array, key: jax.Array, value: jax.Array, ids: tuple, sinks: jax.Array | None
) -> tuple[jax.Array, tuple]:
    """The output, and what the backward pass needs: the arguments, the output and its logsumexp [B, K, G, T]."""
    own_tokens = sharing.tokens_of(jax.lax.axis_index(sharing.axes), ids)
    batch, length, *heads, _ = query.shape
    context = jnp.zeros((batch, length, *heads, value.shape[-1]), jnp.float32)
    # A sink joins the denominator once, so it is where the sum starts, and no part of the keys is given it.
    start = jnp.full((*heads, 1), LEAST_MAXIMUM, jnp.float32) if sinks is None else sinks[..., None]
    normalizer = jnp.broadcast_to(start, (batch, *heads, length))

    def attend(overlap: _Overlap, arrays: tuple, key_tokens: Tokens, state: tuple) -> tuple[tuple, tuple]:
        key, value = (array[:, overlap.keys] for array in arrays)
        query_tokens, key_tokens = own_tokens.part(overlap.queries), key_tokens.part(overlap.keys)
        part = flash_forward(sharing.options, query[:, overlap.queries], key, value, query_tokens, key_tokens, None)
        return _combined(state, part, overlap.queries), ()

    (context, normalizer), _ = _go_round(sharing, ids, attend, (key, value), (context, normalizer), ())
    # Named here, inside the rule, because a policy that saved only the output would still go round again.
    context = checkpoint_name(context.astype(query.dtype), "context")
    normalizer = checkpoint_name(normalizer, "context")
    return context, (query, key, value, ids, sinks, context, normalizer)


def _combined(state: tuple, part: tuple, queries: slice) -> tuple[jax.Array, jax.Array]:
    """Outputs and logsumexps over some keys, joined by those of some queries over further keys."""
    context, normalizer = state
    old_context, old_normalizer = context[:, queries], normalizer[..., queries]
    new_context, new_normalizer = part
    joined = jnp.logaddexp(old_normalizer, new_normalizer)
    joined_context = sum(
        context.astype(jnp.float32) * jnp.exp(normalizer - joined).transpose(0, 3, 1, 2)[..., None]
        for context, normalizer in ((old_context, old_normalizer), (new_context, new_normalizer))
    )
    return context.at[:, queries].set(joined_context), normalizer.at[..., queries].set(joined)


def _ring_backward(sharing: _Sharing, residuals: tuple, context_gradient: jax.Array) -> tuple:
    """Gradients of all arrays; those of keys and values travel with them and come home at the end."""
    query, key, value, ids, sinks, context, normalizer = residuals
    own_tokens = sharing.tokens_of(jax.lax.axis_index(sharing.axes), ids)
    mean_gradient = mean_gradient_of(context, context_gradient)
    zeros = jax.tree.map(lambda array: jnp.zeros(array.shape, jnp.float32), (query, key, value))

    def attend(overlap: _Overlap, arrays: tuple, key_tokens: Tokens, state: jax.Array) -> tuple[jax.Array, tuple]:
        queries, keys = overlap
        query_part, key_part, value_part = flash_backward(
            sharing.options,
            query[:, queries],
            arrays[0][:, keys],
            arrays[1][:, keys],
            own_tokens.part(queries),
            key_tokens.part(keys),
            normalizer[..., queries],
            mean_gradient[..., queries],
            context_gradient[:, queries],
        )
        gradients = zip(zeros[1:], (key_part, value_part), strict=True)
        return state.at[:, queries].add(query_part), tuple(zero.at[:, keys].set(part) for zero, part in gradients)

    query_gradient, gradients = _go_round(sharing, ids, attend, (key, value), zeros[0], zeros[1:])
    key_gradient, value_gradient = (
        gradient.astype(array.dtype) for gradient, array in zip(gradients, (key, value), strict=True)
    )
    sink_gradient = sinks_gradient(sinks, normalizer, mean_gradient)
    return query_gradient.astype(query.dtype), key_gradient, value_gradient, None, sink_gradient


_ring_attention.defvjp(_ring_forward, _ring_backward)


def _go_round(
    sharing: _Sharing, ids: tuple, attend: Callable, arrays: tuple, state: Any, zeros: tuple
) -> tuple[Any, tuple]:
    """Brings the keys and values of every device that this one may see, calls `attend`, and brings sums home.

    attend: (overlap, arrays, their tokens, state) -> (state, what it adds to the sums that belong to the arrays).
    zeros: the sums' start.
    Returns: the state, and for this device's arrays the sums of what all devices added.
    """
    device = jax.lax.axis_index(sharing.axes)

    def go(distance: int, moved: Any) -> Any:
        """To the device `distance` further on."""
        pairs = [(index, (index + distance) % sharing.num_shards) for index in range(sharing.num_shards)]
        return jax.tree.map(lambda array: jax.lax.ppermute(array, sharing.axes, pairs), moved) if distance else moved

    def meet(steps: range, distance: int | jax.Array, arrays: tuple, state: Any) -> tuple[Any, tuple]:
        """Arrays that have come `distance` devices far, which is one of `steps`."""
        shard = (device - distance) % sharing.num_shards
        overlaps, table = sharing.overlaps(steps)
        key_tokens = sharing.tokens_of(shard, ids)
        branches = [
            functools.partial(attend, overlap, arrays, key_tokens) if overlap else lambda state: (state, zeros)
            for overlap in overlaps
        ]
        return jax.lax.switch(jnp.asarray(table)[device, shard], branches, state)

    def follow(steps: range, carry: tuple, distance: int | jax.Array) -> tuple[tuple, None]:
        """A further step. The sums come one step after their arrays, so that both travel while this step computes."""
        here, sums, state = carry
        coming, sums = go(1, here), go(1, sums)
        state, added = meet(steps, distance, here, state)
        return (coming, jax.tree.map(jnp.add, sums, added), state), None

    totals = zeros
    for steps in sharing.steps():
        here = go(steps[0], arrays)
        coming = go(1, here)
        state, sums = meet(steps[:1], steps[0], here, state)
        if len(steps) > 2:
            loop = functools.partial(follow, steps[1:-1])
            (coming, sums, state), _ = jax.lax.scan(loop, (coming, sums, state), jnp.arange(steps[1], steps[-1]))
        if len(steps) > 1:
            # Not in the loop: what it would send on is dropped from the program here, as nothing uses it.
            (_, sums, state), _ = follow(steps[-1:], (coming, sums, state), steps[-1])
        totals = jax.tree.map(jnp.add, totals, go(-steps[-1], sums))
    return state, totals
