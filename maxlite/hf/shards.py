"""Where tensors go in safetensors files that do not exist yet, and the headers and index that say so."""

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from maxlite.hf.safetensors import DTYPES, INDEX_FILE, LENGTH_BYTES, SINGLE_FILE

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class NewTensor:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Its size in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a tensor's bytes begin."""

    file: Path
    offset: int


def make_shards(folder: Path, tensors: Iterable[NewTensor], max_shard_bytes: int) -> dict[str, Location]:
    """Makes the files, with headers and index and room for the data, and returns where each tensor's data goes.

    tensors: in order; a file takes as many as `max_shard_bytes` allow, at least one. A single file has no index.
    """
    shards: list[list[NewTensor]] = []
    filled = 0
    for tensor in tensors:
        if not shards or filled + tensor.nbytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    locations: dict[str, Location] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        locations |= make_shard(folder / name, shard)
    if len(shards) > 1:
        _write_index(folder / INDEX_FILE, [tensor for shard in shards for tensor in shard], locations)
    return locations


def make_shard(file: Path, tensors: list[NewTensor]) -> dict[str, Location]:
    """Makes one file, with header and room for the data, and returns where each tensor's data goes."""
    # Wide dtypes first, so that every tensor begins at a multiple of the size of its elements.
    tensors = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    # What transformers looks for before it reads a file.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, end = [], 0
    for tensor in tensors:
        begins.append(end)
        end += tensor.nbytes
        header[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begins[-1], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    start = LENGTH_BYTES + len(text)
    with file.open("xb") as opened:
        opened.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        opened.truncate(start + end)
    return {tensor.name: Location(file, start + begin) for tensor, begin in zip(tensors, begins, strict=True)}


def _write_index(file: Path, tensors: list[NewTensor], locations: dict[str, Location]) -> None:
    metadata = {
        "total_parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "total_size": sum(tensor.nbytes for tensor in tensors),
    }
    index = {"metadata": metadata, "weight_map": {name: where.file.name for name, where in sorted(locations.items())}}
    file.write_text(json.dumps(index, indent=2) + "\n")
