"""Writes the step's programs into the run directory, for people who want to read them."""

from pathlib import Path

import jax

from maxlite.checkpoint.run_directory import RunDirectory
from maxlite.config.schema import MetricsConfig
from maxlite.errors import CheckpointError
from maxlite.processes.group import is_primary
from maxlite.train.setup import Setup


def dump_programs(
    metrics: MetricsConfig, setup: Setup, directory: RunDirectory, compiled: jax.stages.Compiled | None
) -> None:
    """Writes `jaxpr/train_step.txt` and `hlo/train_step.txt` (before and after XLA's passes) as the keys ask.

    compiled: the step, where a file had it already.
    """
    if not (metrics.dump_hlo or metrics.dump_jaxpr):
        return
    traced = setup.train_step.trace(setup.abstract, setup.abstract_batch)
    if metrics.dump_jaxpr:
        _write(directory.jaxpr / "train_step.txt", str(traced.jaxpr))
    if metrics.dump_hlo:
        lowered = traced.lower()
        _write(directory.hlo / "train_step.before_optimizations.txt", lowered.as_text())
        _write(directory.hlo / "train_step.txt", (compiled or lowered.compile()).as_text() or "")


def _write(path: Path, text: str) -> None:
    # All processes compile, since some compilers ask one another; one writes.
    if not is_primary():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} can't be written: {error.strerror}.") from error
