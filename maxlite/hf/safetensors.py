"""The safetensors format: headers, folders of shards, and reading of rows by position."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from maxlite.errors import ConversionError
from maxlite.hf.boxes import Box, whole
from maxlite.hf.source import StoredTensor, listing

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000
_SHARD_NAME = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


class SafetensorsSource:
    """The tensors of one safetensors file, or of a folder of them; only headers are kept in memory."""

    def __init__(self, place: Path):
        """Reads the headers of all files.

        Raises:
            ConversionError: a file is missing, truncated or garbled, or the index and the files disagree.
        """
        self.place = place
        self.tensors: dict[str, StoredTensor] = {}
        self._offsets: dict[str, int] = {}
        files, index = _files_of(place)
        for file in files:
            for name, (tensor, offset) in read_header(file).items():
                if name in self.tensors:
                    raise ConversionError(f"{place}: {name} is both in {self.tensors[name].file.name} and {file.name}")
                self.tensors[name], self._offsets[name] = tensor, offset
        if index is not None:
            _check_index(place, index, self.tensors)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns entries start to stop of the tensor's first dimension, read from the file; all of a scalar.

        Raises:
            ConversionError: the file has become shorter.
        """
        shape = self.tensors[name].shape
        return self.part(name, ((start, stop), *whole(shape[1:])) if shape else ())

    def part(self, name: str, box: Box) -> np.ndarray:
        """Returns a box of the tensor; of the file only this is read.

        Raises:
            ConversionError: the file has become shorter.
        """
        tensor = self.tensors[name]
        values = np.empty(tuple(stop - start for start, stop in box), tensor.dtype)
        offsets = [self._offsets[name] + first * tensor.dtype.itemsize for first in _run_starts(tensor.shape, box)]
        _read_runs(tensor.file, offsets, values)
        return values


def read_header(file: Path) -> dict[str, tuple[StoredTensor, int]]:
    """Returns the tensors of one file and the position in it at which each begins.

    Raises:
        ConversionError: it is missing, truncated or not a safetensors file.
    """
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > _MOST_HEADER_BYTES:
                raise ConversionError(f"{file} is not a safetensors file: it does not begin with a header")
            if size < LENGTH_BYTES + length:
                raise ConversionError(f"{file} is truncated: its header has {length} bytes, the file {size} in all")
            header = json.loads(opened.read(length))
        tensors = _tensors_of(header, file, LENGTH_BYTES + length)
    except OSError as error:
        raise ConversionError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConversionError(f"{file} is not a safetensors file: its header is garbled ({error!r})") from error
    _check_extent(file, tensors, LENGTH_BYTES + length, size)
    return tensors


def _tensors_of(header: Any, file: Path, data: int) -> dict[str, tuple[StoredTensor, int]]:
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ConversionError(
                f"{name} in {file} has the dtype {entry['dtype']!r}; known are {', '.join(DTYPES)}. Convert it first."
            )
        shape, dtype = tuple(int(size) for size in entry["shape"]), DTYPES[entry["dtype"]]
        begin, end = (int(offset) for offset in entry["data_offsets"])
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} is {list(shape)} of {entry['dtype']} in {end - begin} bytes")
        tensors[name] = (StoredTensor(shape, dtype, end - begin, file), data + begin)
    return tensors


def _check_extent(file: Path, tensors: dict[str, tuple[StoredTensor, int]], data: int, size: int) -> None:
    """Raises ConversionError unless the tensors follow one another from the header to the file's end."""
    end = data
    for tensor, offset in sorted(tensors.values(), key=lambda entry: (entry[1], entry[0].nbytes)):
        if offset != end:
            raise ConversionError(f"{file} is not a safetensors file: its tensors overlap or leave gaps")
        end = offset + tensor.nbytes
    if end > size:
        raise ConversionError(
            f"{file} is truncated: its tensors end at byte {end}, the file at {size}. Fetch it again."
        )
    if end < size:
        raise ConversionError(f"{file} is not a safetensors file: {size - end} bytes follow its last tensor")


def _files_of(place: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Returns the files to read, and the index's tensor -> file if there is one."""
    if not place.is_dir():
        return [place], None
    if (place / SINGLE_FILE).is_file():
        return [place / SINGLE_FILE], None
    if (place / INDEX_FILE).is_file():
        index = _read_index(place / INDEX_FILE)
        names = sorted(set(index.values()))
        missing = [name for name in names if not (place / name).is_file()]
    else:
        index, names = None, sorted(file.name for file in place.glob("*.safetensors"))
        missing = _missing_shards(names)
    if missing:
        raise ConversionError(f"{place} lacks these files of weights:\n  {listing(missing)}\nFetch them.")
    if not names:
        others = sorted(file.name for pattern in ("*.bin", "*.pth", "*.pt") for file in place.glob(pattern))
        found = f"; {others[0]} would have to be saved as safetensors first" if others else ""
        raise ConversionError(f"{place} has no weights: no *.safetensors{found}")
    return [place / name for name in names], index


def _read_index(file: Path) -> dict[str, str]:
    try:
        index = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        return {str(tensor): str(name) for tensor, name in index.items()}
    except OSError as error:
        raise ConversionError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConversionError(f"{file} is garbled: it needs a weight_map of tensor names to files") from error


def _missing_shards(names: list[str]) -> list[str]:
    """Returns the files that, by the numbers in the names of the others, there should be."""
    wanted = set()
    for name in names:
        if match := _SHARD_NAME.fullmatch(name):
            stem, number, count = match.groups()
            wanted |= {f"{stem}-{n:0{len(number)}}-of-{count}.safetensors" for n in range(1, int(count) + 1)}
    return sorted(wanted - set(names))


def _check_index(place: Path, index: dict[str, str], tensors: dict[str, StoredTensor]) -> None:
    held = {name: tensor.file.name for name, tensor in tensors.items()}
    problems = [f"{name} should be in {file}" for name, file in index.items() if held.get(name) != file]
    problems += [f"{name} is in {file}, unlisted" for name, file in held.items() if name not in index]
    if problems:
        raise ConversionError(
            f"{place / INDEX_FILE} and the files disagree:\n  {listing(problems)}\nFetch the folder again."
        )


def _run_starts(shape: tuple[int, ...], box: Box) -> list[int]:
    """Returns where in a tensor, counted in elements, each of the runs begins that together are a box, all as long."""
    partial = [dimension for dimension, bounds in enumerate(box) if bounds != (0, shape[dimension])]
    inner = partial[-1] if partial else 0
    starts = [0]
    for dimension, (first, last) in enumerate(box[: inner + 1]):
        stride = math.prod(shape[dimension + 1 :])
        entries = range(first, last) if dimension < inner else (first,)
        starts = [start + entry * stride for start in starts for entry in entries]
    return starts


def _read_runs(file: Path, offsets: list[int], array: np.ndarray) -> None:
    """Fills a C-contiguous array with the bytes of the file from each offset, equally many from each."""
    buffer = array.reshape(-1).view(np.uint8).data
    length = len(buffer) // max(1, len(offsets))
    # Runs may be short, and a million: what is done for each counts.
    read, position = os.preadv, 0
    try:
        with file.open("rb", buffering=0) as opened:
            descriptor = opened.fileno()
            for offset in offsets:
                run = buffer[position : position + length]
                position += length
                # One call reads at most 2 GiB.
                while (count := read(descriptor, (run,), offset)) < len(run):
                    if not count:
                        raise ConversionError(f"{file} has become shorter while it was read")
                    run, offset = run[count:], offset + count
    except OSError as error:
        raise ConversionError(f"{file} cannot be read: {error.strerror}") from error
