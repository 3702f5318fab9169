"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245): over all keys, a window or a chunk of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.layers import (
    LayerSpec,
    attention_chunk,
    attention_head_dim,
    attention_kv_heads,
    attention_shares_kv,
    attention_window,
)
from maxlite.config.schema import ComputeConfig, ModelConfig
from maxlite.nn.cache import LayerCache, Slots, empty_slots, write_slots
from maxlite.nn.linear import Linear
from maxlite.nn.norm import RMSNorm, rms_normalize
from maxlite.nn.param import param
from maxlite.ops.attention import dot_product_attention, self_attention
from maxlite.ops.attention_types import ContextParallel
from maxlite.ops.kv_quantization import RoundedSlots, integers, mixed, unmixed
from maxlite.ops.rope import apply_rope
from maxlite.parallel.sharding import constrain, current_execution


class AttentionContext(NamedTuple):
    """What all layers share about the tokens of one forward pass.

    query_*: [B, T]; key_*: [B, S], the same arrays as the queries' when there is no cache.
    rotations: (cos, sin), each [B, T, R/2], for each kind of attention that turns R features of a head.
    index: the cache slot of the first token, None without a cache.
    """

    query_positions: jax.Array
    query_segment_ids: jax.Array | None
    key_positions: jax.Array
    key_segment_ids: jax.Array | None
    rotations: dict[str, tuple[jax.Array, jax.Array]]
    index: jax.Array | None


def attend_rows(
    kind: str, query: jax.Array, key: jax.Array, value: jax.Array, context: AttentionContext, **options: Any
) -> jax.Array:
    """Rows to themselves, on the kernel and across the devices that the execution in context says.

    query, key, value: [B, T, N, H], [B, T, K, H], [B, T, K, Hv]. Returns: [B, T, N, Hv].
    """
    execution = current_execution()
    return self_attention(
        query,
        key,
        value,
        positions=context.query_positions,
        segment_ids=context.query_segment_ids,
        kernel=execution.kernel(kind),
        context_parallel=ContextParallel(execution.context_strategy, execution.load_balance),
        **options,
    )


def attend_cache(query: jax.Array, key: Slots, value: Slots, context: AttentionContext, **options: Any) -> jax.Array:
    """Queries [B, T, N, H] to the keys [B, S, K, H] and values [B, S, K, Hv] of a cache. Returns: [B, T, N, Hv]."""
    if isinstance(key, RoundedSlots) and isinstance(value, RoundedSlots):
        # A scale stands for a whole key, or value: it acts on the scores, and no key is multiplied by it.
        scales = (key.scale[..., 0], value.scale[..., 0])
        keys, values = (integers(slots, query.dtype) for slots in (key, value))
        return unmixed(_attend_slots(mixed(query), keys, values, context, scales=scales, **options))
    assert isinstance(key, jax.Array) and isinstance(value, jax.Array), "a cache has one form"
    return _attend_slots(query, key, value, context, **options)


def _attend_slots(
    query: jax.Array, key: jax.Array, value: jax.Array, context: AttentionContext, **options: Any
) -> jax.Array:
    return dot_product_attention(
        query,
        key,
        value,
        query_positions=context.query_positions,
        key_positions=context.key_positions,
        query_segment_ids=context.query_segment_ids,
        key_segment_ids=context.key_segment_ids,
        **options,
    )


class Attention(nnx.Module):
    """Softmax attention; `spec.attention` says which keys a token sees and whether positions turn them."""

    def __init__(self, spec: LayerSpec, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs | None):
        """Makes query [D, N, H], key and value [D, K, H], out [N, H, D], and the biases, norms and sinks asked for."""
        self.kind = spec.attention
        dim, heads, bias = model.emb_dim, model.num_query_heads, model.attention_bias
        kv_heads, width = attention_kv_heads(model, self.kind), attention_head_dim(model, self.kind)
        kv_axes = ("embed", "kv_heads", "head_dim")
        self.window = attention_window(model, self.kind)
        self.chunk = attention_chunk(model, self.kind)
        self.scale = (model.query_pre_attn_scalar or width) ** -0.5
        self.soft_cap = model.attn_logits_soft_cap
        self.interleave = model.rope_interleave
        self.query = Linear(
            "BTD,DNH->BTNH", (dim, heads, width), ("embed", "heads", "head_dim"), compute, use_bias=bias, rngs=rngs
        )
        self.key = Linear("BTD,DKH->BTKH", (dim, kv_heads, width), kv_axes, compute, use_bias=bias, rngs=rngs)
        self.shares_kv = attention_shares_kv(model, self.kind)
        if not self.shares_kv:
            self.value = Linear("BTD,DKH->BTKH", (dim, kv_heads, width), kv_axes, compute, use_bias=bias, rngs=rngs)
        self.out = Linear(
            "BTNH,NHD->BTD",
            (heads, width, dim),
            ("heads", "head_dim", "embed"),
            compute,
            use_bias=model.attention_out_bias,
            rngs=rngs,
        )
        self.gates_output = model.attention_output_gate
        if self.gates_output:
            self.gate = Linear(
                "BTD,DNH->BTNH", (dim, heads, width), ("embed", "heads", "head_dim"), compute, use_bias=bias, rngs=rngs
            )
        self.norm_type = model.qk_norm_type if model.use_qk_norm else None
        if self.norm_type == "head":
            self.query_norm = RMSNorm((width,), ("head_dim",), model, compute, rngs=rngs)
            self.key_norm = RMSNorm((width,), ("head_dim",), model, compute, rngs=rngs)
        elif self.norm_type == "projection":
            self.query_norm = RMSNorm((heads, width), ("heads", "head_dim"), model, compute, rngs=rngs)
            self.key_norm = RMSNorm((kv_heads, width), ("kv_heads", "head_dim"), model, compute, rngs=rngs)
        self.norms_values = model.use_v_norm
        self.epsilon = model.normalization_layer_epsilon
        self.has_sinks = model.attention_sink
        if self.has_sinks:
            self.sinks = param(rngs, (heads,), ("heads",), dtype=compute.weight_dtype, value=0.0)
        tunes = model.temperature_tuning and self.kind == "nope"
        self.temperature = (model.temperature_tuning_floor, model.temperature_tuning_scale) if tunes else None

    def __call__(
        self, x: jax.Array, context: AttentionContext, cache: LayerCache | None
    ) -> tuple[jax.Array, LayerCache | None]:
        """x: [B, T, D]. Returns: [B, T, D], and the cache with these tokens' keys and values."""
        key = self.key(x)
        value = key if self.shares_kv else self.value(x)
        query, key = self._turned(self.query(x), key, context)
        query = checkpoint_name(constrain(query, "batch", "length", "activation_heads", None), "query_proj")
        key = checkpoint_name(constrain(key, "batch", "length", "activation_kv_heads", None), "key_proj")
        value = self._normalized(value) if self.norms_values else value
        value = checkpoint_name(constrain(value, "batch", "length", "activation_kv_heads", None), "value_proj")
        if cache is not None:
            assert context.index is not None, "a cache comes with the slot to write to"
            cache = LayerCache(
                write_slots(cache.key, key, context.index), write_slots(cache.value, value, context.index)
            )
        masks = {"scale": self.scale, "window": self.window, "chunk": self.chunk, "soft_cap": self.soft_cap}
        sinks = self.sinks[...] if self.has_sinks else None
        if cache is None:
            attended = attend_rows(self.kind, query, key, value, context, sinks=sinks, **masks)
        else:
            attended = attend_cache(query, cache.key, cache.value, context, sinks=sinks, **masks)
        # No name here: every kernel of ops/attention names the context, and a second name would save it twice.
        attended = constrain(attended, "batch", "length", "activation_heads", None)
        if self.gates_output:
            gate = constrain(self.gate(x), "batch", "length", "activation_heads", None)
            attended = attended * jax.nn.sigmoid(checkpoint_name(gate, "gate_proj"))
        return checkpoint_name(self.out(attended), "out_proj"), cache

    def _turned(self, query: jax.Array, key: jax.Array, context: AttentionContext) -> tuple[jax.Array, jax.Array]:
        """Norms and positions: query [B, T, N, H], key [B, T, K, H] -> the same shapes."""
        if self.norm_type in ("head", "projection"):
            query, key = self.query_norm(query), self.key_norm(key)
        if self.kind in context.rotations:
            cos, sin = context.rotations[self.kind]
            query = apply_rope(query, cos, sin, interleave=self.interleave)
            key = apply_rope(key, cos, sin, interleave=self.interleave)
            if self.norm_type == "l2":
                query, key = self._normalized(query), self._normalized(key)
        if self.temperature is not None:
            query = query * _temperature(context.query_positions, *self.temperature).astype(query.dtype)
        return query, key

    def _normalized(self, x: jax.Array) -> jax.Array:
        """Norm without a scale, of every head: x [B, T, N, H] -> the same shape."""
        return rms_normalize(x.astype(jnp.float32), self.epsilon).astype(x.dtype)

    @staticmethod
    def init_cache(spec: LayerSpec, model: ModelConfig, compute: ComputeConfig, batch: int, length: int) -> LayerCache:
        """Returns an empty cache of `length` slots a row."""
        kind = spec.attention
        shape = (batch, length, attention_kv_heads(model, kind), attention_head_dim(model, kind))
        return LayerCache(empty_slots(shape, compute), empty_slots(shape, compute))


def _temperature(positions: jax.Array, floor: int, scale: float) -> jax.Array:
    """Llama 4's factor of the queries, which grows with position: [B, T] -> [B, T, 1, 1] float32."""
    steps = jnp.floor((positions.astype(jnp.float32) + 1.0) / floor)
    return (1.0 + scale * jnp.log1p(steps))[:, :, None, None]
