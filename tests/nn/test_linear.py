import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.nn.linear import Linear
from tests.nn.layers import filled, run


@pytest.mark.parametrize(
    ("equation", "shape", "x_shape", "fan_in"),
    [
        ("BTD,DF->BTF", (6, 10), (2, 3, 6), 6),
        ("BTD,DNH->BTNH", (6, 4, 8), (2, 3, 6), 6),
        ("BTNH,NHD->BTD", (40, 8, 60), (2, 3, 40, 8), 320),
    ],
)
def test_the_equation_is_what_it_does(equation, shape, x_shape, fan_in, tiny_config, rngs):
    axes = tuple("axis" for _ in shape)
    linear = Linear(equation, shape, axes, tiny_config().compute, rngs=rngs)
    kernel = np.asarray(linear.kernel[...], np.float64)
    x = np.random.default_rng(0).normal(size=x_shape)
    expected = np.einsum(equation, x, kernel)
    np.testing.assert_allclose(run(linear, x.astype(np.float32)), expected, atol=1e-5)
    assert np.abs(kernel).max() <= 2 / np.sqrt(fan_in) / 0.8796
    if kernel.size > 1000:
        assert kernel.std() * np.sqrt(fan_in) == pytest.approx(1, abs=0.02)


def test_the_product_is_in_the_compute_dtype(tiny_config):
    compute = tiny_config("dtype=bfloat16").compute
    linear = filled(Linear("BTD,DF->BTF", (4, 4), ("embed", "mlp"), compute, rngs=None))
    assert linear.kernel.get_raw_value().dtype == jnp.float32
    assert jax.eval_shape(linear, np.ones((1, 1, 4), np.float32)).dtype == jnp.bfloat16


def test_a_bias_has_the_dimensions_that_are_made(tiny_config, rngs):
    axes = ("embed", "heads", "head_dim")
    linear = Linear("BTD,DNH->BTNH", (6, 4, 8), axes, tiny_config().compute, use_bias=True, rngs=rngs)
    assert linear.bias.shape == (4, 8) and linear.bias.get_metadata()["axes"] == ("heads", "head_dim")
    assert not np.any(linear.bias[...]) and not linear.bias.get_metadata()["decays"]
    x, bias = np.ones((1, 2, 6), np.float32), np.random.default_rng(0).normal(size=(4, 8))
    without = np.asarray(run(linear, x))
    linear.bias[...] = jnp.asarray(bias, jnp.float32)
    np.testing.assert_allclose(run(linear, x), without + bias, atol=1e-6)
