"""Adapters beside a kernel: what they are made as, what they add, and that one inside the kernel adds the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlite.nn.equipment import Adapter, Equipment
from maxlite.nn.linear import Linear
from maxlite.nn.lora import adapter_equations, with_adapter
from tests.nn.layers import filled, in_float64, run

CASES = [
    ("BTD,DF->BTF", (6, 10), ("embed", "mlp"), (2, 3, 6), 6),
    ("BTD,DNH->BTNH", (6, 4, 8), ("embed", "heads", "head_dim"), (2, 3, 6), 6),
    ("BTNH,NHD->BTD", (4, 8, 6), ("heads", "head_dim", "embed"), (2, 3, 4, 8), 32),
]
ADAPTER = Adapter(rank=3, alpha=12.0)
EQUIPMENT = Equipment("group_0/block_0/mlp/up", adapter=ADAPTER)


def build(equation, shape, axes, config, rngs) -> Linear:
    linear = Linear(equation, shape, axes, config.compute, rngs=rngs)
    linear.equip(EQUIPMENT, rngs=rngs)
    return linear


def test_the_letters_of_an_adapter_follow_the_products():
    assert adapter_equations("BTD,DNH->BTNH") == ("BTD,Dr->BTr", "BTr,rNH->BTNH", "Dr,rNH->DNH")
    assert adapter_equations("BTNH,NHD->BTD") == ("BTNH,NHr->BTr", "BTr,rD->BTD", "NHr,rD->NHD")
    assert adapter_equations("ERD,EDF->ERF") == ("ERD,EDr->ERr", "ERr,ErF->ERF", "EDr,ErF->EDF")


@pytest.mark.parametrize(("equation", "shape", "axes", "x_shape", "fan_in"), CASES)
def test_a_fresh_adapter_adds_nothing(equation, shape, axes, x_shape, fan_in, tiny_config):
    config = tiny_config()

    def made(x):
        """The layer's weights and output, and what the one without an adapter that draws the same numbers gives."""
        linear = build(equation, shape, axes, config, nnx.Rngs(params=jax.random.key(0)))
        plain = Linear(equation, shape, axes, config.compute, rngs=nnx.Rngs(params=jax.random.key(0)))
        return nnx.state(linear), linear(x), plain(x)

    state, found, expected = jax.jit(made)(np.random.default_rng(0).normal(size=x_shape).astype(np.float32))
    np.testing.assert_array_equal(found, expected)
    lora_a, lora_b = state["lora_a"], state["lora_b"]
    summed = len(x_shape) - 2
    assert lora_a.shape == (*shape[:summed], 3) and lora_b.shape == (3, *shape[summed:])
    assert lora_a.get_metadata()["axes"] == (*axes[:summed], None)
    assert lora_b.get_metadata()["axes"] == (None, *axes[summed:])
    drawn = np.abs(np.asarray(lora_a.get_raw_value()))
    assert 0.8 < drawn.max() * np.sqrt(fan_in) <= 1 and not np.any(lora_b.get_raw_value())
    assert lora_a.get_metadata()["decays"] and lora_b.get_metadata()["decays"]


@pytest.mark.parametrize(("equation", "shape", "axes", "x_shape", "fan_in"), CASES)
def test_it_adds_alpha_over_rank_times_its_product(equation, shape, axes, x_shape, fan_in, tiny_config):
    linear = filled(build(equation, shape, axes, tiny_config(), None))
    x = np.random.default_rng(0).normal(size=x_shape)
    weights = in_float64(linear)
    added = (weights["lora_a"].reshape(-1, 3) @ weights["lora_b"].reshape(3, -1)).reshape(shape) * 4
    expected = np.einsum(equation, x, weights["kernel"] + added)
    np.testing.assert_allclose(run(linear, x.astype(np.float32)), expected, atol=5e-5)
    np.testing.assert_allclose(jax.jit(linear.matrix)(), weights["kernel"] + added, atol=1e-6)


def test_layers_and_experts_are_merged_at_once():
    draw = np.random.default_rng(0)
    kernel, left, right = (
        draw.normal(size=size).astype(np.float32) for size in ((5, 2, 6, 4), (5, 2, 6, 3), (5, 2, 3, 4))
    )
    merged = jax.jit(lambda *weights: with_adapter("ERD,EDF->ERF", *weights, ADAPTER))
    np.testing.assert_allclose(merged(kernel, left, right), kernel + 4 * left @ right, atol=1e-5)
    assert merged(kernel.astype(jnp.bfloat16), left, right).dtype == jnp.bfloat16


def test_without_rngs_there_are_shapes(tiny_config):
    config = tiny_config("weight_dtype=bfloat16")
    linear = build(*CASES[1][:3], config, None)
    assert linear.lora_a.get_raw_value() == jax.ShapeDtypeStruct((6, 3), jnp.bfloat16)
    assert linear.lora_b.get_raw_value() == jax.ShapeDtypeStruct((3, 4, 8), jnp.bfloat16)


def test_the_adapter_computes_in_the_compute_dtype(tiny_config):
    linear = filled(build(*CASES[0][:3], tiny_config("dtype=bfloat16"), None))
    assert linear.lora_a.get_raw_value().dtype == jnp.float32
    assert jax.eval_shape(linear, np.ones((1, 1, 6), np.float32)).dtype == jnp.bfloat16
    assert jax.eval_shape(linear.matrix).dtype == jnp.bfloat16
