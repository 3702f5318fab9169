"""Saves training state in the background and finds the step to go on from."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from maxlite.checkpoint.arrays import array_handler, save_arguments
from maxlite.checkpoint.quiet import quiet_orbax
from maxlite.checkpoint.restore import restore_step
from maxlite.checkpoint.step_folder import (
    CHECKPOINTS,
    DATA_STATE,
    ITEMS,
    clear_incomplete,
    complete_steps,
    missing_file,
    step_numbers,
    temporary_folders,
    write_files,
)
from maxlite.checkpoint.tree import leaf_paths, nested
from maxlite.config.schema import CheckpointConfig
from maxlite.errors import CheckpointError


class Checkpointer:
    """The checkpoints of one run: `RUN/checkpoints/<n>` holds the state after n steps.

    One process may save to a run directory at a time (RunDirectory.lock). Reading makes no files.
    """

    def __init__(self, run_directory: Path, checkpoint: CheckpointConfig, *, lean: bool = False):
        """Reads nothing yet; the folder need not exist. lean: one array is on its way to disk at a time."""
        quiet_orbax()
        self._folder = Path(run_directory).absolute() / CHECKPOINTS
        self._config = checkpoint
        self._lean = lean
        self._manager: ocp.CheckpointManager | None = None
        self._saving: int | None = None
        self._step: int | None = None

    @property
    def current_step(self) -> int | None:
        """The step that was last saved (perhaps still being written) or restored here: no need to save it again."""
        return self._step

    @property
    def skipped_steps(self) -> list[str]:
        """Saves newer than latest_step() that never ended, each with what it lacks; to be asked before saving."""
        latest = self.latest_step()
        skipped = []
        for step in step_numbers(self._folder):
            missing = missing_file(self._folder / str(step))
            if missing is not None and (latest is None or step > latest):
                skipped.append(f"{step} ({missing} is missing)")
        return skipped + [f"{folder.name} (never finished)" for folder in temporary_folders(self._folder)]

    def latest_step(self) -> int | None:
        """Returns the newest complete step on disk; half-written ones never count."""
        steps = complete_steps(self._folder)
        return steps[-1] if steps else None

    def save(self, step: int, items: Any, data_state: dict[str, Any]) -> None:
        """Saves one step; with async_checkpointing it returns when the arrays have been copied.

        Half-written steps in the folder are cleared away before the first save.

        Args:
            step: number of steps done.
            items: pytree of jax.Array with the top-level names step, params and opt_state.
            data_state: the data position, as JSON would hold it.

        Raises:
            CheckpointError: the step is there already, the disk is full or can't be written, or the background
                save before this one failed.
        """
        assert json.loads(json.dumps(data_state)) == data_state, "the data state must survive JSON"
        self.wait()
        if step in complete_steps(self._folder):
            raise CheckpointError(f"checkpoint {self._folder / str(step)} is there already and is never overwritten")
        self._check_free_space(step, items)
        arrays = nested(leaf_paths(items))
        arguments = ocp.args.Composite(
            **{
                ITEMS: save_arguments(arrays, lean=self._lean),
                DATA_STATE: ocp.args.JsonSave(data_state),
            }
        )
        self._saving = step
        try:
            saved = self._open_manager(items).save(step, args=arguments, force=True)
        except Exception as error:
            raise self._failed_save(error) from error
        assert saved, "orbax declined a forced save"
        self._step = step
        if not self._config.async_checkpointing:
            self.wait()

    def restore(self, step: int, abstract_items: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the items and the data state of one step.

        Args:
            step: a step that is complete on disk.
            abstract_items: pytree of jax.ShapeDtypeStruct with the shardings wanted now; another dtype is a cast.

        Raises:
            CheckpointError: the step is not there, damaged, or has other arrays.
        """
        if step not in step_numbers(self._folder):
            steps = ", ".join(map(str, complete_steps(self._folder))) or "none"
            raise CheckpointError(f"there is no checkpoint {self._folder / str(step)}; complete steps: {steps}")
        items_and_data_state = restore_step(self._folder / str(step), abstract_items)
        self._step = step
        return items_and_data_state

    def wait(self) -> None:
        """Blocks until the save in the background is on disk. Raises CheckpointError if it failed."""
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed_save(error) from error

    def close(self) -> None:
        """Waits as `wait` does, then ends the threads; the last call on this object."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()
                self._manager = None

    def _open_manager(self, items: Any) -> ocp.CheckpointManager:
        # Made at the first save: it counts every step's folder, so the half-written ones have to go before.
        if self._manager is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            clear_incomplete(self._folder)
            self._manager = ocp.CheckpointManager(
                self._folder,
                item_handlers={
                    ITEMS: array_handler(items, lean=self._lean),
                    DATA_STATE: ocp.JsonCheckpointHandler(),
                },
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=self._config.max_num_checkpoints_to_keep,
                    async_options=ocp.AsyncOptions(post_finalization_callback=self._list_files),
                ),
            )
        return self._manager

    def _list_files(self) -> None:
        """Runs in the background when all is written and the folder still has its temporary name."""
        assert self._saving is not None
        (folder,) = temporary_folders(self._folder, self._saving)
        write_files(folder)

    def _check_free_space(self, step: int, items: Any) -> None:
        needed = sum(
            shard.data.nbytes
            for array in jax.tree.leaves(items)
            for shard in array.addressable_shards
            if shard.replica_id == 0
        )
        existing = next(folder for folder in (self._folder, *self._folder.parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise CheckpointError(
                f"no disk space for the checkpoint of step {step}: it needs up to {_size(needed)} and "
                f"{existing} has {_size(free)} free. Make room, or choose another base_output_directory "
                "or a smaller max_num_checkpoints_to_keep; earlier checkpoints are intact."
            )

    def _failed_save(self, error: Exception) -> CheckpointError:
        latest = self.latest_step()
        intact = "no complete checkpoint exists" if latest is None else f"the newest complete checkpoint is {latest}"
        reason = " ".join(str(error).split())[:500] or type(error).__name__
        return CheckpointError(
            f"saving step {self._saving} to {self._folder} failed: {reason}\n"
            f"{intact}. Make the folder writable or make room on its disk, then run the same command again."
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3f} MB"
