"""Schedules against their formula, and which parameters decay."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.model.build import build_model
from maxlite.train.optimizer import build_optimizer, build_schedule


def expected_rate(step, peak, length, warmup_fraction, final_fraction, kind="cosine", decay_fraction=0.0):
    """The documented formula in float64, written apart from the code under test."""
    warmup, final = int(length * warmup_fraction), peak * final_fraction
    if step < warmup:
        return peak * (step + 1) / warmup
    if step >= length:
        return final
    if kind == "cosine":
        return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (length - warmup)))
    begins = length - int(length * decay_fraction)
    if step < begins:
        return peak
    over = (step - begins) / (length - begins)
    left = 1 - over if kind == "wsd linear" else 0.5 * (1 + math.cos(math.pi * over))
    return final + (peak - final) * left


@pytest.mark.parametrize("kind", ["cosine", "wsd linear", "wsd cosine"])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("steps", [50, 100, 150])
def test_schedules_follow_their_formula(tiny_config, kind, warmup, steps):
    name, _, style = kind.partition(" ")
    decay = 0.25 if warmup < 1 else 0.0
    config = tiny_config(
        f"lr_schedule_type={name}",
        f"wsd_decay_style={style or 'linear'}",
        "learning_rate=0.003",
        f"warmup_steps_fraction={warmup}",
        "learning_rate_final_fraction=0.1",
        f"wsd_decay_steps_fraction={decay}",
        "learning_rate_schedule_steps=100",
    )
    schedule = build_schedule(config.optimizer, steps)
    rates = np.array([float(schedule(jnp.int32(step))) for step in range(steps + 5)])
    wanted = [expected_rate(step, 0.003, 100, warmup, 0.1, kind, decay) for step in range(steps + 5)]
    assert np.all(np.isfinite(rates)) and np.all(rates > 0)
    assert np.max(np.abs(rates - wanted)) < 1e-9


def test_without_a_length_of_its_own_the_schedule_is_as_long_as_the_run(tiny_config):
    schedule = build_schedule(tiny_config("warmup_steps_fraction=0", "learning_rate=1").optimizer, 40)
    assert float(schedule(jnp.int32(40))) == pytest.approx(0.1)
    assert float(schedule(jnp.int32(20))) == pytest.approx(0.55)


def test_no_warmup_and_no_fall_is_constant_from_step_0(tiny_config):
    config = tiny_config("warmup_steps_fraction=0", "learning_rate_final_fraction=1", "learning_rate=0.5")
    schedule = build_schedule(config.optimizer, 10)
    assert {float(schedule(jnp.int32(step))) for step in range(12)} == {0.5}


@pytest.mark.parametrize("scan_layers", ["true", "false"])
def test_decay_shrinks_matrices_and_nothing_else(tiny_config, scan_layers):
    config = tiny_config(
        "learning_rate=0.1", "adam_weight_decay=0.1", "warmup_steps_fraction=0", f"scan_layers={scan_layers}"
    )
    model = build_model(config.model, config.compute)
    schedule = build_schedule(config.optimizer, 100)
    optimizer = build_optimizer(config.optimizer, schedule, model.decays)
    params = jax.jit(model.init)(jax.random.key(0))

    def update(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optimizer.update(zeros, optimizer.init(params), params, has_targets=jnp.bool_(True))[0]

    updates = jax.jit(update)(params)
    for path, update in jax.tree_util.tree_leaves_with_path(updates):
        name = jax.tree_util.keystr(path)
        before = params
        for key in path:
            before = before[key.key]
        wanted = np.zeros(before.shape) if "scale" in name else -0.01 * np.asarray(before)
        np.testing.assert_allclose(update, wanted, atol=1e-7, rtol=1e-5, err_msg=name)
    assert any("scale" in jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params))


def test_a_step_without_targets_moves_nothing_along_old_momentum(tiny_config):
    config = tiny_config("learning_rate=0.1", "adam_weight_decay=0", "warmup_steps_fraction=0")
    optimizer = build_optimizer(config.optimizer, build_schedule(config.optimizer, 9), {"w": True})
    params = {"w": jnp.ones((2, 2))}
    _, state = optimizer.update({"w": jnp.ones((2, 2))}, optimizer.init(params), params, has_targets=jnp.bool_(True))
    zero = {"w": jnp.zeros((2, 2))}
    still, _ = optimizer.update(zero, state, params, has_targets=jnp.bool_(False))
    moving, _ = optimizer.update(zero, state, params, has_targets=jnp.bool_(True))
    assert jnp.all(still["w"] == 0) and jnp.all(moving["w"] != 0)


def test_sgd_is_the_gradient_times_the_rate(tiny_config):
    config = tiny_config("opt_type=sgd", "learning_rate=0.5", "adam_weight_decay=0", "warmup_steps_fraction=0")
    optimizer = build_optimizer(config.optimizer, build_schedule(config.optimizer, 9), {"w": True})
    params = {"w": jnp.ones(3)}
    updates, _ = optimizer.update(
        {"w": jnp.array([1.0, 2, 3])}, optimizer.init(params), params, has_targets=jnp.bool_(True)
    )
    assert jnp.allclose(updates["w"], jnp.array([-0.5, -1, -1.5]))


def test_mu_dtype_is_that_of_the_first_moment_alone(tiny_config):
    config = tiny_config("mu_dtype=bfloat16")
    assert dataclasses.asdict(config.optimizer)["mu_dtype"] == "bfloat16"
    optimizer = build_optimizer(config.optimizer, build_schedule(config.optimizer, 9), {"w": True})
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(optimizer.init({"w": jnp.ones((2, 2))}))}
    assert dtypes == {"bfloat16", "float32", "int32"}
