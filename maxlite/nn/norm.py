"""Root mean square normalization (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import jax
import jax.numpy as jnp
from flax import nnx

from maxlite.config.schema import ComputeConfig, ModelConfig
from maxlite.nn.param import param


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * (offset + scale), all of it in float32 whatever the dtype.

    The offset is the model's norm_scale_offset: Gemma's files hold the difference of the scale from 1.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        model: ModelConfig,
        compute: ComputeConfig,
        *,
        rngs: nnx.Rngs | None,
    ):
        """Makes the scale, so that all scales are 1 at first; the mean runs over as many last dimensions as it has."""
        self.epsilon = model.normalization_layer_epsilon
        self.offset = model.norm_scale_offset
        self.dtype = jnp.dtype(compute.dtype)
        self.dims = tuple(range(-len(shape), 0))
        self.scale = param(rngs, shape, axes, dtype=compute.weight_dtype, value=1.0 - model.norm_scale_offset)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., *shape]. Returns: the same shape in the compute dtype."""
        normalized = rms_normalize(x.astype(jnp.float32), self.epsilon, self.dims)
        return (normalized * (self.scale[...].astype(jnp.float32) + self.offset)).astype(self.dtype)


def rms_normalize(x: jax.Array, epsilon: float, dims: tuple[int, ...] = (-1,)) -> jax.Array:
    """Returns x divided by its root mean square over `dims`, in the dtype of x."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=dims, keepdims=True) + epsilon)
