"""Softmax attention over grouped query heads: of whole rows in training, by any kernel, and against a cache."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.ops.attention_types import (
    LEAST_MAXIMUM,
    UNSEEN_SCORE,
    AttentionOptions,
    ContextParallel,
    QueryShard,
    Tokens,
    visible,
)
from maxlite.ops.context_parallel import context_attention
from maxlite.ops.cudnn_attention import cudnn_attention
from maxlite.ops.flash_attention import flash_attention
from maxlite.ops.soft_cap import soft_capped
from maxlite.ops.splash_attention import splash_attention
from maxlite.parallel.sharding import axis_size, live_axes, per_device


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
    scales: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Causal attention, optionally inside a sliding window or a chunk; query head n reads key head n // G.

    A query sees a key if and only if both are of the same segment (when segments are given; segment 0 is padding,
    which neither sees nor is seen), key_position <= query_position, query_position - key_position < window, and both
    positions // chunk are equal. A query that sees no key gives zeros. The softmax is float32 whatever the dtype.
    All scores are computed at once: this is for few queries, as in decoding.

    query, key, value: [B, T, N, H], [B, S, K, H], [B, S, K, Hv], N a multiple of K.
    query_positions, key_positions: [B, T], [B, S] int32.
    query_segment_ids, key_segment_ids: [B, T], [B, S] int32.
    scale: factor of the scores, as a rule 1 / sqrt(H).
    window: how many positions back a query sees, itself included.
    chunk: length of the chunks, in positions, that see themselves only (Llama 4).
    soft_cap: bounds the scores to (-soft_cap, soft_cap) by tanh (Gemma 2, arXiv:2408.00118).
    sinks: [N], a logit per query head that joins the softmax's denominator only, neither scaled nor capped (GPT-OSS).
    scales: a factor of each key and one of each value, of all heads or of each: [B, S, 1] or [B, S, K] float32.
    Returns: [B, T, N, Hv].
    """
    if (query_segment_ids is None) != (key_segment_ids is None):
        raise ValueError("give query_segment_ids and key_segment_ids both or neither")
    options = AttentionOptions(float(scale), window, chunk, soft_cap)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)
    query, sinks = _grouped(query, key.shape[2], sinks)
    query_tokens = Tokens(query_positions, query_positions, query_segment_ids)
    key_tokens = Tokens(key_positions, key_positions, key_segment_ids)
    return _ungrouped(plain_attention(options, query, key, value, query_tokens, key_tokens, sinks, scales))


def self_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    positions: jax.Array,
    segment_ids: jax.Array | None,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kernel: str,
    context_parallel: ContextParallel | None = None,
) -> jax.Array:
    """The attention of dot_product_attention, of whole rows to themselves, on any mesh.

    The order in the row tells what is causal and inside the window, so positions must increase by one inside a segment.

    query, key, value: [B, T, N, H], [B, T, K, H], [B, T, K, Hv], N a multiple of K.
    positions, segment_ids: [B, T] int32.
    kernel: one of KERNELS, as choose_kernel of ops/attention_choice.py finds it.
    context_parallel: how rows are cut over devices; needed where the mesh cuts them.
    Returns: [B, T, N, Hv].
    """
    if query.shape[1] % axis_size(live_axes("length")):
        raise ValueError(f"rows of {query.shape[1]} tokens cannot be cut along mesh axes {live_axes('length')}")
    options = AttentionOptions(float(scale), window, chunk, soft_cap)
    if sinks is not None:
        # Here, so that devices sum their gradients in float32 too.
        sinks = sinks.astype(jnp.float32)
    if live_axes("activation_heads") != live_axes("activation_kv_heads"):
        # A device must have the key heads that its query heads read.
        key, value = (jnp.repeat(array, query.shape[2] // key.shape[2], axis=2) for array in (key, value))
        kv_heads = "activation_heads"
    else:
        kv_heads = "activation_kv_heads"
    query_axes, key_axes = (("batch", "length", heads, None) for heads in ("activation_heads", kv_heads))
    token_axes = ("batch", "length")
    attend = functools.partial(_attend_rows, options, KERNELS[kernel], context_parallel)
    in_axes = (query_axes, key_axes, key_axes, token_axes, token_axes, ("activation_heads",))
    positions_needed = positions if chunk is not None else None
    return per_device(attend, in_axes, query_axes)(query, key, value, positions_needed, segment_ids, sinks)


def _attend_rows(
    options: AttentionOptions,
    kernel: Callable[..., jax.Array],
    context_parallel: ContextParallel | None,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array | None,
    segment_ids: jax.Array | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """One device's part of the rows, or of one row: [B, T, N, H] -> [B, T, N, Hv]."""
    query, sinks = _grouped(query, key.shape[2], sinks)
    if axes := live_axes("length"):
        assert context_parallel is not None, f"the mesh cuts rows along {axes}"
        context = context_attention(
            options,
            query,
            key,
            value,
            positions,
            segment_ids,
            sinks,
            axes=axes,
            context_parallel=context_parallel,
            kernel=kernel,
        )
    else:
        tokens = Tokens.of_rows(query.shape[1], positions, segment_ids)
        context = kernel(options, query, key, value, tokens, tokens, sinks)
    return _ungrouped(context)


def plain_attention(
    options: AttentionOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_tokens: Tokens,
    key_tokens: Tokens,
    sinks: jax.Array | None,
    scales: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """All scores at once: query [B, T, K, G, H], key [B, S, K, H], value [B, S, K, Hv], sinks [K, G] float32.

    The tokens' order may be of each row, [B, T] and [B, S]. scales: as in dot_product_attention.
    Returns: [B, T, K, G, Hv], named "context".
    """
    raw = jnp.einsum("BTKGH,BSKH->BKGTS", query, key, preferred_element_type=jnp.float32)
    raw = raw if scales is None else raw * _of_scores(scales[0])
    scores = soft_capped(raw * options.scale, options.soft_cap)
    seen = visible(options, query_tokens, key_tokens)
    scores = jnp.where(seen[:, None, None], scores, UNSEEN_SCORE)
    maximum = jnp.maximum(jnp.max(scores, axis=-1), LEAST_MAXIMUM)
    maximum = maximum if sinks is None else jnp.maximum(maximum, sinks[..., None])
    maximum = jax.lax.stop_gradient(maximum)
    weights = jnp.exp(scores - maximum[..., None])
    total = jnp.sum(weights, axis=-1)
    total = total if sinks is None else total + jnp.exp(sinks[..., None] - maximum)
    weights = weights / jnp.where(total == 0.0, 1.0, total)[..., None]
    weights = weights if scales is None else weights * _of_scores(scales[1])
    context = jnp.einsum("BKGTS,BSKH->BTKGH", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return checkpoint_name(context.astype(query.dtype), "context")


def _of_scores(factors: jax.Array) -> jax.Array:
    """Factors of keys or values [B, S, K] as those of scores [B, K, G, T, S]."""
    return factors.transpose(0, 2, 1)[:, :, None, None]


def _ordered_by_tokens(kernel: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A kernel to which the tokens' order says enough, with the keyword `shard` that others need."""

    def attend(*arguments: Any, shard: QueryShard | None = None) -> jax.Array:
        return kernel(*arguments)

    return attend


def _without_groups(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A kernel of query [B, T, N, H] and sinks [N], for query [B, T, K, G, H] and sinks [K, G]."""

    def attend(options: AttentionOptions, query: jax.Array, *others: Any, **shard: QueryShard | None) -> jax.Array:
        *arrays, sinks = others
        context = kernel(options, _ungrouped(query), *arrays, None if sinks is None else sinks.reshape(-1), **shard)
        return context.reshape(*query.shape[:-1], context.shape[-1])

    return attend


# All take options, query [B, T, K, G, H], key [B, S, K, H], value [B, S, K, Hv], the tokens of queries and of keys,
# and sinks [K, G] float32 or None; and return [B, T, K, G, Hv]. Where the mesh cuts rows, a `shard` comes by keyword.
KERNELS: Mapping[str, Callable[..., jax.Array]] = {
    "dot_product": _ordered_by_tokens(plain_attention),
    "blockwise": _ordered_by_tokens(flash_attention),
    "splash": _without_groups(splash_attention),
    "cudnn": _without_groups(cudnn_attention),
}


def _grouped(query: jax.Array, num_kv_heads: int, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
    """Query [B, T, N, H] -> [B, T, K, G, H], and sinks [N] -> [K, G]."""
    batch, length, num_query_heads, head_dim = query.shape
    if num_query_heads % num_kv_heads:
        raise ValueError(f"{num_query_heads} query heads cannot share {num_kv_heads} key heads evenly")
    shape = (num_kv_heads, num_query_heads // num_kv_heads)
    if sinks is not None:
        if sinks.shape != (num_query_heads,):
            raise ValueError(f"sinks must be one logit per query head, ({num_query_heads},), not {sinks.shape}")
        sinks = sinks.reshape(shape)
    return query.reshape(batch, length, *shape, head_dim), sinks


def _ungrouped(heads: jax.Array) -> jax.Array:
    """[B, T, K, G, H] -> [B, T, N, H]."""
    return heads.reshape(*heads.shape[:2], -1, heads.shape[-1])
