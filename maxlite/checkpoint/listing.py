"""What lies in a run's folder of checkpoints, complete or not, with what is known of each."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from maxlite.checkpoint.keep import StepInfo, kept_steps
from maxlite.checkpoint.names import FILES
from maxlite.checkpoint.place import file_sizes
from maxlite.checkpoint.record import StepRecord, read_record
from maxlite.checkpoint.step_folder import missing_file, step_numbers, temporary_folders
from maxlite.config.schema import CheckpointConfig


@dataclasses.dataclass(frozen=True)
class ListedStep:
    """A folder of one save.

    step: None where the save has not ended. problem: None for a step that is complete; else what it lacks.
    num_bytes: on disk. record: what the save wrote of itself; None if that is not there or damaged.
    """

    folder: Path
    step: int | None
    problem: str | None
    num_bytes: int
    record: StepRecord | None


def list_steps(checkpoints: Path) -> list[ListedStep]:
    """Returns the steps in `checkpoints`, ascending, then saves that have not ended."""
    unfinished = temporary_folders(checkpoints)
    folders = {step: checkpoints / str(step) for step in step_numbers(checkpoints)}
    steps = [_listed(folder, step) for step, folder in folders.items() if folder not in unfinished]
    return steps + [ListedStep(folder, None, "not finished", folder_bytes(folder), None) for folder in unfinished]


def why_kept(steps: list[ListedStep], config: CheckpointConfig) -> Mapping[int, str]:
    """Returns step -> why `config` keeps it, of those that are complete; of them, what is not there may be removed."""
    records = {entry.step: entry.record for entry in steps if entry.problem is None and entry.record is not None}
    infos = [StepInfo(step, record.time, record.metrics) for step, record in records.items() if step is not None]
    return kept_steps(infos, config)


def folder_bytes(folder: Path) -> int:
    """Returns the bytes of all files below `folder`."""
    return sum(file_sizes(folder).values())


def _listed(folder: Path, step: int) -> ListedStep:
    missing = missing_file(folder)
    if missing is not None:
        return ListedStep(folder, step, f"{missing} is missing", folder_bytes(folder), None)
    try:
        record = read_record(folder)
    except ValueError as error:
        return ListedStep(folder, step, f"{FILES} is not as it was saved ({error})", folder_bytes(folder), None)
    return ListedStep(folder, step, None, folder_bytes(folder), record)
