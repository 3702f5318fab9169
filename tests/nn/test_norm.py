import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.nn.norm import RMSNorm


def build(tiny_config, rngs, shape, *overrides):
    config = tiny_config("normalization_layer_epsilon=0.3", *overrides)
    return RMSNorm(shape, ("norm",) * len(shape), config.model, config.compute, rngs=rngs)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_against_numpy(shape, offset, tiny_config, rngs):
    norm = build(tiny_config, rngs, shape, f"norm_scale_offset={offset}")
    generator = np.random.default_rng(0)
    scale, x = generator.normal(size=shape), generator.normal(size=(2, 5, *shape)) * 3
    np.testing.assert_array_equal(norm.scale[...] + offset, np.ones(shape))
    norm.scale[...] = jnp.asarray(scale, jnp.float32)
    mean = np.mean(x**2, axis=tuple(range(-len(shape), 0)), keepdims=True)
    np.testing.assert_allclose(norm(jnp.asarray(x, jnp.float32)), x / np.sqrt(mean + 0.3) * (scale + offset), atol=1e-5)


def test_bfloat16_is_rounded_once(tiny_config, rngs):
    norm = build(tiny_config, rngs, (64,), "dtype=bfloat16")
    generator = np.random.default_rng(0)
    norm.scale[...] = jnp.asarray(generator.normal(size=64), jnp.float32)
    x = jnp.asarray(generator.normal(size=(3, 64)) * 100, jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt(np.mean(exact**2, -1, keepdims=True) + 0.3) * np.asarray(norm.scale[...], np.float64)
    found = norm(x)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, jnp.asarray(exact, jnp.bfloat16))
