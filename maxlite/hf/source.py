"""What tensors are read from: names, shapes and rows, whatever the files behind them are."""

import abc
import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from maxlite.errors import ConversionError
from maxlite.hf.boxes import Box, index_of, num_elements, whole

_MOST_NAMED = 5
# Elements of whole rows that are held at once to take a part of each.
_MOST_ELEMENTS = 1 << 20


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a source.

    dtype: of what `rows` returns.
    nbytes: what reading all of it reads from files.
    file: where it lies, for messages.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    nbytes: int
    file: Path


class Source(Protocol):
    """Named tensors, read a few rows, or a part of each of them, at a time."""

    @property
    def place(self) -> Path:
        """The folder or file, for messages."""
        ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Name -> what is known without reading it."""
        ...

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns entries start to stop of the tensor's first dimension, in any memory order; all of a scalar."""
        ...

    def part(self, name: str, box: Box) -> np.ndarray:
        """Returns a box of the tensor, in any memory order."""
        ...


class WholeRows(abc.ABC):
    """A source whose tensors cannot be read but in whole rows: `part` reads those and drops what is not asked for."""

    tensors: dict[str, StoredTensor]

    @abc.abstractmethod
    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns entries start to stop of the tensor's first dimension, in any memory order; all of a scalar."""

    def part(self, name: str, box: Box) -> np.ndarray:
        """Returns a box of the tensor, in any memory order."""
        tensor = self.tensors[name]
        row = whole(tensor.shape[1:])
        (first, last), *others = box or ((0, 1),)
        if tuple(others) == row:
            return self.rows(name, first, last)
        values = np.empty(tuple(stop - start for start, stop in box), tensor.dtype)
        for start, stop in row_ranges((last - first, num_elements(row)), _MOST_ELEMENTS):
            rows = self.rows(name, first + start, first + stop)
            values[start:stop] = rows[(slice(None), *index_of(tuple(others), row))]
        return values


class Respelled:
    """A source whose tensors have other names."""

    def __init__(self, source: Source, spellings: tuple[tuple[str, str], ...]):
        """Applies (regular expression, replacement) pairs, in turn, to every name.

        Raises:
            ConversionError: two tensors get one name.
        """
        self.place = source.place
        self.tensors: dict[str, StoredTensor] = {}
        self._source = source
        self._old: dict[str, str] = {}
        for old, tensor in source.tensors.items():
            new = old
            for pattern, replacement in spellings:
                new = re.sub(pattern, replacement, new)
            if new in self._old:
                raise ConversionError(f"{source.place}: {old} and {self._old[new]} are two names of one tensor, {new}")
            self._old[new] = old
            self.tensors[new] = tensor

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Returns entries start to stop of the tensor's first dimension."""
        return self._source.rows(self._old[name], start, stop)

    def part(self, name: str, box: Box) -> np.ndarray:
        """Returns a box of the tensor."""
        return self._source.part(self._old[name], box)


def row_ranges(shape: tuple[int, ...], elements: int) -> list[tuple[int, int]]:
    """Cuts a tensor into runs of rows of about so many elements each; a row longer than that stands alone."""
    if not shape:
        return [(0, 1)]
    rows = max(1, elements // max(1, math.prod(shape[1:])))
    return [(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows)]


def listing(problems: list[str]) -> str:
    """Returns the first few problems, one a line, and how many there are beyond them."""
    more = len(problems) - _MOST_NAMED
    return "\n  ".join(problems[:_MOST_NAMED] + ([f"and {more} more"] if more > 0 else []))
