"""Runs of the train command inside the test process, and what they logged."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from maxlite.train.run import TrainResult, run_train

# Sizes that every split of eight devices divides.
DIVISIBLE = ("num_query_heads=8", "num_kv_heads=8", "head_dim=8", "emb_dim=64", "mlp_dim=64", "jax_cache_dir=null")


@pytest.fixture
def train(tiny_config, tmp_path) -> Callable[..., TrainResult]:
    """train(*overrides): runs to the end in tmp_path/NAME (run_name=NAME)."""

    def run(*overrides: str) -> TrainResult:
        fixed = (
            *DIVISIBLE,
            f"base_output_directory={tmp_path}",
            "enable_tensorboard=false",
            "peak_tflops_per_device=1",
        )
        # A test may give again what is fixed here.
        return run_train(tiny_config(*{text.partition("=")[0]: text for text in (*fixed, *overrides)}.values()))

    return run


@pytest.fixture
def corpus(tmp_path) -> Path:
    """64 documents of words, each with its own marker, in a folder."""
    folder = tmp_path / "corpus"
    folder.mkdir()
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
