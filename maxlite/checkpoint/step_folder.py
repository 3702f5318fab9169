"""What lies in RUN/checkpoints: which steps are complete, and whether a step's bytes are those that were saved.

A step's folder holds `items/` and `iter/`, written by orbax, and `files.json`: the size and CRC-32 of every
file below those two. The folder gets its final name only when all of that is on disk, so a kill leaves either
a whole step or a folder with a temporary name. Checksums are needed because a flipped byte in a weight
decompresses without complaint.
"""

import json
import os
import shutil
import zlib
from pathlib import Path

from maxlite.errors import CheckpointError

CHECKPOINTS = "checkpoints"
ITEMS = "items"
DATA_STATE = "iter"
FILES = "files.json"

_STEP_METADATA = "_CHECKPOINT_METADATA"
_COMMIT_MARK = "commit_success.txt"
_TEMPORARY = ".orbax-checkpoint-tmp"
_INCOMPLETE = ".incomplete"
_BLOCK_BYTES = 1 << 22


def step_numbers(checkpoints: Path) -> list[int]:
    """Returns the numbers of all step folders, complete or not, ascending; none if the folder is not there."""
    if not checkpoints.is_dir():
        return []
    names = (entry.name for entry in checkpoints.iterdir() if entry.is_dir())
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def complete_steps(checkpoints: Path) -> list[int]:
    """Returns the numbers of the steps whose files are all there, ascending."""
    return [step for step in step_numbers(checkpoints) if missing_file(checkpoints / str(step)) is None]


def temporary_folders(checkpoints: Path, step: int | None = None) -> list[Path]:
    """Returns the folders of saves that never ended: of one step, or of all."""
    if not checkpoints.is_dir():
        return []
    return sorted(checkpoints.glob(f"{'*' if step is None else step}{_TEMPORARY}*"))


def missing_file(folder: Path) -> str | None:
    """Returns the first file, relative to a step's folder, that a whole step would have; None if none is missing."""
    if not (folder / FILES).is_file():
        return FILES
    try:
        listed = _read_files(folder)
    except ValueError:
        return None  # Damage and not a save cut short: verify_files reports it, lest the step be passed over.
    required = [_STEP_METADATA]
    # Some versions of orbax mark each commit with a file; those that mark the parts also mark the whole.
    if f"{DATA_STATE}/{_COMMIT_MARK}" in listed:
        required.append(_COMMIT_MARK)
    return next((name for name in [*required, *listed] if not (folder / name).is_file()), None)


def write_files(folder: Path) -> None:
    """Writes the size and checksum of every file of a step that is about to get its final name."""
    paths = sorted(p for part in (ITEMS, DATA_STATE) for p in (folder / part).rglob("*") if p.is_file())
    listed = {p.relative_to(folder).as_posix(): [p.stat().st_size, _checksum(p)] for p in paths}
    with open(folder / FILES, "w", encoding="utf-8") as file:
        json.dump({"checksum": _list_checksum(listed), "files": listed}, file, indent=0)
        file.flush()
        os.fsync(file.fileno())


def verify_files(folder: Path) -> None:
    """Reads every byte of a step. Raises CheckpointError at the first file that is not as it was saved."""
    missing = missing_file(folder)
    if missing is not None:
        raise damaged(folder, f"{missing} is missing")
    try:
        listed = _read_files(folder)
    except ValueError as error:
        raise damaged(folder, f"{FILES} is not as it was saved ({error})") from error
    for name, (num_bytes, checksum) in listed.items():
        try:
            found_bytes, found_checksum = (folder / name).stat().st_size, _checksum(folder / name)
        except OSError as error:
            raise damaged(folder, f"{name}: {error.strerror}") from error
        if found_bytes != num_bytes:
            raise damaged(folder, f"{name} has {found_bytes} bytes where {num_bytes} were saved")
        if found_checksum != checksum:
            raise damaged(folder, f"the bytes of {name} are not those that were saved (checksums differ)")


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
    `<n>.incomplete`, for its owner to look at.
    """
    for folder in temporary_folders(checkpoints):
        shutil.rmtree(folder)
    for step in step_numbers(checkpoints):
        folder = checkpoints / str(step)
        if missing_file(folder) is not None:
            aside = folder.with_name(folder.name + _INCOMPLETE)
            if aside.exists():
                shutil.rmtree(aside)
            folder.rename(aside)


def _read_files(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns name -> (size in bytes, CRC-32). Raises ValueError if the list itself was damaged."""
    content = json.loads((folder / FILES).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("checksum") != _list_checksum(content.get("files")):
        raise ValueError("checksums differ")
    return {name: (num_bytes, checksum) for name, (num_bytes, checksum) in content["files"].items()}


def _list_checksum(listed: object) -> int:
    return zlib.crc32(json.dumps(listed, sort_keys=True).encode())


def _checksum(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum
