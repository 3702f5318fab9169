"""The gated MLP (Shazeer 2020, arXiv:2002.05202)."""

from collections.abc import Callable

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import ComputeConfig, ModelConfig
from maxlite.nn.linear import Linear
from maxlite.parallel.sharding import constrain

ACTIVATION: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs):
        """Makes gate and up [D, F] and down [F, D]."""
        wide, narrow = (model.emb_dim, model.mlp_dim), (model.mlp_dim, model.emb_dim)
        self.activation = ACTIVATION[model.mlp_activation]
        self.gate = Linear("BTD,DF->BTF", wide, ("embed", "mlp"), compute, rngs=rngs)
        self.up = Linear("BTD,DF->BTF", wide, ("embed", "mlp"), compute, rngs=rngs)
        self.down = Linear("BTF,FD->BTD", narrow, ("mlp", "embed"), compute, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [B, T, D]. Returns: [B, T, D]."""
        gate = checkpoint_name(self.gate(x), "mlpwi_0")
        up = checkpoint_name(self.up(x), "mlpwi_1")
        hidden = constrain(self.activation(gate) * up, "batch", "length", "activation_mlp")
        return checkpoint_name(self.down(hidden), "mlpwo")
