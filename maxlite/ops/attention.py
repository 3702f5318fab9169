"""Softmax attention over grouped query heads: blockwise for training, plain for decoding against a cache."""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.ops.soft_cap import soft_capped

# Scores of unseen keys, and the floor of a row's maximum: finite, so that a row which sees no key gives exp(-1e29),
# which is 0, where infinities would give NaN.
UNSEEN_SCORE = -1e30
LEAST_MAXIMUM = -1e29

# Queries per block of the training path, and the most blocks that are unrolled into one program.
QUERY_BLOCK = 128
MAX_BLOCKS = 16


class _Options(NamedTuple):
    """Static numbers of the attention; hashable, so that one custom_vjp serves every setting."""

    scale: float
    window: int | None
    chunk: int | None
    soft_cap: float | None

    @property
    def reach(self) -> int | None:
        """How many tokens back, itself included, the farthest key that any query may see lies; None if unbounded."""
        return min((bound for bound in (self.window, self.chunk) if bound is not None), default=None)


class _Tokens(NamedTuple):
    """Positions [B, T] (a window or chunk needs them) and segments [B, T] (packing and padding) of the tokens."""

    positions: Any
    segment_ids: Any

    def part(self, tokens: slice) -> "_Tokens":
        """The same of some tokens only."""
        return _Tokens(*(None if array is None else array[:, tokens] for array in self))


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    query_positions: jax.Array,
    key_positions: jax.Array,
    query_segment_ids: jax.Array | None = None,
    key_segment_ids: jax.Array | None = None,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    aligned: bool = False,
) -> jax.Array:
    """Causal attention, optionally inside a sliding window or a chunk; query head n reads key head n // G.

    A query sees a key if and only if both are of the same segment (when segments are given; segment 0 is padding,
    which neither sees nor is seen), key_position <= query_position, query_position - key_position < window, and both
    positions // chunk are equal. A query that sees no key gives zeros. The softmax is float32 whatever the dtype.

    query, key, value: [B, T, N, H], [B, S, K, H], [B, S, K, Hv], N a multiple of K.
    query_positions, key_positions: [B, T], [B, S] int32.
    query_segment_ids, key_segment_ids: [B, T], [B, S] int32.
    scale: factor of the scores, as a rule 1 / sqrt(H).
    window: how many positions back a query sees, itself included.
    chunk: length of the chunks, in positions, that see themselves only (Llama 4).
    soft_cap: bounds the scores to (-soft_cap, soft_cap) by tanh (Gemma 2, arXiv:2408.00118).
    sinks: [N], a logit per query head that joins the softmax's denominator only, neither scaled nor capped (GPT-OSS).
    aligned: promises that queries and keys are the same tokens in order and that positions increase inside a segment
        (training), so that blocks of keys after the query are skipped. The backward pass needs "context", the name
        under which the output and its logsumexp can be saved by a remat policy.
    Returns: [B, T, N, Hv].
    """
    if (query_segment_ids is None) != (key_segment_ids is None):
        raise ValueError("give query_segment_ids and key_segment_ids both or neither")
    options = _Options(float(scale), window, chunk, soft_cap)
    query, sinks = _grouped(query, key.shape[2], sinks)
    query_tokens = _Tokens(query_positions, query_segment_ids)
    if aligned:
        # The index already tells before from after, so positions matter to a window or chunk only.
        tokens = query_tokens if options.reach is not None else _Tokens(None, query_segment_ids)
        context = _blockwise_attention(options, query, key, value, tokens, sinks)
    else:
        seen = key_positions[:, None, :] <= query_positions[:, :, None]
        seen = _restricted(options, seen, query_tokens, _Tokens(key_positions, key_segment_ids))
        context = _plain_attention(options, query, key, value, seen, sinks)
    shape = (*query.shape[:2], query.shape[2] * query.shape[3], value.shape[-1])
    return context.reshape(shape)  # pyright: ignore[reportAttributeAccessIssue]  (custom_vjp hides the type)


def _grouped(query: jax.Array, num_kv_heads: int, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Query [B, T, N, H] -> [B, T, K, G, H], and sinks [N] -> [K, G] float32."""
    batch, length, num_query_heads, head_dim = query.shape
    if num_query_heads % num_kv_heads:
        raise ValueError(f"{num_query_heads} query heads cannot share {num_kv_heads} key heads evenly")
    shape = (num_kv_heads, num_query_heads // num_kv_heads)
    if sinks is not None:
        if sinks.shape != (num_query_heads,):
            raise ValueError(f"sinks must be one logit per query head, ({num_query_heads},), not {sinks.shape}")
        sinks = sinks.astype(jnp.float32).reshape(shape)
    return query.reshape(batch, length, *shape, head_dim), sinks


def _plain_attention(
    options: _Options,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    seen: jax.Array,
    sinks: jax.Array | None,
) -> jax.Array:
    """All scores at once, for few queries: query [B, T, K, G, H], seen [B, T, S], sinks [K, G] -> [B, T, K, G, Hv]."""
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(seen[:, None, None], _capped(options, scores), UNSEEN_SCORE)
    maximum = jax.lax.stop_gradient(_row_maximum(scores, sinks))
    weights = jnp.exp(scores - maximum[..., None])
    weights = weights / _row_total(weights, maximum, sinks)[..., None]
    context = jnp.einsum("BKGTS,BSKH->BTKGH", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return context.astype(query.dtype)


def _row_maximum(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """What to subtract before exponentials: scores [B, K, G, T, S], sinks [K, G] -> [B, K, G, T]."""
    maximum = jnp.maximum(jnp.max(scores, axis=-1), LEAST_MAXIMUM)
    return maximum if sinks is None else jnp.maximum(maximum, sinks[..., None])


def _row_total(weights: jax.Array, maximum: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Denominator of the softmax: weights [B, K, G, T, S] -> [B, K, G, T], 1 where there is nothing to sum."""
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks[..., None] - maximum)
    return jnp.where(total == 0.0, 1.0, total)


def _restricted(options: _Options, seen: jax.Array, query: _Tokens, key: _Tokens) -> jax.Array:
    """Narrow what causality lets be seen to the window, the chunk and the segment: [B or 1, T, S] -> the same."""
    if options.window is not None:
        seen = seen & (query.positions[:, :, None] - key.positions[:, None, :] < options.window)
    if options.chunk is not None:
        # As no key comes after its query, this bound is enough; it spares a division for every query and key.
        chunk_starts = query.positions - query.positions % options.chunk
        seen = seen & (key.positions[:, None, :] >= chunk_starts[:, :, None])
    if query.segment_ids is not None:
        seen = seen & _same_segment(query.segment_ids, key.segment_ids)
    return seen


def _same_segment(query_segment_ids: jax.Array, key_segment_ids: jax.Array) -> jax.Array:
    """[B, T], [B, S] -> [B, T, S] bool; padding (segment 0) matches nothing."""
    query_segment_ids = jnp.where(query_segment_ids == 0, -1, query_segment_ids)
    return query_segment_ids[:, :, None] == key_segment_ids[:, None, :]


def _capped(options: _Options, scores: jax.Array) -> jax.Array:
    """Scale raw scores and bound them by the soft cap."""
    return soft_capped(scores * options.scale, options.soft_cap)


class _Block(NamedTuple):
    """Queries [start, stop) of one row attend to keys [first_key, stop)."""

    start: int
    stop: int
    first_key: int


def _blocks(length: int, reach: int | None) -> Iterator[_Block]:
    """Cut the queries into blocks and give each the range of keys that any of its queries may see."""
    size = max(QUERY_BLOCK, -(-length // (MAX_BLOCKS * QUERY_BLOCK)) * QUERY_BLOCK)
    for start in range(0, length, size):
        first_key = 0 if reach is None else max(0, start - reach + 1)
        yield _Block(start, min(start + size, length), first_key)


def _block_scores(
    options: _Options, block: _Block, query: jax.Array, key: jax.Array, tokens: _Tokens
) -> tuple[jax.Array, jax.Array]:
    """Scores of one block: query [B, K, G, T, H], key [B, K, S, H] -> (masked, unmasked), [B, K, G, T, S] float32."""
    raw = jnp.einsum("BKGTH,BKSH->BKGTS", query, key, preferred_element_type=jnp.float32)
    scores = _capped(options, raw)
    query_range, key_range = slice(block.start, block.stop), slice(block.first_key, block.stop)
    shape = (block.stop - block.start, block.stop - block.first_key)
    seen = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + block.start
    seen = (seen >= jax.lax.broadcasted_iota(jnp.int32, shape, 1) + block.first_key)[None]
    seen = _restricted(options, seen, tokens.part(query_range), tokens.part(key_range))
    return jnp.where(seen[:, None, None], scores, UNSEEN_SCORE), scores


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise_attention(
    options: _Options, query: jax.Array, key: jax.Array, value: jax.Array, tokens: _Tokens, sinks: jax.Array | None
) -> jax.Array:
    """Block by block over the queries: query [B, T, K, G, H], value [B, T, K, Hv], sinks [K, G] -> [B, T, K, G, Hv]."""
    return _blockwise_forward(options, query, key, value, tokens, sinks)[0]


def _blockwise_forward(
    options: _Options, query: jax.Array, key: jax.Array, value: jax.Array, tokens: _Tokens, sinks: jax.Array | None
) -> tuple[jax.Array, tuple]:
    """The output, and what the backward pass needs: the inputs, the output and the logsumexp [B, K, G, T] float32."""
    query_heads, key_heads, value_heads = query.transpose(0, 2, 3, 1, 4), key.swapaxes(1, 2), value.swapaxes(1, 2)
    contexts, normalizers = [], []
    for block in _blocks(query.shape[1], options.reach):
        key_range = slice(block.first_key, block.stop)
        scores, _ = _block_scores(
            options, block, query_heads[..., block.start : block.stop, :], key_heads[:, :, key_range], tokens
        )
        maximum = _row_maximum(scores, sinks)
        weights = jnp.exp(scores - maximum[..., None])
        total = _row_total(weights, maximum, sinks)
        context = jnp.einsum(
            "BKGTS,BKSH->BKGTH",
            weights.astype(value.dtype),
            value_heads[:, :, key_range],
            preferred_element_type=jnp.float32,
        )
        contexts.append((context / total[..., None]).astype(query.dtype))
        normalizers.append(maximum + jnp.log(total))
    context = jnp.concatenate(contexts, axis=3).transpose(0, 3, 1, 2, 4)
    # Named here, inside the rule, because a policy that saved only the output would still compute all scores again.
    context = checkpoint_name(context, "context")
    normalizer = checkpoint_name(jnp.concatenate(normalizers, axis=3), "context")
    return context, (query, key, value, tokens, sinks, context, normalizer)


def _blockwise_backward(
    options: _Options, residuals: tuple, context_gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, jax.Array | None]:
    """Gradients of all arrays; probabilities come again from the logsumexp (FlashAttention, arXiv:2205.14135)."""
    query, key, value, tokens, sinks, context, normalizer = residuals
    query_heads, key_heads, value_heads = query.transpose(0, 2, 3, 1, 4), key.swapaxes(1, 2), value.swapaxes(1, 2)
    output_gradient = context_gradient.transpose(0, 2, 3, 1, 4)
    # Row sums of probability times its gradient.
    product = context_gradient.astype(jnp.float32) * context.astype(jnp.float32)
    mean_gradient = jnp.sum(product, axis=-1).transpose(0, 2, 3, 1)
    query_gradients = []
    # Kept as [B, K, H, S], and the queries come first in their einsums: a matmul transposes its first operand here, and
    # transposing the few features of the queries costs less than transposing the probabilities.
    key_gradient = jnp.zeros((*key_heads.shape[:2], key.shape[3], key.shape[1]), jnp.float32)
    value_gradient = jnp.zeros((*value_heads.shape[:2], value.shape[3], value.shape[1]), jnp.float32)
    for block in _blocks(query.shape[1], options.reach):
        query_range, key_range = slice(block.start, block.stop), slice(block.first_key, block.stop)
        block_query, block_gradient = query_heads[..., query_range, :], output_gradient[..., query_range, :]
        block_key, block_value = key_heads[:, :, key_range], value_heads[:, :, key_range]
        scores, unmasked = _block_scores(options, block, block_query, block_key, tokens)
        weights = jnp.exp(scores - normalizer[..., query_range, None])
        weights_gradient = jnp.einsum(
            "BKGTH,BKSH->BKGTS", block_gradient, block_value, preferred_element_type=jnp.float32
        )
        scores_gradient = weights * (weights_gradient - mean_gradient[..., query_range, None]) * options.scale
        if options.soft_cap is not None:
            scores_gradient = scores_gradient * (1.0 - (unmasked / options.soft_cap) ** 2)
        scores_gradient = scores_gradient.astype(query.dtype)
        accumulate = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        query_gradients.append(accumulate("BKGTS,BKSH->BKGTH", scores_gradient, block_key))
        key_part = accumulate("BKGTH,BKGTS->BKHS", block_query, scores_gradient)
        value_part = accumulate("BKGTH,BKGTS->BKHS", block_gradient, weights.astype(value.dtype))
        key_gradient = key_gradient.at[..., key_range].add(key_part)
        value_gradient = value_gradient.at[..., key_range].add(value_part)
    query_gradient = jnp.concatenate(query_gradients, axis=3).transpose(0, 3, 1, 2, 4).astype(query.dtype)
    key_gradient = key_gradient.transpose(0, 3, 1, 2).astype(key.dtype)
    value_gradient = value_gradient.transpose(0, 3, 1, 2).astype(value.dtype)
    # A sink's weight has no value, so no gradient of its own: only the mean is taken away.
    sink_gradient = None if sinks is None else -jnp.sum(jnp.exp(sinks[..., None] - normalizer) * mean_gradient, (0, 3))
    return query_gradient, key_gradient, value_gradient, None, sink_gradient


_blockwise_attention.defvjp(_blockwise_forward, _blockwise_backward)
