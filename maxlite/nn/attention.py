"""Grouped-query attention, full or with a sliding window (Ainslie et al. 2023, arXiv:2305.13245)."""

from typing import NamedTuple

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.layers import LayerSpec, attention_window
from maxlite.config.schema import ComputeConfig, ModelConfig
from maxlite.nn.cache import LayerCache, write_slots
from maxlite.nn.linear import Linear
from maxlite.ops.attention import dot_product_attention
from maxlite.ops.rope import apply_rope
from maxlite.parallel.sharding import constrain


class AttentionContext(NamedTuple):
    """What all layers share about the tokens of one forward pass.

    query_*: [B, T]; key_*: [B, S], the same arrays as the queries' when there is no cache.
    cos, sin: [B, T, H/2]. index: the cache slot of the first token, None without a cache.
    """

    query_positions: jax.Array
    query_segment_ids: jax.Array | None
    key_positions: jax.Array
    key_segment_ids: jax.Array | None
    cos: jax.Array
    sin: jax.Array
    index: jax.Array | None


class Attention(nnx.Module):
    """Softmax attention with rotary positions; `spec.attention` says which keys a token sees."""

    def __init__(self, spec: LayerSpec, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs):
        """Makes query [D, N, H], key and value [D, K, H] and out [N, H, D]."""
        dim, heads, kv_heads, width = model.emb_dim, model.num_query_heads, model.num_kv_heads, model.head_dim
        kv_axes = ("embed", "kv_heads", "head_dim")
        self.window = attention_window(model, spec)
        self.scale = width**-0.5
        self.query = Linear("BTD,DNH->BTNH", (dim, heads, width), ("embed", "heads", "head_dim"), compute, rngs=rngs)
        self.key = Linear("BTD,DKH->BTKH", (dim, kv_heads, width), kv_axes, compute, rngs=rngs)
        self.value = Linear("BTD,DKH->BTKH", (dim, kv_heads, width), kv_axes, compute, rngs=rngs)
        self.out = Linear("BTNH,NHD->BTD", (heads, width, dim), ("heads", "head_dim", "embed"), compute, rngs=rngs)

    def __call__(
        self, x: jax.Array, context: AttentionContext, cache: LayerCache | None
    ) -> tuple[jax.Array, LayerCache | None]:
        """x: [B, T, D]. Returns: [B, T, D], and the cache with these tokens' keys and values."""
        query = apply_rope(self.query(x), context.cos, context.sin)
        key = apply_rope(self.key(x), context.cos, context.sin)
        query = checkpoint_name(constrain(query, "batch", "length", "activation_heads", None), "query_proj")
        key = checkpoint_name(constrain(key, "batch", "length", "activation_kv_heads", None), "key_proj")
        value = constrain(self.value(x), "batch", "length", "activation_kv_heads", None)
        value = checkpoint_name(value, "value_proj")
        if cache is not None:
            assert context.index is not None, "a cache comes with the slot to write to"
            cache = LayerCache(
                write_slots(cache.key, key, context.index), write_slots(cache.value, value, context.index)
            )
        attended = dot_product_attention(
            query,
            key if cache is None else cache.key,
            value if cache is None else cache.value,
            query_positions=context.query_positions,
            key_positions=context.key_positions,
            query_segment_ids=context.query_segment_ids,
            key_segment_ids=context.key_segment_ids,
            scale=self.scale,
            window=self.window,
            aligned=cache is None,
        )
        # No name here: ops/attention names the context inside its rule, and a second name would save it twice.
        attended = constrain(attended, "batch", "length", "activation_heads", None)
        return checkpoint_name(self.out(attended), "out_proj"), cache
