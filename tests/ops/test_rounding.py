"""Rounding of weights against numpy's own conversions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.ops.rounding import rounded


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_the_same_as_a_conversion_and_its_gradient(dtype):
    generator = np.random.default_rng(0)
    weight = np.concatenate([generator.normal(size=500) * 10.0 ** generator.integers(-6, 4, 500), [0.0, -0.0, np.inf]])
    weight = weight.astype(np.float32)
    cotangent = generator.normal(size=weight.shape).astype(dtype)
    made, pull_back = jax.vjp(jax.jit(lambda weight: rounded(weight, jnp.dtype(dtype))), weight)
    assert made.dtype == dtype
    np.testing.assert_array_equal(made, weight.astype(dtype))
    np.testing.assert_array_equal(pull_back(cotangent)[0], cotangent.astype(np.float32))


def test_a_wider_dtype_keeps_all_bits():
    weight = jnp.asarray([1.0, 0.1, 3e-5], jnp.bfloat16)
    made = rounded(weight, jnp.dtype("float32"))
    assert made.dtype == jnp.float32
    np.testing.assert_array_equal(made, weight.astype(jnp.float32))
