"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): all heads' keys and values from one narrow latent."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.layers import LayerSpec
from maxlite.config.schema import ComputeConfig, ModelConfig
from maxlite.nn.attention import AttentionContext, attend_cache, attend_rows
from maxlite.nn.cache import Slots, as_stored, as_written, empty_slots, read_slots, write_slots
from maxlite.nn.linear import Linear
from maxlite.nn.norm import RMSNorm
from maxlite.nn.rotary import rope_scaling
from maxlite.ops.product import product
from maxlite.ops.rope import apply_rope
from maxlite.parallel.sharding import constrain

# The norms of the latents keep this value whatever normalization_layer_epsilon is, as in the published models: a
# checkpoint says nothing about them.
LATENT_EPSILON = 1e-6


class LatentCache(NamedTuple):
    """What one layer remembers of a token, the same for all heads.

    latent: [B, S, R], after its norm. rope_key: [B, S, Hr], rotated.
    """

    latent: Slots
    rope_key: Slots


class MultiHeadLatentAttention(nnx.Module):
    """Causal softmax attention whose keys and values are linear in a latent; a second, shared part has the rotation.

    A head's query and key are Hn features without position, then Hr rotated ones; the rotated key is common to all
    heads. Training expands the latents to keys and values. With a cache they stay as they are, and the expansion moves
    to the queries and to the context instead, by which every head reads the same R + Hr numbers a token.
    """

    def __init__(self, spec: LayerSpec, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs | None):
        """Makes query [D, N, Hn+Hr], or query_a [D, Rq] and query_b [Rq, N, Hn+Hr]; key_value_a and _b; out."""
        dim, heads, bias = model.emb_dim, model.num_query_heads, model.attention_bias
        latent, value_width = _size(model.kv_lora_rank), _size(model.v_head_dim)
        self.content_width, self.rope_width = _size(model.qk_nope_head_dim), _size(model.qk_rope_head_dim)
        self.interleave = model.rope_interleave
        self.low_rank_query = model.q_lora_rank is not None
        self.scale = _scale(model)
        norm_model = dataclasses.replace(model, normalization_layer_epsilon=LATENT_EPSILON)

        def linear(equation: str, shape: tuple[int, ...], axes: tuple[str, ...], *, bias: bool = False) -> Linear:
            return Linear(equation, shape, axes, compute, use_bias=bias, rngs=rngs)

        def norm(size: int) -> RMSNorm:
            return RMSNorm((size,), ("norm",), norm_model, compute, rngs=rngs)

        query_shape, query_axes = (heads, self.content_width + self.rope_width), ("heads", "head_dim")
        if self.low_rank_query:
            rank = _size(model.q_lora_rank)
            self.query_a = linear("BTD,DR->BTR", (dim, rank), ("embed", "q_lora"), bias=bias)
            self.query_a_norm = norm(rank)
            self.query_b = linear("BTR,RNH->BTNH", (rank, *query_shape), ("q_lora", *query_axes))
        else:
            self.query = linear("BTD,DNH->BTNH", (dim, *query_shape), ("embed", *query_axes))
        self.key_value_a = linear("BTD,DR->BTR", (dim, latent + self.rope_width), ("embed", "kv_lora"), bias=bias)
        self.key_value_a_norm = norm(latent)
        self.key_value_b = linear(
            "BTR,RNH->BTNH", (latent, heads, self.content_width + value_width), ("kv_lora", "heads", "head_dim")
        )
        out_axes = ("heads", "head_dim", "embed")
        self.out = linear("BTNH,NHD->BTD", (heads, value_width, dim), out_axes, bias=model.attention_out_bias)

    def __call__(
        self, x: jax.Array, context: AttentionContext, cache: LatentCache | None
    ) -> tuple[jax.Array, LatentCache | None]:
        """x: [B, T, D]. Returns: [B, T, D], and the cache with these tokens' latents and rotated keys."""
        query = self._queries(x, context)
        new = self._latents(x, context)
        if cache is None:
            attended = self._attend_expanded(query, *new, context)
        else:
            assert context.index is not None, "a cache comes with the slot to write to"
            cache = LatentCache(*(write_slots(old, part, context.index) for old, part in zip(cache, new, strict=True)))
            attended = self._attend_absorbed(query, cache, context)
        # No name here: every kernel of ops/attention names the context, and a second name would save it twice.
        attended = constrain(attended, "batch", "length", "activation_heads", None)
        return checkpoint_name(self.out(attended), "out_proj"), cache

    @staticmethod
    def init_cache(spec: LayerSpec, model: ModelConfig, compute: ComputeConfig, batch: int, length: int) -> LatentCache:
        """Returns an empty cache of `length` slots a row."""
        widths = (_size(model.kv_lora_rank), _size(model.qk_rope_head_dim))
        return LatentCache(*(empty_slots((batch, length, width), compute) for width in widths))

    def _queries(self, x: jax.Array, context: AttentionContext) -> jax.Array:
        """x: [B, T, D]. Returns: [B, T, N, Hn+Hr], the last Hr features rotated."""
        if self.low_rank_query:
            narrow = checkpoint_name(constrain(self.query_a(x), "batch", "length", None), "query_wa_proj")
            query = self.query_b(self.query_a_norm(narrow))
        else:
            query = self.query(x)
        query = constrain(query, "batch", "length", "activation_heads", None)
        content, rotary = jnp.split(query, [self.content_width], axis=-1)
        query = jnp.concatenate([content, self._rotated(rotary, context)], axis=-1)
        return checkpoint_name(query, "query_proj")

    def _latents(self, x: jax.Array, context: AttentionContext) -> tuple[jax.Array, jax.Array]:
        """x: [B, T, D]. Returns what these tokens leave in a cache: latents [B, T, R] and rotated keys [B, T, Hr]."""
        both = checkpoint_name(constrain(self.key_value_a(x), "batch", "length", None), "kv_wa_proj")
        latent, rope_key = jnp.split(both, [both.shape[-1] - self.rope_width], axis=-1)
        rope_key = self._rotated(rope_key[:, :, None], context)[:, :, 0]
        return self.key_value_a_norm(latent), rope_key

    def _rotated(self, x: jax.Array, context: AttentionContext) -> jax.Array:
        cos, sin = context.rotations["mla"]
        return apply_rope(x, cos, sin, interleave=self.interleave)

    def _attend_expanded(
        self, query: jax.Array, latent: jax.Array, rope_key: jax.Array, context: AttentionContext
    ) -> jax.Array:
        """Keys and values for every head. query: [B, T, N, Hn+Hr]. Returns: [B, T, N, Hv]."""
        expanded = constrain(self.key_value_b(latent), "batch", "length", "activation_heads", None)
        key, value = jnp.split(expanded, [self.content_width], axis=-1)
        shared = jnp.broadcast_to(rope_key[:, :, None], (*key.shape[:-1], self.rope_width))
        key = checkpoint_name(jnp.concatenate([key, shared], axis=-1), "key_proj")
        value = checkpoint_name(value, "value_proj")
        return attend_rows("mla", query, key, value, context, scale=self.scale)

    def _attend_absorbed(self, query: jax.Array, cache: LatentCache, context: AttentionContext) -> jax.Array:
        """One key and value head of latents, read by all. query: [B, T, N, Hn+Hr]. Returns: [B, T, N, Hv]."""
        query, kernel = self.key_value_b.matrix_beside(query)
        to_key, to_value = jnp.split(kernel.astype(query.dtype), [self.content_width], axis=-1)
        content, rotary = jnp.split(query, [self.content_width], axis=-1)
        # (latent . W) . query = latent . (W . query): the same scores, without a key for each head.
        content = as_stored(product("BTNH,RNH->BTNR", content, to_key), cache.latent)
        query = jnp.concatenate([content, as_stored(rotary, cache.rope_key)], axis=-1)
        latent, rope_key = (read_slots(slots, query.dtype) for slots in cache)
        key = jnp.concatenate([latent, rope_key], axis=-1)[:, :, None]
        attended = attend_cache(query, key, latent[:, :, None], context, scale=self.scale)
        return product("BTNR,RNH->BTNH", as_written(attended, cache.latent), to_value)


def _scale(model: ModelConfig) -> float:
    """Factor of the scores: one over the root of a head's width, times what yarn adds to it."""
    width = _size(model.qk_nope_head_dim) + _size(model.qk_rope_head_dim)
    scale = (model.query_pre_attn_scalar or width) ** -0.5
    scaling = rope_scaling(model)
    return scale if scaling is None else scale * scaling.softmax_factor


def _size(size: int | None) -> int:
    assert size is not None, "checked with the config"
    return size
