"""Blockwise attention in plain JAX, after FlashAttention-2 (Dao 2023, arXiv:2307.08691): no buffer grows as T x S.

Queries and keys are cut into tiles of a fixed size. A tile of queries meets the tiles of keys one after another, with a
running maximum and a running total; pairs of tiles in which causality, the window or the chunk lets nothing be seen are
left out. The backward pass computes the probabilities again from the logsumexp.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.ops.attention_types import LEAST_MAXIMUM, UNSEEN_SCORE, AttentionOptions, Tokens, visible
from maxlite.ops.soft_cap import soft_capped

# The most tokens of a tile, of queries and of keys. The scores of a pair of tiles should stay in a CPU's cache.
TILE = 128

# The order of keys that only fill up the last tile: after every query. Queries that do so are zeros, and their output
# has no gradient.
AFTER_ALL = 2**30

_einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

# Running maximum and total [B, K, G, t] and output [B, K, G, t, Hv] of a tile of queries, float32.
_Running = tuple[jax.Array, jax.Array, jax.Array]
# Gradients: of a tile of queries [B, K, G, t, H], of all tiles of keys [n, B, K, H, s] and of values, float32.
_Sums = tuple[jax.Array, jax.Array, jax.Array]


class _Queries(NamedTuple):
    """A tile of queries [B, K, G, t, H] and its tokens; or all tiles, with a leading dimension."""

    query: jax.Array
    tokens: Tokens


class _Gradients(NamedTuple):
    """What a backward pass knows of a tile: two of [B, K, G, t], context_gradient [B, K, G, t, Hv]; or of all."""

    normalizer: jax.Array
    mean_gradient: jax.Array
    context_gradient: jax.Array


class _Keys(NamedTuple):
    """A tile of keys [B, K, s, H] and values [B, K, s, Hv], and its tokens; or all tiles, with a leading dimension."""

    key: jax.Array
    value: jax.Array
    tokens: Tokens

    def tile(self, index: jax.Array) -> "_Keys":
        """One of all tiles."""
        return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, index, 0, keepdims=False), self)


class _Meetings(NamedTuple):
    """The tiles of keys that a tile of queries meets: the first `count` of `tiles` [m]; or of all, [n] and [n, m]."""

    tiles: jax.Array
    count: jax.Array


_BackwardTile = tuple[_Queries, _Gradients, _Meetings]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash_attention(
    options: AttentionOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_tokens: Tokens,
    key_tokens: Tokens,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attention whose backward pass needs the output and its logsumexp only; both can be saved as "context".

    query, key, value: [B, T, K, G, H], [B, S, K, H], [B, S, K, Hv]. sinks: [K, G] float32.
    Returns: [B, T, K, G, Hv], zeros where a query sees nothing.
    """
    return flash_forward(options, query, key, value, query_tokens, key_tokens, sinks)[0]


def _forward(options: AttentionOptions, *arguments: Any) -> tuple[jax.Array, tuple]:
    context, normalizer = flash_forward(options, *arguments)
    # Named here, inside the rule, because a policy that saved only the output would still compute all scores again.
    context, normalizer = checkpoint_name(context, "context"), checkpoint_name(normalizer, "context")
    return context, (*arguments, context, normalizer)


def _backward(options: AttentionOptions, residuals: tuple, context_gradient: jax.Array) -> tuple:
    query, key, value, query_tokens, key_tokens, sinks, context, normalizer = residuals
    mean_gradient = mean_gradient_of(context, context_gradient)
    gradients = flash_backward(
        options, query, key, value, query_tokens, key_tokens, normalizer, mean_gradient, context_gradient
    )
    gradients = (gradient.astype(array.dtype) for gradient, array in zip(gradients, (query, key, value), strict=True))
    return *gradients, None, None, sinks_gradient(sinks, normalizer, mean_gradient)


flash_attention.defvjp(_forward, _backward)


def mean_gradient_of(context: jax.Array, context_gradient: jax.Array) -> jax.Array:
    """Returns the sum over keys of probability times its gradient, [B, K, G, T] float32; both are [B, T, K, G, Hv]."""
    product = context_gradient.astype(jnp.float32) * context.astype(jnp.float32)
    return jnp.sum(product, axis=-1).transpose(0, 2, 3, 1)


def sinks_gradient(sinks: jax.Array | None, normalizer: jax.Array, mean_gradient: jax.Array) -> jax.Array | None:
    """sinks: [K, G] float32; normalizer and mean_gradient: [B, K, G, T], as of flash_backward. Returns: [K, G]."""
    if sinks is None:
        return None
    # A sink's weight has no value, so no gradient of its own: only the mean is taken away.
    return -jnp.sum(jnp.exp(sinks[..., None] - normalizer) * mean_gradient, (0, 3))


def flash_forward(
    options: AttentionOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_tokens: Tokens,
    key_tokens: Tokens,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The output, and what the backward pass or the combination with other keys needs of the softmax.

    query, key, value: [B, T, K, G, H], [B, S, K, H], [B, S, K, Hv]. sinks: [K, G] float32.
    Returns: context [B, T, K, G, Hv]; normalizer [B, K, G, T] float32, the logsumexp of the scores and the sinks,
    about -1e29 where nothing is seen.
    """
    queries, keys, meetings = _tiled(options, query, key, value, query_tokens, key_tokens)
    maximum = jnp.full(queries.query.shape[1:-1], LEAST_MAXIMUM, jnp.float32)
    total = jnp.zeros_like(maximum)
    if sinks is not None:
        maximum = jnp.maximum(maximum, sinks[..., None])
        total = jnp.exp(sinks[..., None] - maximum)
    nothing = (maximum, total, jnp.zeros((*maximum.shape, value.shape[-1]), jnp.float32))

    def attend(_: None, tile: tuple[_Queries, _Meetings]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        queries, meetings = tile
        step = functools.partial(_add_tile, options, queries, keys, meetings)
        maximum, total, context = jax.lax.fori_loop(0, meetings.count, step, nothing)
        total = jnp.where(total == 0.0, 1.0, total)
        return None, ((context / total[..., None]).astype(query.dtype), maximum + jnp.log(total))

    _, (context, normalizer) = jax.lax.scan(attend, None, (queries, meetings))
    context = _joined(context, -2, query.shape[1]).transpose(0, 3, 1, 2, 4)
    return context, _joined(normalizer, -1, query.shape[1])


def _add_tile(
    options: AttentionOptions, queries: _Queries, keys: _Keys, meetings: _Meetings, step: jax.Array, running: _Running
) -> _Running:
    """One more tile of keys joins the softmax of a tile of queries."""
    maximum, total, context = running
    keys = keys.tile(meetings.tiles[step])
    scores, _ = _scores(options, queries, keys)
    raised = jnp.maximum(maximum, jnp.max(scores, axis=-1))
    kept = jnp.exp(maximum - raised)
    weights = jnp.exp(scores - raised[..., None])
    part = _einsum("BKGTS,BKSH->BKGTH", weights.astype(keys.value.dtype), keys.value)
    return raised, total * kept + jnp.sum(weights, axis=-1), context * kept[..., None] + part


def flash_backward(
    options: AttentionOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_tokens: Tokens,
    key_tokens: Tokens,
    normalizer: jax.Array,
    mean_gradient: jax.Array,
    context_gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of query, key and value through these keys.

    query, key, value: as of flash_forward.
    normalizer: [B, K, G, T] float32, the logsumexp over all keys that the queries saw, these and others.
    mean_gradient: [B, K, G, T] float32, the sum over features of the output times its gradient.
    context_gradient: [B, T, K, G, Hv].
    Returns: float32, of the shapes of query, key and value.
    """
    queries, keys, meetings = _tiled(options, query, key, value, query_tokens, key_tokens)
    size = queries.query.shape[-2]
    gradients = _Gradients(
        _cut(normalizer, 3, size),
        _cut(mean_gradient, 3, size),
        _cut(context_gradient.transpose(0, 2, 3, 1, 4), 3, size),
    )
    # Kept as [n, B, K, H, s], and the queries come first in their einsums: a matmul transposes its first operand here,
    # and transposing the few features of the queries costs less than transposing the probabilities.
    nothing = tuple(jnp.zeros(array.swapaxes(-1, -2).shape, jnp.float32) for array in (keys.key, keys.value))

    def attend(sums: tuple[jax.Array, ...], tile: _BackwardTile) -> tuple[tuple[jax.Array, ...], jax.Array]:
        queries, _, meetings = tile
        step = functools.partial(_add_gradients, options, tile, keys)
        none = jnp.zeros(queries.query.shape, jnp.float32)
        query_gradient, *key_sums = jax.lax.fori_loop(0, meetings.count, step, (none, *sums))
        return tuple(key_sums), query_gradient

    sums, query_gradient = jax.lax.scan(attend, nothing, (queries, gradients, meetings))
    key_gradient, value_gradient = (_joined(array, -1, key.shape[1]).transpose(0, 3, 1, 2) for array in sums)
    return _joined(query_gradient, -2, query.shape[1]).transpose(0, 3, 1, 2, 4), key_gradient, value_gradient


def _add_gradients(options: AttentionOptions, tile: _BackwardTile, keys: _Keys, step: jax.Array, sums: _Sums) -> _Sums:
    """What a tile of queries and one more tile of keys give to one another's gradients."""
    queries, gradients, meetings = tile
    query_gradient, key_gradient, value_gradient = sums
    index = meetings.tiles[step]
    keys = keys.tile(index)
    scores, unmasked = _scores(options, queries, keys)
    weights = jnp.exp(scores - gradients.normalizer[..., None])
    weights_gradient = _einsum("BKGTH,BKSH->BKGTS", gradients.context_gradient, keys.value)
    scores_gradient = weights * (weights_gradient - gradients.mean_gradient[..., None]) * options.scale
    if options.soft_cap is not None:
        scores_gradient = scores_gradient * (1.0 - (unmasked / options.soft_cap) ** 2)
    scores_gradient = scores_gradient.astype(queries.query.dtype)
    query_gradient += _einsum("BKGTS,BKSH->BKGTH", scores_gradient, keys.key)
    key_part = _einsum("BKGTH,BKGTS->BKHS", queries.query, scores_gradient)
    value_part = _einsum("BKGTH,BKGTS->BKHS", gradients.context_gradient, weights.astype(keys.value.dtype))
    return query_gradient, key_gradient.at[index].add(key_part), value_gradient.at[index].add(value_part)


def _scores(options: AttentionOptions, queries: _Queries, keys: _Keys) -> tuple[jax.Array, jax.Array]:
    """Scores of one pair of tiles, (masked, unmasked): [B, K, G, t, s] float32."""
    raw = _einsum("BKGTH,BKSH->BKGTS", queries.query, keys.key)
    scores = soft_capped(raw * options.scale, options.soft_cap)
    seen = visible(options, queries.tokens, keys.tokens)
    return jnp.where(seen[:, None, None], scores, UNSEEN_SCORE), scores


def _tiled(
    options: AttentionOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_tokens: Tokens,
    key_tokens: Tokens,
) -> tuple[_Queries, _Keys, _Meetings]:
    """Everything cut into tiles, their number first and heads before tokens; and which tiles meet."""
    size, key_size = _tile_size(query.shape[1]), _tile_size(key.shape[1])
    queries = _Queries(_cut(query.transpose(0, 2, 3, 1, 4), 3, size), _cut_tokens(query_tokens, size, "edge"))
    key, value = (_cut(array.swapaxes(1, 2), 2, key_size) for array in (key, value))
    keys = _Keys(key, value, _cut_tokens(key_tokens, key_size, AFTER_ALL))
    return queries, keys, _meetings(options, queries.tokens.order, keys.tokens.order)


def _tile_size(length: int) -> int:
    """The whole length, or the size of the fewest equal tiles, a multiple of 8, that it can be cut into."""
    count = -(-length // TILE)
    return length if count == 1 else -(-length // (8 * count)) * 8


def _meetings(options: AttentionOptions, query_order: jax.Array, key_order: jax.Array) -> _Meetings:
    """query_order: [n, t]. key_order: [m, s]."""
    # How often loops turn follows from the order alone, and not from data: vmap leaves such loops as they are.
    meet = jnp.min(key_order, 1)[None, :] <= jnp.max(query_order, 1)[:, None]
    if options.reach is not None:
        meet &= jnp.max(key_order, 1)[None, :] > jnp.min(query_order, 1)[:, None] - options.reach
    return _Meetings(jnp.argsort(~meet, axis=1, stable=True), jnp.sum(meet, axis=1, dtype=jnp.int32))


def _cut(x: jax.Array, axis: int, size: int, fill: float | str = 0) -> jax.Array:
    """Cuts `axis` into tiles, the last filled up with a number or by the "edge"; the number of tiles comes first."""
    missing = -x.shape[axis] % size
    if missing:
        widths = [(0, missing if dimension == axis else 0) for dimension in range(x.ndim)]
        settings: dict[str, Any] = {"mode": "edge"} if fill == "edge" else {"constant_values": fill}
        x = jnp.pad(x, widths, **settings)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def _cut_tokens(tokens: Tokens, size: int, fill: float | str) -> Tokens:
    order, *others = tokens
    return Tokens(_cut(order, 0, size, fill), *(None if array is None else _cut(array, 1, size) for array in others))


def _joined(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Undoes `_cut`, which left the tokens of a tile in the negative `axis`."""
    x = jnp.moveaxis(x, 0, axis - 1)
    axis += x.ndim
    x = x.reshape(*x.shape[: axis - 1], -1, *x.shape[axis + 1 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=axis - 1)
