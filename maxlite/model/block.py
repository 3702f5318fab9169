"""One residual block; two tables choose its parts."""

from typing import Any

import jax
from flax import nnx

from maxlite.config.layers import LayerSpec
from maxlite.config.schema import ComputeConfig, ModelConfig
from maxlite.nn.attention import Attention, AttentionContext
from maxlite.nn.gated_delta_net import GatedDeltaNet
from maxlite.nn.mla import MultiHeadLatentAttention
from maxlite.nn.mlp import GatedMLP
from maxlite.nn.moe import DenseAndMoE, MoE
from maxlite.nn.norm import RMSNorm
from maxlite.nn.param import param
from maxlite.ops.router import RouterStats
from maxlite.parallel.sharding import constrain

ATTENTION: dict[str, Any] = {
    "full": Attention,
    "local": Attention,
    "chunked": Attention,
    "nope": Attention,
    "mla": MultiHeadLatentAttention,
    "gated_delta_net": GatedDeltaNet,
}


def _dense(model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs | None) -> GatedMLP:
    return GatedMLP(model, compute, model.mlp_dim, rngs=rngs)


MLP: dict[str, Any] = {"dense": _dense, "moe": MoE, "dense_and_moe": DenseAndMoE}


def _identity(x: jax.Array) -> jax.Array:
    return x


class Block(nnx.Module):
    """x + attention(x), then x + mlp(x), each with a norm before it, after it, or both, and perhaps times a scalar."""

    def __init__(self, spec: LayerSpec, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs | None):
        """Makes the parts that `spec` names."""

        def norm(wanted: bool) -> Any:
            return RMSNorm((model.emb_dim,), ("norm",), model, compute, rngs=rngs) if wanted else _identity

        self.attention_norm = norm(model.use_pre_norms)
        self.attention = ATTENTION[spec.attention](spec, model, compute, rngs=rngs)
        self.attention_post_norm = norm(model.use_post_norms)
        # Two MLPs side by side have a norm each.
        self.mlp_norm = norm(model.use_pre_norms and spec.mlp != "dense_and_moe")
        self.mlp = MLP[spec.mlp](model, compute, rngs=rngs)
        self.routes = spec.mlp != "dense"
        self.mlp_post_norm = norm(model.use_post_norms)
        self.use_scalar = model.use_layer_scalar
        if self.use_scalar:
            self.scalar = param(rngs, (1,), ("norm",), dtype=compute.weight_dtype, value=1.0)

    def __call__(
        self, x: jax.Array, context: AttentionContext, cache: Any
    ) -> tuple[jax.Array, Any, RouterStats | None]:
        """x: [B, T, D]. Returns: [B, T, D], the layer's cache, and what its router did, if it has one."""
        # Norms see a part of the sequence on each device; what they give is gathered for the products.
        attended, cache = self.attention(_whole_rows(self.attention_norm(x)), context, cache)
        x = _between_layers(x + self.attention_post_norm(attended))
        normed, stats = self.mlp_norm(x), None
        if self.routes:
            # Experts take parts of the sequence as they are.
            made, stats = self.mlp(normed, context.query_segment_ids)
        else:
            made = self.mlp(_whole_rows(normed))
        x = x + self.mlp_post_norm(made)
        x = x * self.scalar[...].astype(x.dtype) if self.use_scalar else x
        return _between_layers(x), cache, stats


def _whole_rows(x: jax.Array) -> jax.Array:
    return constrain(x, "batch", "length", "activation_embed")


def _between_layers(x: jax.Array) -> jax.Array:
    return constrain(x, "batch", "norm_length", "activation_embed")
