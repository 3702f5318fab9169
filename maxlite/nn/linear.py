"""A matrix product whose einsum string is its documentation."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from maxlite.config.schema import ComputeConfig
from maxlite.nn.param import param
from maxlite.ops.product import product


class Linear(nnx.Module):
    """`x` times a kernel, without bias, as the equation says, for example "BTD,DNH->BTNH"."""

    def __init__(
        self, equation: str, shape: tuple[int, ...], axes: tuple[str, ...], compute: ComputeConfig, *, rngs: nnx.Rngs
    ):
        """Makes the kernel; its fan-in is the size of the dimensions that the equation sums over."""
        kernel_letters = equation.split("->")[0].split(",")[1]
        summed = [size for size, c in zip(shape, kernel_letters, strict=True) if c not in equation.split("->")[1]]
        self.equation = equation
        self.dtype = jnp.dtype(compute.dtype)
        self.kernel = param(rngs, shape, axes, dtype=compute.weight_dtype, fan_in=math.prod(summed))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the product in the compute dtype."""
        return product(self.equation, x.astype(self.dtype), self.kernel[...].astype(self.dtype))
