"""Weights on their way from the dtype that they are kept in to the one that products are computed in."""

import jax
import jax.numpy as jnp


def rounded(weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """weight.astype(dtype), which XLA leaves where it stands.

    A plain conversion of a layer's weight inside a scan over layers is moved out of it by the TPU compiler: all layers'
    weights are rounded beforehand, and held beside the others. It does not move a rounding to fewer bits.
    """
    info, wide = jnp.finfo(dtype), jnp.finfo(weight.dtype)
    # With fewer bits of exponent too, numbers near zero would come out otherwise.
    if info.bits >= wide.bits or info.nexp != wide.nexp:
        return weight.astype(dtype)
    return jax.lax.reduce_precision(weight, info.nexp, info.nmant).astype(dtype)
