"""Saves training state in the background and finds the step to go on from."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from maxlite.checkpoint.atomicity import atomicity_of
from maxlite.checkpoint.keep import StepInfo, kept_steps
from maxlite.checkpoint.names import CHECKPOINTS, ELSEWHERE
from maxlite.checkpoint.place import is_bucket, place_of
from maxlite.checkpoint.quiet import quiet_orbax
from maxlite.checkpoint.record import read_record
from maxlite.checkpoint.report import RestoreReport
from maxlite.checkpoint.restore import restore_step
from maxlite.checkpoint.step_folder import (
    clear_incomplete,
    complete_steps,
    find_checkpoints,
    missing_file,
    remove_step,
    step_numbers,
    temporary_folders,
)
from maxlite.checkpoint.tree import leaf_paths
from maxlite.checkpoint.writer import Step, StepWriter, failed_save
from maxlite.config.schema import CheckpointConfig
from maxlite.errors import CheckpointError, MaxliteError
from maxlite.processes.group import is_primary, on_primary


class Checkpointer:
    """The checkpoints of one run: `RUN/checkpoints/<n>` holds the state after n steps.

    One run may save to a run directory at a time (RunDirectory.lock). Reading makes no files. All processes of the run
    make the same calls in the same order; what depends on the folder is decided by process 0.
    """

    def __init__(self, run_directory: Path, checkpoint: CheckpointConfig, *, lean: bool = False):
        """Reads nothing yet; the folder need not exist. lean: one array is on its way to disk at a time.

        With checkpoint_directory, its folder of the run's name holds the checkpoints, and the run says so in a file.

        Raises:
            CheckpointError: the bucket of checkpoint_directory can't be reached.
        """
        quiet_orbax()
        self._run, elsewhere = place_of(run_directory), checkpoint.checkpoint_directory
        self._folder = (place_of(elsewhere) / self._run.name if elsewhere else self._run) / CHECKPOINTS
        self._config = checkpoint
        self._lean = lean
        self._writer: StepWriter | None = None
        self._step: int | None = None

    @property
    def current_step(self) -> int | None:
        """The step that was last saved (perhaps still being written) or restored here: no need to save it again."""
        return self._step

    @property
    def skipped_steps(self) -> list[str]:
        """Saves newer than latest_step() that never ended, each with what it lacks; to be asked before saving."""
        return on_primary("skipped steps", self._skipped)

    def latest_step(self) -> int | None:
        """Returns the newest complete step on disk; half-written ones never count.

        Raises:
            CheckpointError: the run's checkpoints lie elsewhere than checkpoint_directory now says.
        """
        return on_primary("latest step", self._latest)

    def save(
        self, step: int, items: Any, data_state: dict[str, Any], metrics: Mapping[str, float] | None = None
    ) -> None:
        """Saves one step; with async_checkpointing it returns when the arrays have been copied.

        Half-written steps in the folder are cleared away before the first save; after each, the steps that no
        key keeps are removed.

        Args:
            step: number of steps done.
            items: pytree of jax.Array with the top-level names step, params and opt_state.
            data_state: the data position, as JSON would hold it.
            metrics: tag -> value of that step, by which it may be among the best.

        Raises:
            CheckpointError: the step is there already, the disk is full or can't be written, or the background
                save before this one failed.
        """
        assert json.loads(json.dumps(data_state)) == data_state, "the data state must survive JSON"
        self.wait()
        arrays = leaf_paths(items)
        num_bytes = sum(array.nbytes for array in arrays.values())
        atomicity = on_primary("checkpoint folder", lambda: self._make_way(step, num_bytes))
        if self._writer is None:
            largest = max((array.nbytes for array in arrays.values()), default=0)
            background = self._config.async_checkpointing
            largest_bytes = largest if self._lean else None
            self._writer = StepWriter(self._folder, atomicity, largest_bytes, background=background)
        try:
            self._writer.start(Step(step, arrays, data_state, dict(metrics or {})), self._remove_old)
        except Exception as error:
            raise failed_save(self._folder, step, error) from error
        self._step = step
        if not self._config.async_checkpointing:
            self.wait()

    def restore(
        self, step: int, abstract_items: Any, report: Callable[[RestoreReport], object] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the items and the data state of one step.

        Args:
            step: a step that is complete on disk.
            abstract_items: pytree of jax.ShapeDtypeStruct with the shardings wanted now; another dtype is a cast.
            report: is given what was read.

        Raises:
            CheckpointError: the step is not there, damaged, or has other arrays.
        """
        on_primary("checkpoint step", lambda: self._require(step))
        items_and_data_state = restore_step(self._folder / str(step), abstract_items, report)
        self._step = step
        return items_and_data_state

    def failed(self) -> MaxliteError | None:
        """Returns why the save in the background failed, if it has; once: who asks raises it. Costs nothing."""
        return None if self._writer is None else self._writer.failed()

    def wait(self) -> None:
        """Blocks until the save in the background is on disk. Raises CheckpointError if it failed."""
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Waits as `wait` does, then ends the threads; the last call on this object."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    def _latest(self) -> int | None:
        former = find_checkpoints(self._run)
        if former != self._folder and complete_steps(former):
            raise CheckpointError(
                f"the checkpoints of this run lie at {former}, and checkpoint_directory now says {self._folder}. "
                "Set it back to go on with them, or choose another run_name."
            )
        return max(complete_steps(self._folder), default=None)

    def _skipped(self) -> list[str]:
        latest = max(complete_steps(self._folder), default=-1)
        # What is left of an old step, whose removal was cut short, was no save.
        unfinished = [one for one in temporary_folders(self._folder) if int(one.name.partition(".")[0]) > latest]
        skipped = []
        for step in step_numbers(self._folder):
            folder = self._folder / str(step)
            missing = missing_file(folder)
            if missing is not None and step > latest and folder not in unfinished:
                skipped.append(f"{step} ({missing} is missing)")
        return skipped + [f"{folder.name} (never finished)" for folder in unfinished]

    def _require(self, step: int) -> None:
        if step not in step_numbers(self._folder):
            steps = ", ".join(map(str, complete_steps(self._folder))) or "none"
            raise CheckpointError(f"there is no checkpoint {self._folder / str(step)}; complete steps: {steps}")

    def _make_way(self, step: int, num_bytes: int) -> str:
        """Runs on process 0 before a save; returns how the step is to become complete."""
        folder = self._folder / str(step)
        if folder.is_dir() and missing_file(folder) is None:
            raise CheckpointError(f"checkpoint {folder} is there already and is never overwritten")
        self._check_free_space(step, num_bytes)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not is_bucket(self._folder):
                self._probe()
            if self._config.checkpoint_directory and not is_bucket(self._run):
                self._run.mkdir(parents=True, exist_ok=True)
                (self._run / ELSEWHERE).write_text(f"{self._folder}\n")
            if self._writer is None:
                clear_incomplete(self._folder)
        except Exception as error:
            raise failed_save(self._folder, step, error) from error
        return atomicity_of(self._config.checkpoint_atomicity, self._folder)

    def _probe(self) -> None:
        """Makes a folder and removes it: where that fails, orbax would leave threads that wait for hours."""
        probe = self._folder / ".probe"
        probe.mkdir(exist_ok=True)
        probe.rmdir()

    def _remove_old(self) -> None:
        """Runs in the background when a step is complete: removes the steps that no key keeps."""
        if not is_primary():
            return
        infos = []
        for step in complete_steps(self._folder):
            try:
                record = read_record(self._folder / str(step))
            except ValueError:
                continue  # Damaged: its owner is told when it is read, and till then it stays.
            infos.append(StepInfo(step, record.time, record.metrics))
        kept = kept_steps(infos, self._config)
        for info in infos:
            if info.step not in kept:
                remove_step(self._folder / str(info.step))

    def _check_free_space(self, step: int, num_bytes: int) -> None:
        if is_bucket(self._folder):
            return
        existing = next(folder for folder in (self._folder, *self._folder.parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        if num_bytes > free:
            raise CheckpointError(
                f"no disk space for the checkpoint of step {step}: it needs up to {_size(num_bytes)} and "
                f"{existing} has {_size(free)} free. Make room, or choose another base_output_directory "
                "or a smaller max_num_checkpoints_to_keep; earlier checkpoints are intact."
            )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3f} MB"
