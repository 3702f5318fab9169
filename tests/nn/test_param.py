import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.nn.param import param


def test_a_weight_carries_its_names_and_dtype(rngs):
    weight = param(rngs, (64, 100), ("embed", "mlp"), dtype="bfloat16", fan_in=64)
    assert weight.get_metadata()["axes"] == ("embed", "mlp")
    assert (weight.shape, weight[...].dtype) == ((64, 100), jnp.bfloat16)


def test_variance_is_one_over_fan_in_and_tails_are_cut(rngs):
    values = np.asarray(param(rngs, (64, 1000), ("embed", "mlp"), dtype="float32", fan_in=64)[...])
    assert values.std() * 8 == pytest.approx(1, abs=0.02) and abs(values.mean()) < 0.002
    assert np.abs(values).max() <= 2 / 8 / 0.8796


def test_without_fan_in_a_weight_is_ones(rngs):
    assert (param(rngs, (3,), ("norm",), dtype="float32")[...] == 1).all()


def test_one_name_a_dimension(rngs):
    with pytest.raises(AssertionError):
        param(rngs, (3, 4), ("embed",), dtype="float32")
