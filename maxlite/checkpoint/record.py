"""files.json: what a step's folder says of itself, written last and whole."""

import dataclasses
import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from maxlite.checkpoint.names import FILES
from maxlite.checkpoint.place import is_bucket
from maxlite.checkpoint.tree import ArrayShape

_FORMAT = 2


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a step. checksum: as checkpoint/checksums.py has it."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int

    def num_bytes(self) -> int:
        """Returns the bytes of the whole array in memory."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """All that can be known of a step without reading an array.

    time: when the state was taken, in seconds since 1970.
    metrics: tag -> value of that step.
    atomicity: how the step was made complete, `rename` or `commit_file`.
    mesh: axis -> size of the mesh that saved it; empty where arrays had none.
    versions: library -> version that saved it.
    files: path below the step's folder -> (size in bytes, CRC-32). A file of array chunks has no CRC-32: the sums of
        the leaves answer for what they hold, and nobody has to read all bytes once more to save.
    leaves: slash-joined path -> what was saved.
    """

    time: float
    metrics: Mapping[str, float]
    atomicity: str
    num_processes: int
    mesh: Mapping[str, int]
    versions: Mapping[str, str]
    files: Mapping[str, tuple[int, int | None]]
    leaves: Mapping[str, Leaf]

    def shapes(self) -> dict[str, ArrayShape]:
        """Returns path -> (shape, dtype) of all arrays."""
        return {path: (leaf.shape, leaf.dtype) for path, leaf in self.leaves.items()}

    def as_json(self) -> dict[str, Any]:
        """Returns dicts, lists, strings and numbers."""
        return dataclasses.asdict(self)


def record_from_json(content: Mapping[str, Any]) -> StepRecord:
    """Returns what StepRecord.as_json wrote, also after a way through JSON."""
    files = {name: (num_bytes, checksum) for name, (num_bytes, checksum) in content["files"].items()}
    leaves = {path: Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for path, leaf in content["leaves"].items()}
    return StepRecord(**{**content, "files": files, "leaves": leaves})


def write_record(folder: Path, record: StepRecord) -> None:
    """Writes files.json into a step's folder, whole or not at all."""
    content = record.as_json()
    text = json.dumps({"format": _FORMAT, "checksum": _checksum(content), "step": content}, indent=0)
    if is_bucket(folder):
        # An object is there whole or not at all.
        (folder / FILES).write_text(text)
        return
    unfinished = folder / f".{FILES}"
    with open(unfinished, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, folder / FILES)


def read_record(folder: Path) -> StepRecord:
    """Returns the record of a step's folder.

    Raises:
        OSError: it can't be read.
        ValueError: it is not as it was saved.
    """
    content = json.loads((folder / FILES).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("checksum") != _checksum(content.get("step")):
        raise ValueError("checksums differ")
    if content.get("format") != _FORMAT:
        raise ValueError(f"format {content.get('format')} where this maxlite reads {_FORMAT}")
    return record_from_json(content["step"])


def _checksum(content: object) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
