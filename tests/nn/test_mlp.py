import math

import numpy as np
import pytest

from maxlite.nn.mlp import GatedMLP, build_gate
from tests.nn.layers import filled, run

ERF = np.vectorize(math.erf)
ACTIVATION = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + ERF(x / np.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATION)
def test_against_numpy(activation, bias, tiny_config):
    config = tiny_config(f"mlp_activation={activation}", f"mlp_bias={str(bias).lower()}")
    mlp = filled(GatedMLP(config.model, config.compute, 40, rngs=None), width=0.15)
    x = np.random.default_rng(0).normal(size=(2, 3, 64))

    def linear(part, x):
        return x @ np.asarray(part.kernel[...], np.float64) + (np.asarray(part.bias[...]) if bias else 0)

    assert mlp.gate.kernel.shape == (64, 40)
    expected = linear(mlp.down, ACTIVATION[activation](linear(mlp.gate, x)) * linear(mlp.up, x))
    np.testing.assert_allclose(run(mlp, x.astype(np.float32)), expected, rtol=1e-5, atol=1e-4)


def test_the_clipped_unit_of_gpt_oss(tiny_config):
    join = build_gate(tiny_config("mlp_activation=swigluoai", "mlp_activations_limit=2", "glu_alpha=1.5").model)
    gate, up = np.meshgrid(np.linspace(-4, 4, 17), np.linspace(-4, 4, 17))
    clipped = np.minimum(gate, 2)
    expected = clipped / (1 + np.exp(-1.5 * clipped)) * (np.clip(up, -2, 2) + 1)
    np.testing.assert_allclose(join(gate.astype(np.float32), up.astype(np.float32)), expected, atol=1e-6)
