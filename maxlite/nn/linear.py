"""A matrix product whose einsum string is its documentation."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from maxlite.config.compute_schema import ComputeConfig
from maxlite.nn.equippable import Equippable
from maxlite.nn.lora import adapted, merged
from maxlite.nn.observe import note_input
from maxlite.nn.param import param
from maxlite.nn.stored import stored_kernel
from maxlite.ops.product import product
from maxlite.ops.quantized import quantized_product
from maxlite.ops.rounding import rounded
from maxlite.ops.stored import stored_product


class Linear(Equippable):
    """`x` times a kernel as the equation says, for example "BTD,DNH->BTNH", and perhaps plus a bias, here [N, H]."""

    equippable = True
    codes: nnx.Param
    scale: nnx.Param

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
        super().__init__()
        operands, output = equation.split("->")
        letters = list(zip(operands.split(",")[1], shape, axes, strict=True))
        self.equation, self.kernel_shape, self.kernel_axes = equation, shape, axes
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
        x = x.astype(self.dtype)
        note_input(self.equipment.path, x)
        y = self._product(x)
        if self.equipment.adapter is not None:
            y = y + adapted(self, x)
        return y + self.bias[...].astype(self.dtype) if self.use_bias else y

    def matrix(self) -> jax.Array:
        """Returns the kernel in the compute dtype, whatever it is stored as, with the adapter in it."""
        return self._matrix(None if self.equipment.stored is None else self.codes[...])

    def matrix_beside(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns x and matrix(), in which few bits become floats only once x is there.

        In a loop over tokens the compiler would otherwise make the floats of all layers before it, and keep them.
        """
        if self.equipment.stored is None:
            return x, self.matrix()
        x, codes = jax.lax.optimization_barrier((x, self.codes[...]))
        return x, self._matrix(codes)

    def _matrix(self, codes: jax.Array | None) -> jax.Array:
        kernel = rounded(self.kernel[...], self.dtype) if codes is None else stored_kernel(self, self.dtype, codes)
        return kernel if self.equipment.adapter is None else merged(self, kernel)

    def _product(self, x: jax.Array) -> jax.Array:
        equipment = self.equipment
        if equipment.stored is not None:
            return stored_product(self.equation, x, self.codes[...], self.scale[...], equipment.stored.qtype)
        kernel = rounded(self.kernel[...], self.dtype)
        if equipment.rule is not None:
            return quantized_product(self.equation, x, kernel, equipment.rule)
        return product(self.equation, x, kernel)


class NarrowLinear(Linear):
    """A gate of a few numbers a token: neither rounding nor an adapter makes sense there."""

    equippable = False
