"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): attention without scores, by a memory of constant size."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.layers import LayerSpec
from maxlite.config.schema import ComputeConfig, ModelConfig
from maxlite.nn.attention import AttentionContext
from maxlite.nn.linear import Linear, NarrowLinear
from maxlite.nn.norm import RMSNorm
from maxlite.nn.param import param
from maxlite.ops.convolution import causal_convolution, document_numbers, next_history
from maxlite.ops.delta_rule import DeltaInputs, chunked_delta_rule, delta_rule_step
from maxlite.parallel.sharding import constrain

# Added to the squared length of queries and keys, whatever normalization_layer_epsilon is, as in the published models.
LENGTH_EPSILON = 1e-6
# The first decay rates are spread evenly up to this one.
LARGEST_RATE = 16.0


class DeltaCache(NamedTuple):
    """What one layer remembers of all tokens so far, however many there are.

    query, key: [B, W-1, K, H], value: [B, W-1, K, G, V]: of the last tokens, before the convolution.
    memory: [B, K, G, H, V] float32.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    memory: jax.Array


class ShortConvolution(nnx.Module):
    """SiLU of a causal convolution over the last W tokens."""

    def __init__(self, shape: tuple[int, ...], axes: tuple[str, ...], compute: ComputeConfig, *, rngs: nnx.Rngs | None):
        """Makes the kernel of `shape` [W, ...]."""
        self.kernel = param(rngs, shape, axes, dtype=compute.weight_dtype, fan_in=shape[0])

    def __call__(self, x: jax.Array, documents: jax.Array, history: jax.Array) -> jax.Array:
        """x: [B, T, ...]; history: [B, W-1, ...]. Returns: as x, in float32."""
        return jax.nn.silu(causal_convolution(x, self.kernel[...], documents, history))


class GatedDeltaNet(nnx.Module):
    """The gated delta rule over convolved queries, keys and values; its output is normalized and gated.

    K heads of queries and keys, of width H; each serves G heads of values, of width V. In a cache of padded rows the
    padding must follow on a row's tokens, and a row is one document.
    """

    def __init__(self, spec: LayerSpec, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs | None):
        """Makes query and key [D, K, H], value and gate [D, K, G, V], beta and step [D, K, G], and what they need."""
        dim, (width, heads, groups, key_width, value_width) = model.emb_dim, _sizes(model)
        self.width = width
        # A head of keys serves several of values as it serves several of queries elsewhere.
        key_axes, group_axes = ("kv_heads", "head_dim"), ("kv_heads", "heads")
        value_shape, value_axes = (heads, groups, value_width), (*group_axes, "head_dim")

        def linear(equation: str, shape: tuple[int, ...], axes: tuple[str, ...], kind: type[Linear] = Linear) -> Linear:
            return kind(equation, shape, axes, compute, rngs=rngs)

        def convolution(shape: tuple[int, ...], axes: tuple[str, ...]) -> ShortConvolution:
            return ShortConvolution((width, *shape), ("conv", *axes), compute, rngs=rngs)

        self.query = linear("BTD,DKH->BTKH", (dim, heads, key_width), ("embed", *key_axes))
        self.key = linear("BTD,DKH->BTKH", (dim, heads, key_width), ("embed", *key_axes))
        self.value = linear("BTD,DKGV->BTKGV", (dim, *value_shape), ("embed", *value_axes))
        self.gate = linear("BTD,DKGV->BTKGV", (dim, *value_shape), ("embed", *value_axes))
        self.beta = linear("BTD,DKG->BTKG", (dim, heads, groups), ("embed", *group_axes), NarrowLinear)
        self.step = linear("BTD,DKG->BTKG", (dim, heads, groups), ("embed", *group_axes), NarrowLinear)
        self.query_conv = convolution((heads, key_width), key_axes)
        self.key_conv = convolution((heads, key_width), key_axes)
        self.value_conv = convolution(value_shape, value_axes)
        rates = LARGEST_RATE * (np.arange(heads * groups) + 0.5) / (heads * groups)
        dtype = compute.weight_dtype
        self.log_rate = param(
            rngs, (heads, groups), group_axes, dtype=dtype, value=np.log(rates).reshape(heads, groups)
        )
        self.step_bias = param(rngs, (heads, groups), group_axes, dtype=dtype, value=1.0)
        # This norm's scale is stored as it is, also where the others are stored as differences from 1.
        plain = dataclasses.replace(model, norm_scale_offset=0.0)
        self.norm = RMSNorm((value_width,), ("head_dim",), plain, compute, rngs=rngs)
        self.out = linear("BTKGV,KGVD->BTD", (*value_shape, dim), (*value_axes, "embed"))

    def __call__(
        self, x: jax.Array, context: AttentionContext, cache: DeltaCache | None
    ) -> tuple[jax.Array, DeltaCache | None]:
        """x: [B, T, D]. Returns: [B, T, D], and the cache with these tokens in it."""
        segment_ids = context.query_segment_ids
        if segment_ids is None:
            segment_ids = jnp.ones(x.shape[:2], jnp.int32)
        documents, real = document_numbers(segment_ids), segment_ids != 0
        streams = self._streams(x)
        start = self._nothing(*streams) if cache is None else cache
        inputs = self._inputs(x, streams, start, documents, real)
        if cache is not None and x.shape[1] == 1:
            output, memory = delta_rule_step(inputs, start.memory)
        else:
            output, memory = chunked_delta_rule(inputs, documents, start.memory)
        if cache is not None:
            counts = jnp.sum(real.astype(jnp.int32), axis=1)
            query, key, value = (next_history(new, old, counts) for new, old in zip(streams, start[:3], strict=True))
            cache = DeltaCache(query, key, value, memory)
        gate = checkpoint_name(_placed(self.gate(x)), "gate_proj")
        gated = self.norm(output).astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        return checkpoint_name(self.out(_placed(gated)), "out_proj"), cache

    @staticmethod
    def init_cache(spec: LayerSpec, model: ModelConfig, compute: ComputeConfig, batch: int, length: int) -> DeltaCache:
        """Returns an empty cache, of floats: its size does not depend on `length`, and all tokens are in it."""
        width, heads, groups, key_width, value_width = _sizes(model)
        keys = jnp.zeros((batch, width - 1, heads, key_width), compute.dtype)
        values = jnp.zeros((batch, width - 1, heads, groups, value_width), compute.dtype)
        return DeltaCache(keys, keys, values, jnp.zeros((batch, heads, groups, key_width, value_width)))

    def _streams(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x: [B, T, D]. Returns: query, key [B, T, K, H] and value [B, T, K, G, V] before the convolutions."""
        query, key = _placed(self.query(x)), _placed(self.key(x))
        value = checkpoint_name(_placed(self.value(x)), "value_proj")
        return checkpoint_name(query, "query_proj"), checkpoint_name(key, "key_proj"), value

    def _nothing(self, query: jax.Array, key: jax.Array, value: jax.Array) -> DeltaCache:
        """The cache before the first token."""
        batch, _, heads, groups, value_width = value.shape
        before = [jnp.zeros((batch, self.width - 1, *x.shape[2:]), x.dtype) for x in (query, key, value)]
        return DeltaCache(
            before[0], before[1], before[2], jnp.zeros((batch, heads, groups, key.shape[-1], value_width))
        )

    def _inputs(
        self,
        x: jax.Array,
        streams: tuple[jax.Array, jax.Array, jax.Array],
        start: DeltaCache,
        documents: jax.Array,
        real: jax.Array,
    ) -> DeltaInputs:
        """x: [B, T, D]; documents, real: [B, T]. Padding neither fades the memory nor writes to it."""
        query, key, value = (
            convolution(stream, documents, history)
            for convolution, stream, history in zip(
                (self.query_conv, self.key_conv, self.value_conv), streams, start[:3], strict=True
            )
        )
        # As in a recurrence in continuous time: at a rate of its own, for as long as this token's step lasts.
        step, beta = (checkpoint_name(_placed(y), "gate_proj") for y in (self.step(x), self.beta(x)))
        step = step.astype(jnp.float32) + self.step_bias[...].astype(jnp.float32)
        log_decay = -jnp.exp(self.log_rate[...].astype(jnp.float32)) * jax.nn.softplus(step)
        beta = jax.nn.sigmoid(beta.astype(jnp.float32))
        log_decay, beta = (jnp.where(real[:, :, None, None], part, 0.0) for part in (log_decay, beta))
        return DeltaInputs(_unit(query) * query.shape[-1] ** -0.5, _unit(key), value, log_decay, beta)


def _placed(x: jax.Array) -> jax.Array:
    """Names the dimensions of [B, T, K, H], [B, T, K, G] or [B, T, K, G, V]."""
    heads = ("activation_kv_heads", "activation_heads")[: x.ndim - 3]
    return constrain(x, "batch", "length", *heads, None)


def _unit(x: jax.Array) -> jax.Array:
    """Vectors along the last dimension, of length one."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + LENGTH_EPSILON)


def _sizes(model: ModelConfig) -> tuple[int, int, int, int, int]:
    """Returns W, K, G, H and V."""
    heads, value_heads = model.gdn_num_key_heads, model.gdn_num_value_heads
    width, key_width, value_width = model.gdn_conv_kernel_dim, model.gdn_key_head_dim, model.gdn_value_head_dim
    assert heads and value_heads and width and key_width and value_width, "checked with the config"
    return width, heads, value_heads // heads, key_width, value_width
