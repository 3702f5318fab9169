"""A matrix product whose weight gradient is computed in the orientation that is cheap on a CPU."""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(equation: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns the einsum of two operands, for example "BTD,DNH->BTNH", with gradients for both.

    No letter may be repeated within an operand, and none may be in the kernel alone or in x alone and be summed.
    """
    return jnp.einsum(equation, x, kernel)


def _forward(equation: str, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product(equation, x, kernel), (x, kernel)


def _backward(
    equation: str, residuals: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    operands, output = equation.split("->")
    left, right = operands.split(",")
    summed = "".join(letter for letter in right if letter not in output)
    kept = "".join(letter for letter in right if letter in output)
    x_gradient = jnp.einsum(f"{output},{right}->{left}", gradient, kernel)
    # XLA's CPU matmul transposes its first operand here, together with whatever computed it, so the narrower one
    # goes first. jax's own rule always takes the output's gradient: for a gated MLP four times the matmul's cost.
    if x.size < gradient.size:
        made = summed + kept
        kernel_gradient = jnp.einsum(f"{left},{output}->{made}", x, gradient)
    else:
        made = kept + summed
        kernel_gradient = jnp.einsum(f"{output},{left}->{made}", gradient, x)
    return x_gradient, kernel_gradient.transpose([made.index(letter) for letter in right])


product.defvjp(_forward, _backward)
