"""Runs of the train command inside the test process, and what they logged."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from maxlite.config.schema import Config
from maxlite.train.run import TrainResult, run_train
from tests.conftest import load_tiny

# Sizes that every split of eight devices divides.
DIVISIBLE = ("num_query_heads=8", "num_kv_heads=8", "head_dim=8", "emb_dim=64", "mlp_dim=64", "jax_cache_dir=null")
# The smallest programs; and one schedule however many steps a run does, so that runs share them.
SMALL = ("cpu_devices=1", "attention=dot_product", "remat_policy=none", "learning_rate_schedule_steps=8")


def config_in(folder: Path, *overrides: str) -> Config:
    """The config of a small run in folder/NAME (run_name=NAME); a test may give again what is given here."""
    given = (
        *DIVISIBLE,
        *SMALL,
        f"base_output_directory={folder}",
        "enable_tensorboard=false",
        "peak_tflops_per_device=1",
        *overrides,
    )
    return load_tiny(*{text.partition("=")[0]: text for text in given}.values())


@pytest.fixture
def train(tmp_path) -> Callable[..., TrainResult]:
    """train(*overrides): runs to the end in tmp_path/NAME (run_name=NAME)."""
    return lambda *overrides: run_train(config_in(tmp_path, *overrides))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """64 documents of words, each with its own marker, in a folder."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(64):
        (folder / f"{number:02}.txt").write_text(f"<{number:02}> " + "ab cd ef " * (1 + number % 5))
    return folder


@pytest.fixture(scope="session")
def logged() -> Callable[..., dict[int, float]]:
    """logged(result or run directory, tag): what metrics.jsonl holds."""
    return read_logged


@pytest.fixture(scope="session")
def divisible() -> tuple[str, ...]:
    """Sizes that every split of eight devices divides."""
    return DIVISIBLE


def read_logged(result_or_path: TrainResult | Path, tag: str = "learning/loss") -> dict[int, float]:
    """Returns step -> value of one tag in a run's metrics.jsonl; fails if a step is there twice."""
    folder = result_or_path if isinstance(result_or_path, Path) else result_or_path.run_directory
    rows = [json.loads(line) for line in (folder / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert len({row["step"] for row in rows}) == len(rows), "a step has two rows"
    return {row["step"]: row[tag] for row in rows if tag in row}
