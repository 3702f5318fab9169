"""What lies in RUN/checkpoints: which steps are complete, and whether a step's files are those that were saved.

A step's folder holds `items/` and `iter/`, written by orbax, and `files.json`: what each file and each array must
be. How the folder becomes complete is checkpoint_atomicity's: by `rename`, it gets its final name when all of it is
on disk; by `commit_file`, it has that name from the start, and a mark is written last. A kill leaves either a whole
step, or a folder with a temporary name or without the mark.
"""

import json
import zlib
from pathlib import Path

from maxlite.checkpoint.atomicity import COMMIT_FILE
from maxlite.checkpoint.names import CHECKPOINTS, DATA_STATE, ELSEWHERE, FILES, ITEMS
from maxlite.checkpoint.place import file_sizes, is_bucket, place_of, remove_folder
from maxlite.checkpoint.record import StepRecord, read_record
from maxlite.errors import CheckpointError

_STEP_METADATA = "_CHECKPOINT_METADATA"
_COMMIT_MARK = "commit_success.txt"
_DATA_STATE_FILE = f"{DATA_STATE}/metadata"
_TEMPORARY = ".orbax-checkpoint-tmp"
_INCOMPLETE = ".incomplete"
_BLOCK_BYTES = 1 << 22


def find_checkpoints(run: str | Path) -> Path:
    """Returns where the checkpoints of a run lie, which need not exist: in its folder, or where that says.

    Raises:
        CheckpointError: it is a place that can't be reached.
    """
    folder = place_of(run)
    note = folder / ELSEWHERE
    return place_of(note.read_text().strip()) if note.is_file() else folder / CHECKPOINTS


def step_numbers(checkpoints: Path) -> list[int]:
    """Returns the numbers of all step folders, complete or not, ascending; none if the folder is not there."""
    if not checkpoints.is_dir():
        return []
    names = (entry.name for entry in checkpoints.iterdir() if entry.is_dir())
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def complete_steps(checkpoints: Path) -> list[int]:
    """Returns the numbers of the steps whose files are all there, ascending."""
    return [step for step in step_numbers(checkpoints) if missing_file(checkpoints / str(step)) is None]


def temporary_folders(checkpoints: Path) -> list[Path]:
    """Returns the folders of saves that never ended."""
    if not checkpoints.is_dir():
        return []
    uncommitted = [checkpoints / str(step) for step in step_numbers(checkpoints)]
    return sorted(checkpoints.glob(f"*{_TEMPORARY}*")) + [folder for folder in uncommitted if _is_uncommitted(folder)]


def temporary_folder(checkpoints: Path, step: int) -> Path:
    """Returns the folder of a step that is being saved, whichever name it has until it is complete."""
    for name in (f"{step}{_TEMPORARY}", str(step)):
        if (checkpoints / name).is_dir():
            return checkpoints / name
    raise AssertionError(f"no folder of step {step} in {checkpoints}")


def missing_file(folder: Path) -> str | None:
    """Returns the first file, relative to a step's folder, that a whole step would have; None if none is missing."""
    found = file_sizes(folder)
    for name in (FILES, _COMMIT_MARK, _STEP_METADATA):
        if name not in found:
            return name
    try:
        listed = read_record(folder).files
    except ValueError:
        return None  # Damage and not a save cut short: verify_files reports it, lest the step be passed over.
    return next((name for name in listed if name not in found), None)


def list_files(folder: Path) -> dict[str, tuple[int, int | None]]:
    """Returns size and CRC-32 of every file of a step that is about to become complete, as its record has them."""
    return {
        name: (num_bytes, None if _holds_chunks(folder / name) else _checksum(folder / name))
        for name, num_bytes in sorted(file_sizes(folder).items())
        if name.startswith((f"{ITEMS}/", f"{DATA_STATE}/"))
    }


def verify_files(folder: Path) -> StepRecord:
    """Returns the record of a step whose files are those that were saved.

    Sizes of all, and the bytes of those without array chunks; what those hold is checked when arrays are read.

    Raises:
        CheckpointError: at the first file that is not as it was.
    """
    missing = missing_file(folder)
    if missing is not None:
        raise damaged(folder, f"{missing} is missing")
    try:
        record = read_record(folder)
    except ValueError as error:
        raise damaged(folder, f"{FILES} is not as it was saved ({error})") from error
    found = file_sizes(folder)
    for name, (num_bytes, checksum) in record.files.items():
        found_bytes = found.get(name, 0)
        if found_bytes != num_bytes:
            raise damaged(folder, f"{name} has {found_bytes} bytes where {num_bytes} were saved")
        try:
            if checksum is not None and _checksum(folder / name) != checksum:
                raise damaged(folder, f"the bytes of {name} are not those that were saved (checksums differ)")
        except OSError as error:
            raise damaged(folder, f"{name}: {error.strerror}") from error
    return record


def read_data_state(folder: Path) -> dict:
    """Returns the data position of a step. Raises CheckpointError if it is unreadable."""
    try:
        return json.loads((folder / _DATA_STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(folder, f"the data position is unreadable ({error})") from error


def damaged(folder: Path, cause: str) -> CheckpointError:
    """Builds the error for a step that can't be read: what is wrong, what else there is, how to go on."""
    others = [step for step in complete_steps(folder.parent) if step != int(folder.name)]
    earlier = [step for step in others if step < int(folder.name)]
    if earlier:
        way_on = f"Remove that folder to go on from step {earlier[-1]}"
    else:
        way_on = "Remove that folder to begin anew (there is no earlier step)"
    listed = ", ".join(map(str, others)) or "none"
    return CheckpointError(
        f"checkpoint of step {folder.name} can't be read: {cause}.\n"
        f"  folder: {folder}\n  other complete steps: {listed}\n{way_on}, or put back the file from a copy."
    )


def clear_incomplete(checkpoints: Path) -> None:
    """Makes way for steps that were not saved whole.

    What a killed save left is removed. A step's folder that lacks a file lost it later: it is kept as
    `<n>.incomplete`, for its owner to look at. In a bucket, where nothing is renamed, it stays until saved again.
    """
    for folder in temporary_folders(checkpoints):
        remove_folder(folder)
    for step in step_numbers(checkpoints):
        folder = checkpoints / str(step)
        if missing_file(folder) is not None and not is_bucket(folder):
            aside = folder.with_name(folder.name + _INCOMPLETE)
            if aside.exists():
                remove_folder(aside)
            folder.rename(aside)


def remove_step(folder: Path) -> None:
    """Removes a step; if it is killed meanwhile, what is left is a save that never ended, and cleared as such."""
    for name in (_COMMIT_MARK, FILES):
        (folder / name).unlink(missing_ok=True)
    remove_folder(folder)


def _is_uncommitted(folder: Path) -> bool:
    """Says whether a step's folder was never complete, rather than losing a file later."""
    if (folder / _COMMIT_MARK).is_file():
        return False
    if not (folder / FILES).is_file():
        return True
    try:
        return read_record(folder).atomicity == COMMIT_FILE
    except ValueError:
        return False


def _holds_chunks(path: Path) -> bool:
    """Says whether a file is one of OCDBT's data files: `d/` of the merged folder and of each process's."""
    return path.parent.name == "d"


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum
