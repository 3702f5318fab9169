import jax
import jax.numpy as jnp
import pytest

from maxlite.metrics.recompile import RecompileWatch


def train_step(state, batch):
    return {"weights": state["weights"] + batch["tokens"].sum()}


@pytest.fixture
def step():
    # A new wrapper, so that no other test's compilation is found in jax's cache.
    def wrapped(state, batch):
        return train_step(state, batch)

    wrapped.__name__ = "train_step"
    return jax.jit(wrapped, donate_argnums=0)


@pytest.fixture
def watch():
    with RecompileWatch("train_step") as watch:
        yield watch


def call(step, watch, state, batch):
    step(state, batch)
    return watch.check({"state": state, "batch": batch})


def fresh_state():
    return {"weights": jnp.zeros((3,))}


def test_first_compile_is_timed_without_a_warning(step, watch):
    compilation = call(step, watch, fresh_state(), {"tokens": jnp.ones((2, 4))})

    assert compilation.seconds > 0
    assert compilation.warning is None
    assert call(step, watch, fresh_state(), {"tokens": jnp.ones((2, 4))}) is None


@pytest.mark.parametrize(
    ("tokens", "change"),
    [
        (lambda: jnp.ones((2, 5)), "batch['tokens'] shape [2, 4] -> [2, 5]"),
        (lambda: jnp.ones((2, 4), jnp.int32), "batch['tokens'] dtype float32 -> int32"),
        (lambda: jnp.full((2, 4), 1.0), "batch['tokens'] weak type False -> True"),
        (lambda: jax.device_put(jnp.ones((2, 4)), jax.devices()[1]), "batch['tokens'] sharding SingleDeviceSharding("),
    ],
)
def test_second_compile_names_what_changed(step, watch, tokens, change):
    call(step, watch, fresh_state(), {"tokens": jnp.ones((2, 4))})
    compilation = call(step, watch, fresh_state(), {"tokens": tokens()})

    assert compilation.warning.startswith("train_step was compiled again, in ")
    assert f" s: {change}" in compilation.warning
    assert "state" not in compilation.warning


def test_structure_that_changed(step, watch):
    call(step, watch, fresh_state(), {"tokens": jnp.ones((2, 4))})
    compilation = call(step, watch, fresh_state(), {"tokens": jnp.ones((2, 4)), "extra": jnp.ones(())})

    assert "batch['extra'] is new" in compilation.warning


def test_compared_with_the_nearest_of_all_earlier_calls(step, watch):
    call(step, watch, fresh_state(), {"tokens": jnp.ones((2, 4))})
    call(step, watch, {"weights": jnp.zeros((7,))}, {"tokens": jnp.ones((9, 9))})
    compilation = call(step, watch, fresh_state(), {"tokens": jnp.ones((2, 6))})

    assert "batch['tokens'] shape [2, 4] -> [2, 6]" in compilation.warning


def test_setting_of_jax_that_changed(step, watch):
    call(step, watch, fresh_state(), {"tokens": jnp.ones((2, 4))})
    with jax.default_matmul_precision("highest"):
        compilation = call(step, watch, fresh_state(), {"tokens": jnp.ones((2, 4))})

    assert "a jax setting or the mesh has changed" in compilation.warning


def test_other_functions_are_not_its_business(watch):
    jax.jit(lambda x: x * 3)(jnp.ones((11,)))

    assert watch.check({}) is None


def test_a_closed_watch_hears_nothing(step):
    with RecompileWatch("train_step") as watch:
        pass

    assert call(step, watch, fresh_state(), {"tokens": jnp.ones((2, 4))}) is None


def test_a_known_variant_is_no_surprise_and_is_compared_with_itself_alone(step, watch):
    found = []
    for length, dtype in ((4, jnp.float32), (8, jnp.float32), (8, jnp.int32)):
        state = fresh_state()
        batch = {"tokens": jnp.ones((2, length), dtype)}
        step(state, batch)
        found.append(watch.check({"state": state, "batch": batch}, length))
    assert [compilation.warning is None for compilation in found] == [True, True, False]
    assert "shape" not in found[2].warning and "dtype float32 -> int32" in found[2].warning
