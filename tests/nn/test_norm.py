import jax.numpy as jnp
import numpy as np

from maxlite.nn.norm import RMSNorm


def test_against_numpy(tiny_config, rngs):
    norm = RMSNorm(8, 0.5, tiny_config().compute, rngs=rngs)
    scale = np.linspace(0.5, 2, 8, dtype=np.float32)
    norm.scale[...] = jnp.asarray(scale)
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    expected = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, -1, keepdims=True) + 0.5) * scale
    np.testing.assert_allclose(norm(x), expected, rtol=1e-5)


def test_statistics_are_float32_also_in_bfloat16(tiny_config, rngs):
    norm = RMSNorm(512, 1e-5, tiny_config("dtype=bfloat16").compute, rngs=rngs)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 512)) * 300, jnp.bfloat16)
    found = norm(x)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt(np.mean(exact**2, -1, keepdims=True) + 1e-5)
    assert found.dtype == jnp.bfloat16
    # One rounding to 8 bits of mantissa, no more.
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2**-8)
