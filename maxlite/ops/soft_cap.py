"""Bounds by tanh (Gemma 2, arXiv:2408.00118)."""

import jax
import jax.numpy as jnp


def soft_capped(x: jax.Array, soft_cap: float | None) -> jax.Array:
    """Returns x bounded to (-soft_cap, soft_cap), in its own dtype; None leaves it alone."""
    return x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)
