"""Root mean square normalization (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import jax
import jax.numpy as jnp
from flax import nnx

from maxlite.config.schema import ComputeConfig
from maxlite.nn.param import param


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale, with the statistics in float32 whatever the dtype."""

    def __init__(self, dim: int, epsilon: float, compute: ComputeConfig, *, rngs: nnx.Rngs):
        """Makes the scale of `dim` ones."""
        self.epsilon = epsilon
        self.dtype = jnp.dtype(compute.dtype)
        self.scale = param(rngs, (dim,), ("norm",), dtype=compute.weight_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., D]. Returns: [..., D] in the compute dtype."""
        x = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        # Hugging Face's Llama rounds to the compute dtype before it multiplies by the scale; so does this.
        return (x * inverse).astype(self.dtype) * self.scale[...].astype(self.dtype)
