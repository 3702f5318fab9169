"""A matrix product whose einsum string is its documentation."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from maxlite.config.schema import ComputeConfig
from maxlite.nn.param import param
from maxlite.ops.product import product
from maxlite.ops.rounding import rounded


class Linear(nnx.Module):
    """`x` times a kernel as the equation says, for example "BTD,DNH->BTNH", and perhaps plus a bias, here [N, H]."""

    def __init__(
        self,
        equation: str,
        shape: tuple[int, ...],
        axes: tuple[str, ...],
        compute: ComputeConfig,
        *,
        use_bias: bool = False,
        rngs: nnx.Rngs | None,
    ):
        """Makes the kernel, whose fan-in is the size of the dimensions that the equation sums over, and the bias."""
        operands, output = equation.split("->")
        letters = list(zip(operands.split(",")[1], shape, axes, strict=True))
        self.equation = equation
        self.dtype = jnp.dtype(compute.dtype)
        fan_in = math.prod(size for letter, size, _ in letters if letter not in output)
        self.kernel = param(rngs, shape, axes, dtype=compute.weight_dtype, fan_in=fan_in)
        if use_bias:
            made = [(size, axis) for letter, size, axis in letters if letter in output]
            sizes, names = zip(*made, strict=True)
            self.bias = param(rngs, sizes, names, dtype=compute.weight_dtype, value=0.0)
        self.use_bias = use_bias

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the product in the compute dtype."""
        y: jax.Array = product(self.equation, x.astype(self.dtype), rounded(self.kernel[...], self.dtype))
        return y + self.bias[...].astype(self.dtype) if self.use_bias else y
