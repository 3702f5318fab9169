import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlite.nn.mlp import GatedMLP, build_gate

ERF = np.vectorize(math.erf)
ACTIVATION = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + ERF(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATION)
def test_against_numpy(activation, bias, tiny_config, rngs):
    config = tiny_config(f"mlp_activation={activation}", f"mlp_bias={str(bias).lower()}")
    graphdef, state = nnx.split(GatedMLP(config.model, config.compute, 40, rngs=rngs))
    state = jax.tree.map(lambda leaf: leaf + 0.1, state)
    mlp = nnx.merge(graphdef, state)
    x = np.random.default_rng(0).normal(size=(2, 3, 64))

    def linear(part, x):
        return x @ np.asarray(part.kernel[...], np.float64) + (np.asarray(part.bias[...]) if bias else 0)

    assert mlp.gate.kernel.shape == (64, 40)
    expected = linear(mlp.down, ACTIVATION[activation](linear(mlp.gate, x)) * linear(mlp.up, x))
    np.testing.assert_allclose(mlp(jnp.asarray(x, jnp.float32)), expected, rtol=1e-5, atol=1e-4)


def test_the_clipped_unit_of_gpt_oss(tiny_config):
    join = build_gate(tiny_config("mlp_activation=swigluoai", "mlp_activations_limit=2", "glu_alpha=1.5").model)
    gate, up = np.meshgrid(np.linspace(-4, 4, 17), np.linspace(-4, 4, 17))
    clipped = np.minimum(gate, 2)
    expected = clipped / (1 + np.exp(-1.5 * clipped)) * (np.clip(up, -2, 2) + 1)
    np.testing.assert_allclose(join(jnp.asarray(gate), jnp.asarray(up)), expected, atol=1e-6)
