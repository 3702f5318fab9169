"""Adapters beside a kernel: what they are made as, what they add, and that one inside the kernel adds the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlite.nn.equipment import Adapter, Equipment
from maxlite.nn.linear import Linear
from maxlite.nn.lora import adapter_equations, with_adapter

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


def filled(linear: Linear, seed: int = 1) -> Linear:
    draw = np.random.default_rng(seed)
    for name in ("lora_a", "lora_b"):
        weight = getattr(linear, name)
        weight[...] = jnp.asarray(draw.normal(size=weight.shape), weight.dtype)
    return linear


def test_the_letters_of_an_adapter_follow_the_products():
    assert adapter_equations("BTD,DNH->BTNH") == ("BTD,Dr->BTr", "BTr,rNH->BTNH", "Dr,rNH->DNH")
    assert adapter_equations("BTNH,NHD->BTD") == ("BTNH,NHr->BTr", "BTr,rD->BTD", "NHr,rD->NHD")
    assert adapter_equations("ERD,EDF->ERF") == ("ERD,EDr->ERr", "ERr,ErF->ERF", "EDr,ErF->EDF")


@pytest.mark.parametrize(("equation", "shape", "axes", "x_shape", "fan_in"), CASES)
def test_a_fresh_adapter_adds_nothing(equation, shape, axes, x_shape, fan_in, tiny_config, rngs):
    linear = build(equation, shape, axes, tiny_config(), rngs)
    plain = Linear(equation, shape, axes, tiny_config().compute, rngs=nnx.Rngs(params=jax.random.key(0)))
    x = jnp.asarray(np.random.default_rng(0).normal(size=x_shape), jnp.float32)
    np.testing.assert_array_equal(linear(x), plain(x))
    summed = len(x_shape) - 2
    assert linear.lora_a.shape == (*shape[:summed], 3) and linear.lora_b.shape == (3, *shape[summed:])
    assert linear.lora_a.get_metadata()["axes"] == (*axes[:summed], None)
    assert linear.lora_b.get_metadata()["axes"] == (None, *axes[summed:])
    drawn = np.abs(np.asarray(linear.lora_a[...]))
    assert 0.8 < drawn.max() * np.sqrt(fan_in) <= 1 and not np.any(linear.lora_b[...])
    assert linear.lora_a.get_metadata()["decays"] and linear.lora_b.get_metadata()["decays"]


@pytest.mark.parametrize(("equation", "shape", "axes", "x_shape", "fan_in"), CASES)
def test_it_adds_alpha_over_rank_times_its_product(equation, shape, axes, x_shape, fan_in, tiny_config, rngs):
    linear = filled(build(equation, shape, axes, tiny_config(), rngs))
    x = np.random.default_rng(0).normal(size=x_shape)
    left, right, kernel = (np.asarray(w[...], np.float64) for w in (linear.lora_a, linear.lora_b, linear.kernel))
    added = (left.reshape(-1, 3) @ right.reshape(3, -1)).reshape(shape) * 4
    expected = np.einsum(equation, x, kernel + added)
    np.testing.assert_allclose(linear(jnp.asarray(x, jnp.float32)), expected, atol=2e-4)
    np.testing.assert_allclose(linear.matrix(), kernel + added, atol=1e-5)


def test_layers_and_experts_are_merged_at_once():
    draw = np.random.default_rng(0)
    kernel, left, right = (
        draw.normal(size=size).astype(np.float32) for size in ((5, 2, 6, 4), (5, 2, 6, 3), (5, 2, 3, 4))
    )
    found = with_adapter("ERD,EDF->ERF", jnp.asarray(kernel), jnp.asarray(left), jnp.asarray(right), ADAPTER)
    np.testing.assert_allclose(found, kernel + 4 * left @ right, atol=1e-5)
    small = with_adapter(
        "ERD,EDF->ERF", jnp.asarray(kernel, jnp.bfloat16), jnp.asarray(left), jnp.asarray(right), ADAPTER
    )
    assert small.dtype == jnp.bfloat16


def test_without_rngs_there_are_shapes(tiny_config):
    config = tiny_config("weight_dtype=bfloat16")
    linear = build(*CASES[1][:3], config, None)
    assert linear.lora_a.get_raw_value() == jax.ShapeDtypeStruct((6, 3), jnp.bfloat16)
    assert linear.lora_b.get_raw_value() == jax.ShapeDtypeStruct((3, 4, 8), jnp.bfloat16)


def test_the_adapter_computes_in_the_compute_dtype(tiny_config, rngs):
    linear = filled(build(*CASES[0][:3], tiny_config("dtype=bfloat16"), rngs))
    assert linear.lora_a[...].dtype == jnp.float32
    assert linear(jnp.ones((1, 1, 6))).dtype == jnp.bfloat16
    assert linear.matrix().dtype == jnp.bfloat16
