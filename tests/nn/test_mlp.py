import math

import numpy as np
import pytest

from maxlite.config.schema import KEYS
from maxlite.nn.mlp import ACTIVATION, GatedMLP

REFERENCE = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: max(x, 0.0),
}


def test_every_activation_of_the_schema_exists():
    assert tuple(ACTIVATION) == KEYS["mlp_activation"].choices == tuple(REFERENCE)


@pytest.mark.parametrize("name", REFERENCE)
def test_against_numpy(name, tiny_config, rngs):
    config = tiny_config(f"mlp_activation={name}", "emb_dim=8", "mlp_dim=12")
    mlp = GatedMLP(config.model, config.compute, rngs=rngs)
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
    gate, up, down = (np.asarray(part.kernel[...], np.float64) for part in (mlp.gate, mlp.up, mlp.down))
    expected = (np.vectorize(REFERENCE[name])(x @ gate) * (x @ up)) @ down
    np.testing.assert_allclose(mlp(x), expected, atol=1e-5)
