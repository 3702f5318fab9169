"""Token ids to vectors, and vectors to logits."""

import jax
import jax.numpy as jnp
from flax import nnx

from maxlite.config.schema import ComputeConfig, ModelConfig
from maxlite.nn.param import param
from maxlite.parallel.sharding import constrain


class Embedding(nnx.Module):
    """A table of one vector a token."""

    def __init__(self, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs):
        """Makes the table [V, D]."""
        self.dtype = jnp.dtype(compute.dtype)
        shape = (model.vocab_size, model.emb_dim)
        self.table = param(rngs, shape, ("vocab", "embed"), dtype=compute.weight_dtype, fan_in=model.emb_dim)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens: [B, T] int32. Returns: [B, T, D]."""
        # Gathering before the cast reads B*T rows, not the whole table.
        return constrain(self.table[...][tokens].astype(self.dtype), "batch", "length", "activation_embed")

    def matrix(self) -> jax.Array:
        """Returns the table as an output matrix: [D, V] in the compute dtype."""
        return self.table[...].astype(self.dtype).T


class OutputMatrix(nnx.Module):
    """The matrix from final hidden states to logits, where it is not tied to the embedding."""

    def __init__(self, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs):
        """Makes the kernel [D, V]."""
        self.dtype = jnp.dtype(compute.dtype)
        shape = (model.emb_dim, model.vocab_size)
        self.kernel = param(rngs, shape, ("embed", "vocab"), dtype=compute.weight_dtype, fan_in=model.emb_dim)

    def matrix(self) -> jax.Array:
        """Returns: [D, V] in the compute dtype."""
        return self.kernel[...].astype(self.dtype)
