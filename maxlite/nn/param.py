"""The only place that makes a weight: shape, dtype, logical axes, initial values and decay, declared once."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def param(
    rngs: nnx.Rngs | None,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    dtype: str,
    fan_in: int | None = None,
    value: float | np.ndarray | jax.Array = 1.0,
) -> nnx.Param:
    """Declares a weight whose dimensions are named `axes`.

    With `fan_in` the values are normal, cut at two standard deviations, with variance 1/fan_in (LeCun
    initialization), and weight decay shrinks them; without it all are `value`, as norm scales and biases are, and
    they never decay. The names stand in the metadata key `axes`, not in flax's own sharding key: that one wants a
    mesh in context while a weight is made. Without `rngs` the weight is its shape alone (ShapeDtypeStruct).
    """
    assert len(shape) == len(axes), f"{len(axes)} names for shape {shape}"
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), axes=axes, decays=fan_in is not None)
    if fan_in is None:
        values = jnp.full(shape, value, dtype)
    else:
        # Cutting at two deviations takes variance away; this factor gives it back.
        deviation = 1 / math.sqrt(fan_in) / 0.87962566103423978
        values = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, shape, jnp.float32) * deviation
    return nnx.Param(values.astype(dtype), axes=axes, decays=fan_in is not None)


def uniform_param(
    rngs: nnx.Rngs | None, shape: tuple[int, ...], axes: tuple[str | None, ...], *, dtype: str, bound: float
) -> nnx.Param:
    """Declares a weight, as `param`, whose values are uniform from -bound to bound, and which weight decay shrinks."""
    assert len(shape) == len(axes), f"{len(axes)} names for shape {shape}"
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), axes=axes, decays=True)
    values = jnp.zeros(shape) if bound == 0 else jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound)
    return nnx.Param(values.astype(dtype), axes=axes, decays=True)
