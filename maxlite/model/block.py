"""One residual block; two tables choose its parts."""

from typing import Any

import jax
from flax import nnx

from maxlite.config.layers import LayerSpec
from maxlite.config.schema import ComputeConfig, ModelConfig
from maxlite.nn.attention import Attention, AttentionContext
from maxlite.nn.mlp import GatedMLP
from maxlite.nn.norm import RMSNorm
from maxlite.parallel.sharding import constrain

ATTENTION: dict[str, type] = {"full": Attention, "local": Attention}
MLP: dict[str, type] = {"dense": GatedMLP}


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: LayerSpec, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs):
        """Makes the parts that `spec` names."""
        dim, epsilon = model.emb_dim, model.normalization_layer_epsilon
        self.attention_norm = RMSNorm(dim, epsilon, compute, rngs=rngs)
        self.attention = ATTENTION[spec.attention](spec, model, compute, rngs=rngs)
        self.mlp_norm = RMSNorm(dim, epsilon, compute, rngs=rngs)
        self.mlp = MLP[spec.mlp](model, compute, rngs=rngs)

    def __call__(self, x: jax.Array, context: AttentionContext, cache: Any) -> tuple[jax.Array, Any]:
        """x: [B, T, D]. Returns: [B, T, D] and the layer's cache."""
        attended, cache = self.attention(self.attention_norm(x), context, cache)
        x = constrain(x + attended, "batch", "length", "activation_embed")
        x = x + self.mlp(self.mlp_norm(x))
        return constrain(x, "batch", "length", "activation_embed"), cache
