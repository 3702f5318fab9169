"""The header of a GGUF file, in which llama.cpp keeps a model: its metadata, and where its tensors lie."""

import dataclasses
import functools
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from maxlite.errors import ConversionError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_MOST_DIMENSIONS = 4
# The format's numbers for types of values. Strings and arrays are more than one number.
_NUMBERS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies.

    shape: rows first, as numpy has it. kind: the format's number for how the values are stored. offset: in the file.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says before its tensors. size: of the file, in bytes."""

    path: Path
    size: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def is_gguf(path: str | Path) -> bool:
    """Says whether `path` names a GGUF file, be it there or not."""
    return Path(path).suffix == ".gguf" and not Path(path).expanduser().is_dir()


def read_header(path: str | Path) -> GgufHeader:
    """Returns the header of a file; that of the last one is remembered, since a command asks for it several times.

    Raises:
        ConversionError: it is not there, cut short, garbled, or of a version that is not known.
    """
    file = Path(path).expanduser()
    try:
        status = file.stat()
        return _read_header(file, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise ConversionError(f"{file} cannot be read: {error.strerror}.") from error


@functools.lru_cache(maxsize=1)
def _read_header(file: Path, size: int, changed: int) -> GgufHeader:
    del changed
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise ConversionError(f"{file} is not a GGUF file: it does not begin with the word GGUF.")
        reader = _Reader(opened, size)
        try:
            metadata, tensors = _read_tables(reader, file)
        except EOFError as error:
            raise ConversionError(f"{file} is truncated: its header does not end. Fetch it again.") from error
        except ValueError as error:
            raise ConversionError(f"{file} is not a GGUF file: its header is garbled ({error}).") from error
    return GgufHeader(file, size, metadata, tensors)


def _read_tables(reader: "_Reader", file: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    version, num_tensors, num_values = reader.unpack("<IQQ")
    if version not in _VERSIONS:
        raise ConversionError(
            f"{file} is of GGUF version {version}; known are {_VERSIONS[0]} and {_VERSIONS[1]}, little-endian. Convert "
            "it anew with llama.cpp."
        )
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = reader.string()
        if key in metadata:
            raise ValueError(f"{key} twice")
        metadata[key] = reader.value()
    tensors: dict[str, GgufTensor] = {}
    for _ in range(num_tensors):
        name, tensor = reader.string(), reader.tensor()
        if name in tensors:
            raise ValueError(f"{name} twice")
        tensors[name] = tensor
    # What follows is the tensors, which count from here.
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment={alignment!r}")
    start = -(-reader.position // alignment) * alignment
    return metadata, {name: dataclasses.replace(one, offset=start + one.offset) for name, one in tensors.items()}


class _Reader:
    """Reads what a header is made of, one after another."""

    def __init__(self, opened: BinaryIO, size: int):
        self._opened, self._left = opened, size - opened.tell()
        self._size = size

    @property
    def position(self) -> int:
        return self._size - self._left

    def unpack(self, pattern: str) -> tuple[Any, ...]:
        return struct.unpack(pattern, self._take(struct.calcsize(pattern)))

    def string(self) -> str:
        (length,) = self.unpack("<Q")
        return self._take(length).decode("utf-8")

    def value(self) -> Any:
        (kind,) = self.unpack("<I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.unpack("<IQ")
            return [self.string() for _ in range(count)] if inner == _STRING else self._numbers(inner, count)
        (number,) = self._numbers(kind, 1)
        # 1e-5 is written in 32 bits; as 9.99999974e-06 it would be another number than in config.json.
        return float(str(np.float32(number))) if kind == _FLOAT32 else number

    def tensor(self) -> GgufTensor:
        (dimensions,) = self.unpack("<I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        shape = self.unpack(f"<{dimensions}Q")
        kind, offset = self.unpack("<IQ")
        return GgufTensor(tuple(reversed(shape)), kind, offset)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in _NUMBERS:
            raise ValueError(f"a value of type {kind}")
        dtype = np.dtype(_NUMBERS[kind]).newbyteorder("<")
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()

    def _take(self, count: int) -> bytes:
        if count > self._left:
            raise EOFError
        self._left -= count
        return self._opened.read(count)
