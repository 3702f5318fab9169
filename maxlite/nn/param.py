"""The only place that makes a weight: shape, dtype, logical axes and initial values, declared once."""

import math

import jax
import jax.numpy as jnp
from flax import nnx


def param(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], *, dtype: str, fan_in: int | None = None
) -> nnx.Param:
    """Declares a weight whose dimensions are named `axes`.

    With `fan_in` the values are normal, cut at two standard deviations, with variance 1/fan_in (LeCun
    initialization); without it they are ones. The names stand in the metadata key `axes`, not in flax's own
    sharding key: that one wants a mesh in context while a weight is made.
    """
    assert len(shape) == len(axes), f"{len(axes)} names for shape {shape}"
    if fan_in is None:
        values = jnp.ones(shape, dtype)
    else:
        # Cutting at two deviations takes variance away; this factor gives it back.
        deviation = 1 / math.sqrt(fan_in) / 0.87962566103423978
        values = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, shape, jnp.float32) * deviation
    return nnx.Param(values.astype(dtype), axes=axes)
