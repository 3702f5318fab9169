"""Token ids to vectors, and vectors to logits."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from maxlite.config.schema import ComputeConfig, ModelConfig
from maxlite.nn.param import param
from maxlite.ops.embedding import look_up
from maxlite.parallel.sharding import constrain


class Embedding(nnx.Module):
    """A table of one vector a token."""

    def __init__(self, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs | None):
        """Makes the table [V, D]."""
        self.dtype = jnp.dtype(compute.dtype)
        # Rounded to the compute dtype before it multiplies, as Gemma was trained (Gemma Team 2024, arXiv:2403.08295).
        self.multiplier = float(self.dtype.type(math.sqrt(model.emb_dim))) if model.scale_embeddings else None
        shape = (model.vocab_size, model.emb_dim)
        self.table = param(rngs, shape, ("vocab", "embed"), dtype=compute.weight_dtype, fan_in=model.emb_dim)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens: [B, T] int32. Returns: [B, T, D]."""
        x = look_up(self.table[...], tokens, self.dtype)
        if self.multiplier is not None:
            x = x * jnp.asarray(self.multiplier, self.dtype)
        return constrain(x, "batch", "norm_length", "activation_embed")

    def matrix(self) -> jax.Array:
        """Returns the table as an output matrix: [D, V] in the compute dtype."""
        return self.table[...].astype(self.dtype).T


class OutputMatrix(nnx.Module):
    """The matrix from final hidden states to logits, where it is not tied to the embedding."""

    def __init__(self, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs | None):
        """Makes the kernel [D, V]."""
        self.dtype = jnp.dtype(compute.dtype)
        shape = (model.emb_dim, model.vocab_size)
        self.kernel = param(rngs, shape, ("embed", "vocab"), dtype=compute.weight_dtype, fan_in=model.emb_dim)

    def matrix(self) -> jax.Array:
        """Returns: [D, V] in the compute dtype."""
        return self.kernel[...].astype(self.dtype)
