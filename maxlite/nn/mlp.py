"""The gated MLP (Shazeer 2020, arXiv:2002.05202)."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
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
# (gate, up) -> hidden, all of one shape.
Gate = Callable[[jax.Array, jax.Array], jax.Array]


def build_gate(model: ModelConfig) -> Gate:
    """Returns what joins gate and up: activation(gate) * up, or GPT-OSS's clipped unit."""
    if model.mlp_activation != "swigluoai":
        return _Activated(model.mlp_activation)
    return _Clipped(model.mlp_activations_limit, model.glu_alpha)


@dataclasses.dataclass(frozen=True)
class _Activated:
    """Compared by its name, so that two models of one config have one graph."""

    activation: str

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return ACTIVATION[self.activation](gate) * up


@dataclasses.dataclass(frozen=True)
class _Clipped:
    limit: float
    alpha: float

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, model: ModelConfig, compute: ComputeConfig, hidden_dim: int, *, rngs: nnx.Rngs | None):
        """Makes gate and up [D, F] and down [F, D], F = hidden_dim."""
        wide, narrow, bias = (model.emb_dim, hidden_dim), (hidden_dim, model.emb_dim), model.mlp_bias
        self.join = build_gate(model)
        self.gate = Linear("BTD,DF->BTF", wide, ("embed", "mlp"), compute, use_bias=bias, rngs=rngs)
        self.up = Linear("BTD,DF->BTF", wide, ("embed", "mlp"), compute, use_bias=bias, rngs=rngs)
        self.down = Linear("BTF,FD->BTD", narrow, ("mlp", "embed"), compute, use_bias=bias, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [B, T, D]. Returns: [B, T, D]."""
        gate = checkpoint_name(self.gate(x), "mlpwi_0")
        up = checkpoint_name(self.up(x), "mlpwi_1")
        hidden = constrain(self.join(gate, up), "batch", "length", "activation_mlp")
        return checkpoint_name(self.down(hidden), "mlpwo")
