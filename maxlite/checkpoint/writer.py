"""Writes one step after the other in the background; what fails there is known at once, on every process."""

import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from orbax.checkpoint import options as orbax_options

from maxlite.checkpoint.arrays import array_handler, save_arguments
from maxlite.checkpoint.atomicity import COMMIT_FILE
from maxlite.checkpoint.checksums import PendingSums
from maxlite.checkpoint.names import DATA_STATE, ITEMS
from maxlite.checkpoint.priority import low_writers
from maxlite.checkpoint.record import Leaf, StepRecord, write_record
from maxlite.checkpoint.staging import Staging
from maxlite.checkpoint.step_folder import complete_steps, list_files, temporary_folder
from maxlite.checkpoint.tree import nested
from maxlite.errors import CheckpointError, MaxliteError
from maxlite.processes.group import exchange, num_processes, together

# A save that is not on disk after so long has failed: a slow disk needs hours for the largest models.
_MOST_SECONDS = 12 * 3600
# What the processes wait for together, in the order in which it happens.
_STAGES = ("checkpoint written", "checkpoint complete")


@dataclasses.dataclass(frozen=True)
class Step:
    """A step to be saved. arrays: path -> array. data_state: as JSON would hold it. metrics: tag -> value."""

    number: int
    arrays: Mapping[str, jax.Array]
    data_state: dict[str, Any]
    metrics: Mapping[str, float]


class _Save:
    """A step on its way to disk: what its record will say. stages_passed: of _STAGES."""

    def __init__(self, step: Step, *, background: bool):
        """Starts the checksums; in the background they give way to other work."""
        self.number, self.metrics, self.time = step.number, dict(step.metrics), time.time()
        self.leaves = {path: (array.shape, str(array.dtype)) for path, array in step.arrays.items()}
        self.mesh = _mesh_of(step.arrays)
        self.pending = PendingSums(step.arrays, background=background)
        self.sums: dict[str, int] = {}
        self.stages_passed = 0

    def pass_stage(self) -> None:
        """Waits for the other processes; fails on all of them if one can't come."""
        stage = self.stages_passed
        # Before the stage counts as passed: what fails here is told to the others in it.
        own = self.pending.own() if stage == 0 else []
        self.stages_passed += 1
        together(_STAGES[stage], lambda: None)
        if stage == 0:
            texts = exchange("checkpoint sums", json.dumps(own))
            self.sums = self.pending.combined([json.loads(text) for text in texts])

    def record(self, folder: Path, atomicity: str) -> StepRecord:
        """Returns the record of the step whose files are in a folder."""
        # A process that is alone passes no stages.
        sums = self.sums or self.pending.combined([self.pending.own()])
        return StepRecord(
            time=self.time,
            metrics=self.metrics,
            atomicity=atomicity,
            num_processes=num_processes(),
            mesh=self.mesh,
            versions={"jax": jax.__version__, "orbax": ocp.__version__},
            files=list_files(folder),
            leaves={path: Leaf(*leaf, sums[path]) for path, leaf in self.leaves.items()},
        )


class StepWriter:
    """Saves steps into RUN/checkpoints with orbax, one at a time, from threads of its own.

    All processes make one and call it alike: each writes its part, and process 0 completes the step.
    """

    def __init__(self, checkpoints: Path, atomicity: str, largest_bytes: int | None, *, background: bool):
        """Makes nothing on disk.

        atomicity: rename or commit_file. largest_bytes: that many bytes at most are on their way to disk at a time.
        background: steps are trained meanwhile, and go first.
        """
        self._checkpoints, self._atomicity, self._lean = checkpoints, atomicity, largest_bytes is not None
        self._failure: MaxliteError | None = None
        self._thread: threading.Thread | None = None
        self._save: _Save | None = None
        self._staging = Staging() if background else None
        mode = orbax_options.AtomicityMode.COMMIT_FILE if atomicity == COMMIT_FILE else None
        shared: dict[str, Any] = {
            "multiprocessing_options": _orbax_processes(),
            "async_options": orbax_options.AsyncOptions(
                timeout_secs=_MOST_SECONDS,
                barrier_sync_fn=self._pass_stage,
                post_finalization_callback=self._write_record,
            ),
            "atomicity_options": orbax_options.AtomicityOptions(mode or orbax_options.AtomicityMode.ATOMIC_RENAME),
        }
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(**shared),
            **{ITEMS: array_handler(largest_bytes), DATA_STATE: ocp.JsonCheckpointHandler()},
        )
        self._orbax = ocp.AsyncCheckpointer(handler, **shared)

    def start(self, step: Step, when_complete: Callable[[], None]) -> None:
        """Returns when the arrays have been copied. when_complete: called in the background, once all is on disk.

        Raises:
            Exception: orbax's, if it could not begin.
        """
        assert self._thread is None, "the save before this one was not waited for"
        if self._staging is not None:
            step = dataclasses.replace(step, arrays=self._staging.copy(step.arrays))
        self._save = _Save(step, background=self._staging is not None)
        arguments = ocp.args.Composite(
            **{
                ITEMS: save_arguments(nested(step.arrays), lean=self._lean),
                DATA_STATE: ocp.args.JsonSave(step.data_state),
            }
        )
        self._orbax.save(self._checkpoints / str(step.number), args=arguments)
        self._thread = threading.Thread(target=self._finish, args=(self._save, when_complete), name="checkpoint")
        self._thread.start()

    def failed(self) -> MaxliteError | None:
        """Returns why the save in the background failed, if it has; once, so that it is raised once."""
        failure, self._failure = self._failure, None
        return failure

    def wait(self) -> None:
        """Returns when nothing is being saved. Raises what failed() would have returned."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure = self.failed()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Ends orbax's threads; nothing may be saved any more."""
        self._orbax.close()

    def _finish(self, save: _Save, when_complete: Callable[[], None]) -> None:
        """Runs in a thread: waits for orbax's own, so that an error is known when it comes, not at the next save."""
        try:
            with low_writers() if self._staging is not None else contextlib.nullcontext():
                self._orbax.wait_until_finished()
                when_complete()
        except MaxliteError as error:
            self._failure = error
        except Exception as error:
            failure = self._failure = failed_save(self._checkpoints, save.number, error)
            _tell_others(save, failure)

    def _pass_stage(self, *, key: str, timeout_ms: int) -> None:
        """Orbax's barrier between processes."""
        assert self._save is not None
        self._save.pass_stage()

    def _write_record(self) -> None:
        """Runs on process 0 when all is written and the step is not complete yet."""
        assert self._save is not None
        folder = temporary_folder(self._checkpoints, self._save.number)
        write_record(folder, self._save.record(folder, self._atomicity))


def _tell_others(save: _Save, failure: CheckpointError) -> None:
    """Comes to the stage at which the other processes wait, with an error."""
    if num_processes() == 1 or save.stages_passed == len(_STAGES):
        return

    def fail() -> None:
        raise failure

    try:
        together(_STAGES[save.stages_passed], fail)
    except MaxliteError:
        return  # Our own, come back.


def failed_save(checkpoints: Path, step: int, error: Exception) -> CheckpointError:
    """Builds the error of a save that failed: why, what is intact, how to go on."""
    complete = complete_steps(checkpoints)
    intact = f"the newest complete checkpoint is {complete[-1]}" if complete else "no complete checkpoint exists"
    reason = " ".join(str(error).split())[:500] or type(error).__name__
    return CheckpointError(
        f"saving step {step} to {checkpoints} failed: {reason}\n"
        f"{intact}. Make the folder writable or make room on its disk, then run the same command again."
    )


def _orbax_processes() -> orbax_options.MultiprocessingOptions:
    """Several processes named one by one: orbax then waits for them by messages, and not by a program on the devices,
    which would wait for the step in flight."""
    count = num_processes()
    return orbax_options.MultiprocessingOptions(active_processes=set(range(count)) if count > 1 else None)


def _mesh_of(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    shardings = (array.sharding for array in arrays.values())
    return next((dict(one.mesh.shape) for one in shardings if isinstance(one, NamedSharding)), {})
