"""Low-rank adapters beside a kernel (Hu et al. 2021, arXiv:2106.09685).

An adapter of a kernel [in..., out...] is lora_a [in..., r] and lora_b [r, out...]; their product, alpha / rank times,
is what it adds to the kernel, and is never made while it trains: x is multiplied with the one, then with the other.
Of experts all three begin with the expert: "ERD,EDF->ERF".
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxlite.nn.equipment import Adapter
from maxlite.nn.param import uniform_param
from maxlite.ops.product import product
from maxlite.ops.rounding import rounded

# No equation has it.
_RANK = "r"


class AdapterEquations(NamedTuple):
    """Einsum strings of an adapter: x -> narrow, narrow -> y, and lora_a, lora_b -> the kernel's own form."""

    down: str
    up: str
    kernel: str


def adapter_equations(equation: str) -> AdapterEquations:
    """Of the product "BTD,DNH->BTNH" these are "BTD,Dr->BTr", "BTr,rNH->BTNH" and "Dr,rNH->DNH"."""
    operands, output = equation.split("->")
    x, kernel = operands.split(",")
    left, right = _adapter_letters(equation)
    narrow = "".join(letter for letter in x if letter not in kernel or letter in output) + _RANK
    return AdapterEquations(f"{x},{left}->{narrow}", f"{narrow},{right}->{output}", f"{left},{right}->{kernel}")


def add_adapter(product: Any, adapter: Adapter, *, rngs: nnx.Rngs | None) -> None:
    """Adds lora_a [in..., r] and lora_b [r, out...] (experts: [E, in, r], [E, r, out]); lora_b begins as zeros.

    lora_a is uniform within one over the root of its fan-in, as that of PEFT. Both have the kernel's dtype and the
    names of its dimensions.

    product: with an `equation`, whose kernel is still its parameter `kernel`.
    """
    kernel = product.kernel
    letters = product.equation.split("->")[0].split(",")[1]
    dimensions = dict(zip(letters, zip(kernel.shape, kernel.get_metadata()["axes"], strict=True), strict=True))
    dimensions[_RANK] = (adapter.rank, None)
    left, right = (_shape_and_axes(part, dimensions) for part in _adapter_letters(product.equation))
    summed = [letter for letter in letters if letter not in product.equation.split("->")[1]]
    fan_in = math.prod(dimensions[letter][0] for letter in summed)
    product.lora_a = uniform_param(rngs, *left, dtype=str(kernel.dtype), bound=fan_in**-0.5)
    product.lora_b = uniform_param(rngs, *right, dtype=str(kernel.dtype), bound=0.0)


def adapted(linear: Any, x: jax.Array) -> jax.Array:
    """Returns what the adapter adds to the product of x, in the compute dtype."""
    down, up, _ = adapter_equations(linear.equation)
    narrow: jax.Array = product(down, x, rounded(linear.lora_a[...], linear.dtype))
    # On the narrow side, where it costs least.
    return product(up, narrow * factor(linear.equipment.adapter), rounded(linear.lora_b[...], linear.dtype))


def merged(product: Any, kernel: jax.Array) -> jax.Array:
    """Returns the kernel with the adapter in it, in the kernel's dtype."""
    return with_adapter(product.equation, kernel, product.lora_a[...], product.lora_b[...], product.equipment.adapter)


def with_adapter(equation: str, kernel: jax.Array, lora_a: jax.Array, lora_b: jax.Array, adapter: Adapter) -> jax.Array:
    """Returns a kernel with an adapter in it, in the kernel's dtype; computed in float32.

    equation: of the product. kernel, lora_a, lora_b: of one layer, or stacked over layers.
    """
    operands, made = adapter_equations(equation).kernel.split("->")
    left, right = operands.split(",")
    added = jnp.einsum(
        f"...{left},...{right}->...{made}",
        lora_a.astype(jnp.float32),
        lora_b.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return (kernel.astype(jnp.float32) + factor(adapter) * added).astype(kernel.dtype)


def factor(adapter: Adapter) -> float:
    """How often an adapter counts."""
    return adapter.alpha / adapter.rank


def _adapter_letters(equation: str) -> tuple[str, str]:
    """The letters of lora_a and lora_b: those of the kernel that x has, and those that the output has."""
    operands, output = equation.split("->")
    x, kernel = operands.split(",")
    shared = "".join(letter for letter in kernel if letter in x and letter in output)
    summed = "".join(letter for letter in kernel if letter not in output)
    made = "".join(letter for letter in kernel if letter not in x)
    return shared + summed + _RANK, shared + _RANK + made


def _shape_and_axes(
    letters: str, dimensions: dict[str, tuple[int, str | None]]
) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
    sizes, axes = zip(*(dimensions[letter] for letter in letters), strict=True)
    return sizes, axes
