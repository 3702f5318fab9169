"""Documents cut into windows, by their lengths alone.

A pair is a token and the one after it in the same document: what a model reads, and its target. A window is a run of
pairs of one document, at most T of them, so each token but a document's first is a target in exactly one window.
"""

import sys
from typing import NamedTuple, Protocol

import numpy as np


class Pieces(NamedTuple):
    """Tokens start..stop of documents, each int64 [N]; most pieces are whole documents."""

    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray


class Segments(NamedTuple):
    """Runs of `length` pairs from token `start` of a document on, each int64 [N]."""

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray

    def take(self, places: np.ndarray | slice) -> "Segments":
        """Returns those at `places`."""
        return Segments(self.document[places], self.start[places], self.length[places])


class WindowSource(Protocol):
    """Random access to windows."""

    def __len__(self) -> int:
        """Returns the number of windows."""
        ...

    def locate(self, windows: np.ndarray) -> Segments:
        """Returns where windows, int64 [N], lie."""
        ...


class Windows:
    """Windows over pieces of documents; its index is one number a piece."""

    def __init__(self, pieces: Pieces, row_length: int, *, truncate: bool, whole: bool = False) -> None:
        """Counts the windows.

        truncate: a piece gives its first window alone. whole: a piece is one window, however long it is.
        """
        self._pieces = pieces
        all_pairs = np.maximum(pieces.stop - pieces.start - 1, 0)
        self._num_pairs = np.minimum(all_pairs, row_length) if truncate else all_pairs
        self._size = max(int(self._num_pairs.max(initial=1)), 1) if whole else row_length
        self._ends = np.cumsum(-(-self._num_pairs // self._size))
        self.num_targets = int(self._num_pairs.sum())
        self.num_cut = int(all_pairs.sum()) - self.num_targets
        self.num_without_targets = int((all_pairs == 0).sum())

    def __len__(self) -> int:
        """Returns the number of windows."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def locate(self, windows: np.ndarray) -> Segments:
        """Returns where windows, int64 [N], lie."""
        piece = np.searchsorted(self._ends, windows, side="right")
        before = np.where(piece > 0, self._ends[piece - 1], 0)
        first = (windows - before) * self._size
        length = np.minimum(self._num_pairs[piece] - first, self._size)
        return Segments(self._pieces.document[piece], self._pieces.start[piece] + first, length)


class EndlessWindows:
    """Window k is all of document k."""

    def __init__(self, row_length: int) -> None:
        """Each has `row_length` pairs."""
        self._row_length = row_length

    def __len__(self) -> int:
        """Returns a number that no run reaches."""
        return sys.maxsize

    def locate(self, windows: np.ndarray) -> Segments:
        """Returns where windows, int64 [N], lie."""
        return Segments(windows, np.zeros_like(windows), np.full_like(windows, self._row_length))
