import jax
import jax.numpy as jnp
import pytest

from maxlite.config.schema import MetricsConfig
from maxlite.metrics.profiler import StepProfiler

compute = jax.jit(lambda x: x @ x)


def run(tmp_path, metrics, steps):
    """Runs steps from 10 on and returns after which of them a trace was there."""
    ended = []
    with StepProfiler(tmp_path, metrics) as profiler:
        for step in steps:
            profiler.before_step(step)
            if profiler.after_step(compute(jnp.ones((8, 8)))) is not None:
                ended.append(step)
    return ended


def traces(tmp_path):
    return list((tmp_path / "tensorboard" / "plugins" / "profile").glob("*/*.xplane.pb"))


def settings(**changes):
    return {"profiler": "xplane", "skip_first_n_steps_for_profiler": 1, "profiler_steps": 2} | changes


def test_traces_the_steps_asked_for(tmp_path, section):
    assert run(tmp_path, section(MetricsConfig, **settings()), range(10, 15)) == [12]
    (trace,) = traces(tmp_path)
    text = trace.read_bytes()
    assert b"step_num" in text and b"train" in text


def test_a_run_that_ends_early_keeps_its_trace(tmp_path, section):
    assert run(tmp_path, section(MetricsConfig, **settings(profiler_steps=50)), range(10, 12)) == []
    assert len(traces(tmp_path)) == 1


@pytest.mark.parametrize("changes", [{"profiler": None}, {"skip_first_n_steps_for_profiler": 5}])
def test_no_trace(tmp_path, section, changes):
    assert run(tmp_path, section(MetricsConfig, **settings(**changes)), range(10, 13)) == []
    assert not (tmp_path / "tensorboard").exists()
