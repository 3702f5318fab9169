"""Which segments share a row, planned by their lengths alone: no token is read for it.

A plan is the same wherever it is made, so every process makes the whole of it and reads only the rows that it needs.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxlite.data.windows import Segments

# More open rows fill better and cost more time for each window.
NUM_OPEN_ROWS = 64


class Rows(NamedTuple):
    """Segments in the order of rows; row r has those from firsts[r] to firsts[r + 1], firsts: int64 [R + 1]."""

    segments: Segments
    firsts: np.ndarray

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.firsts) - 1

    def row(self, number: int) -> Segments:
        """Returns the segments of a row."""
        return self.segments.take(slice(self.firsts[number], self.firsts[number + 1]))


@dataclasses.dataclass(frozen=True)
class Packing:
    """How rows are made of windows.

    kind: first_fit, best_fit, concat_then_split, or none: each window is a row of its own.
    row_length: T. max_segments: of a row; None = no limit.
    in_order: one row is open at a time, so that windows stay in order.
    buckets: lengths of batches; rows of one bucket are put together, `group_size` of them.
    """

    kind: str
    row_length: int
    max_segments: int | None
    in_order: bool
    buckets: tuple[int, ...]
    group_size: int

    def pack(self, windows: Segments) -> Rows:
        """Packs windows, in this order, into rows, which come out in the order in which they were begun."""
        if self.kind == "concat_then_split":
            return _cut_rows(windows, self.row_length, self.max_segments)
        if self.kind == "none":
            return Rows(windows, np.arange(len(windows.length) + 1))
        open_rows = 1 if self.in_order else NUM_OPEN_ROWS
        row_of = _fit(windows.length.tolist(), self.row_length, open_rows, self.max_segments, self.kind == "best_fit")
        order = np.argsort(row_of, kind="stable")
        return Rows(windows.take(order), _firsts(row_of[order]))

    def shuffle(self, rows: Rows, generator: np.random.Generator) -> Rows:
        """Brings rows into a random order; with buckets, `group_size` of one bucket stay together."""
        if not self.buckets:
            return reorder(rows, generator.permutation(len(rows)))
        return reorder(rows, self._grouped(rows, generator))

    def _grouped(self, rows: Rows, generator: np.random.Generator) -> np.ndarray:
        bucket = np.searchsorted(self.buckets, rows.segments.length)
        groups: list[np.ndarray] = []
        rest: list[np.ndarray] = []
        for number in range(len(self.buckets)):
            members = generator.permutation(np.flatnonzero(bucket == number))
            whole = len(members) // self.group_size * self.group_size
            groups.extend(members[:whole].reshape(-1, self.group_size))
            rest.append(members[whole:])
        order = [groups[place] for place in generator.permutation(len(groups))]
        # The last of each bucket share batches, which are as long as the longest of them.
        return np.concatenate([*order, *rest])


def reorder(rows: Rows, order: np.ndarray) -> Rows:
    """Returns the rows in `order`, int64 [R]."""
    lengths = np.diff(rows.firsts)[order]
    firsts = np.concatenate(([0], np.cumsum(lengths)))
    places = np.repeat(rows.firsts[:-1][order] - firsts[:-1], lengths) + np.arange(firsts[-1])
    return Rows(rows.segments.take(places), firsts)


def _fit(
    lengths: Sequence[int], row_length: int, num_open: int, max_segments: int | None, tightest: bool
) -> np.ndarray:
    """Returns the row of each window: the first open one with room for it, or the one where least room is left.

    Where it fits nowhere, a row is begun; the fullest of too many open ones is closed.
    """
    limit = max_segments or row_length
    row_of = np.empty(len(lengths), np.int64)
    free: list[int] = []
    counts: list[int] = []
    numbers: list[int] = []
    num_rows = 0
    for window, length in enumerate(lengths):
        if length == row_length and num_open > 1:
            # Most windows of long documents are full: nothing else is open to them, and they close nothing.
            row_of[window] = num_rows
            num_rows += 1
            continue
        if tightest:
            fitting = [(room, place) for place, room in enumerate(free) if room >= length]
            place = min(fitting)[1] if fitting else -1
        else:
            place = next((place for place, room in enumerate(free) if room >= length), -1)
        if place < 0:
            if len(free) == num_open:
                closed = free.index(min(free))
                del free[closed], counts[closed], numbers[closed]
            place = len(free)
            free.append(row_length)
            counts.append(0)
            numbers.append(num_rows)
            num_rows += 1
        row_of[window] = numbers[place]
        free[place] -= length
        counts[place] += 1
        if free[place] == 0 or counts[place] == limit:
            del free[place], counts[place], numbers[place]
    return row_of


def _cut_rows(windows: Segments, row_length: int, max_segments: int | None) -> Rows:
    """Cuts the pairs of all windows, one after the other, every `row_length`; a cut window goes on in the next row."""
    assert max_segments is None, "rows without padding take what comes"
    ends = np.cumsum(windows.length)
    total = int(ends[-1]) if len(ends) else 0
    begins = np.unique(np.concatenate((ends - windows.length, np.arange(0, total, row_length))))
    window = np.searchsorted(ends, begins, side="right")
    start = windows.start[window] + begins - (ends - windows.length)[window]
    length = np.diff(np.append(begins, total))
    return Rows(Segments(windows.document[window], start, length), _firsts(begins // row_length))


def _firsts(row_of: np.ndarray) -> np.ndarray:
    """Of rising row numbers, one for each segment, without gaps: where each row begins, and the end."""
    return np.concatenate((np.flatnonzero(np.diff(row_of, prepend=-1)), [len(row_of)]))
