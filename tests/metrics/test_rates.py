import math
from types import SimpleNamespace

import jax
import pytest

from maxlite.metrics.rates import (
    StepTiming,
    StepWork,
    device_memory_gib,
    eval_tags,
    perplexity,
    source_tags,
    step_tags,
)

SCALARS = {
    "loss": 2.5,
    "lm_loss": 2.0,
    "z_loss": 0.5,
    "total_weights": 5000.0,
    "total_tokens": 6000.0,
    "grad_norm": 1.0,
    "raw_grad_norm": 3.0,
    "param_norm": 50.0,
    "current_learning_rate": 1e-3,
}
WORK = StepWork(step_flops=8 * 10**12, padded_tokens=8000, num_devices=4, peak_tflops=10.0)


def test_tags_of_a_step():
    tags = step_tags(SCALARS, StepTiming(seconds=0.5, data_wait_seconds=0.02, hbm_peak_gib=3.0), WORK)

    assert tags == pytest.approx(
        {f"learning/{name}": value for name, value in SCALARS.items()}
        | {
            "learning/perplexity": math.e**2,
            "perf/step_time_seconds": 0.5,
            "perf/per_device_tflops": 2.0,
            "perf/per_device_tflops_per_sec": 4.0,
            "perf/per_device_tokens": 1500.0,
            "perf/per_device_tokens_per_sec": 3000.0,
            "perf/per_device_padded_tokens_per_sec": 4000.0,
            "perf/mfu": 0.4,
            "perf/data_wait_ms": 20.0,
            "data/packing_efficiency": 0.75,
            "perf/hbm_peak_gib": 3.0,
        }
    )


def test_a_step_that_compiled_has_no_rates():
    tags = step_tags(SCALARS, StepTiming(seconds=9.0, data_wait_seconds=0.0, compile_seconds=8.0), WORK)

    assert tags["perf/compile_seconds"] == 8.0
    assert tags["perf/step_time_seconds"] == 1.0
    assert not [tag for tag in tags if tag.endswith("_per_sec") or tag == "perf/mfu"]


def test_unknown_peak_and_memory_are_left_out():
    work = StepWork(step_flops=10, padded_tokens=10, num_devices=1, peak_tflops=None)
    tags = step_tags(SCALARS, StepTiming(seconds=1.0, data_wait_seconds=0.0), work)

    assert not {"perf/mfu", "perf/hbm_peak_gib", "perf/compile_seconds"} & tags.keys()


def test_tags_of_an_evaluation():
    tags = eval_tags(loss_sum=30.0, z_loss_sum=1.0, total_weights=10.0, seconds=2.0)

    assert tags == pytest.approx(
        {
            "eval/avg_loss": 3.0,
            "eval/avg_perplexity": math.e**3,
            "eval/total_loss": 30.0,
            "eval/total_weights": 10.0,
            "eval/avg_z_loss": 0.1,
            "eval/step_time_seconds": 2.0,
        }
    )


def test_an_evaluation_without_targets_has_loss_0():
    assert eval_tags(0.0, 0.0, 0.0, 1.0)["eval/avg_loss"] == 0.0


def test_perplexity_beyond_a_float():
    assert perplexity(1e6) == math.inf
    assert math.isnan(perplexity(math.nan))
    assert perplexity(0.0) == 1.0


def test_memory():
    assert device_memory_gib(jax.devices("cpu")[0]) is None
    device = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 3 * 2**30, "bytes_limit": 2**34})
    assert device_memory_gib(device) == (3.0, 16.0)
    assert device_memory_gib(SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 1})) is None


def test_a_source_without_targets_has_no_tag():
    assert source_tags("learning/loss_", ("a", "b", "c"), [6.0, 0.0, math.nan], [4.0, 0.0, 1.0]) == {
        "learning/loss_a": 1.5,
        "learning/loss_c": pytest.approx(math.nan, nan_ok=True),
    }
