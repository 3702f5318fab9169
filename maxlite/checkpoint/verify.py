"""Reads a step whole and says which of its files and arrays are not as they were saved."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from maxlite.checkpoint.leaves import open_leaves
from maxlite.checkpoint.record import Leaf, read_record
from maxlite.checkpoint.step_folder import verify_files
from maxlite.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Verified:
    """What was found in a step. problems: one line for each thing that is wrong, which it names; none if it is sound.

    num_arrays, num_bytes: what was saved, in memory; 0 where the record of that is damaged.
    """

    folder: Path
    problems: tuple[str, ...]
    num_arrays: int
    num_bytes: int
    seconds: float


def verify_step(folder: Path) -> Verified:
    """Compares a step with its own record: sizes and bytes of its files, and the values of every array.

    One array is in memory at a time. Of files without arrays the first that is not as it was is named; of arrays, all.
    """
    began = time.perf_counter()
    leaves: Mapping[str, Leaf] = {}
    problems: list[str] = []
    try:
        verify_files(folder)
    except CheckpointError as error:
        problems.append(str(error).splitlines()[0])
    try:
        leaves = read_record(folder).leaves
    except (OSError, ValueError):
        # Without a record there is nothing to compare arrays with.
        assert problems, "a record that can't be read is a file's problem"
    problems += _leaf_problems(folder, leaves)
    num_bytes = sum(leaf.num_bytes() for leaf in leaves.values())
    return Verified(folder, tuple(problems), len(leaves), num_bytes, time.perf_counter() - began)


def _leaf_problems(folder: Path, leaves: Mapping[str, Leaf]) -> Iterator[str]:
    with open_leaves(folder, leaves) as reader:
        for path in leaves:
            try:
                reader.read(path)
            except CheckpointError as error:
                yield str(error)
