"""The global order of rows: a few numbers say where a run stands in it, the same on any number of processes.

A pass over a source visits its windows in an order that the seed and the pass decide. They are packed in blocks of some
thousands, so that a position is found again by planning one block, wherever in the data it lies.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from maxlite.data.packing import Packing, Rows
from maxlite.data.windows import Segments, WindowSource

BLOCK_WINDOWS = 16_384


class PlannedRow(NamedTuple):
    """What a row will hold: segments of documents of a source."""

    source: int
    segments: Segments


class RowOrder(Protocol):
    """Rows one after the other."""

    def take(self, count: int) -> list[PlannedRow]:
        """Returns the next rows; fewer than `count` at the end of a pass, none at the end of all."""
        ...

    def state(self) -> dict[str, Any]:
        """Returns the position, small and fit for JSON."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a position that `state` gave."""
        ...


class PassSize(NamedTuple):
    """Rows of a pass, or of its beginning, and the pairs in them. is_all: it is the whole pass."""

    num_rows: int
    num_targets: int
    is_all: bool


class Passes:
    """Endless or num_epoch passes over one source; a pass does not know how many come before or after it."""

    def __init__(
        self, windows: WindowSource, packing: Packing, *, source: int, seed: int | None, num_epoch: int | None
    ) -> None:
        """Starts at the first row of pass 0; without a `seed` windows and rows keep their order."""
        assert len(windows) > 0
        self._windows, self._packing, self._source = windows, packing, source
        self._seed, self._num_epoch = seed, num_epoch
        # Rows of one bucket come in whole batches only if a block holds whole batches.
        self._block_windows = max(BLOCK_WINDOWS // packing.group_size, 1) * packing.group_size
        self._order: tuple[int, np.ndarray] | None = None
        self._rows: tuple[tuple[int, int], Rows] | None = None
        self._epoch = self._block = self._row = 0

    def take(self, count: int) -> list[PlannedRow]:
        """Returns the next rows of this pass; fewer than `count` are its last, then the next pass begins."""
        taken: list[PlannedRow] = []
        while len(taken) < count and not self._is_done():
            rows = self._planned()
            stop = min(self._row + count - len(taken), len(rows))
            taken.extend(PlannedRow(self._source, rows.row(number)) for number in range(self._row, stop))
            self._row = stop
            if stop == len(rows):
                self._block, self._row = self._block + 1, 0
                if self._block * self._block_windows >= len(self._windows):
                    self._epoch, self._block = self._epoch + 1, 0
                    break
        return taken

    def state(self) -> dict[str, Any]:
        """Returns the pass, the block in it and the row in that."""
        return {"epoch": self._epoch, "block": self._block, "row": self._row}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a position that `state` gave."""
        self._epoch, self._block, self._row = state["epoch"], state["block"], state["row"]

    def measure(self, max_blocks: int | None) -> PassSize:
        """Plans pass 0, or its first blocks, and counts; the position stays."""
        blocks = -(-len(self._windows) // self._block_windows)
        measured = blocks if max_blocks is None else min(blocks, max_blocks)
        plans = [self._plan(0, block) for block in range(measured)]
        num_targets = sum(int(rows.segments.length.sum()) for rows in plans)
        return PassSize(sum(map(len, plans)), num_targets, measured == blocks)

    def _is_done(self) -> bool:
        return self._num_epoch is not None and self._epoch >= self._num_epoch

    def _planned(self) -> Rows:
        key = (self._epoch, self._block)
        if self._rows is None or self._rows[0] != key:
            self._rows = (key, self._plan(*key))
        return self._rows[1]

    def _plan(self, epoch: int, block: int) -> Rows:
        begin = block * self._block_windows
        end = min(begin + self._block_windows, len(self._windows))
        if self._seed is None:
            return self._packing.pack(self._windows.locate(np.arange(begin, end)))
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng((self._seed, self._source, epoch))
            self._order = (epoch, generator.permutation(len(self._windows)))
        rows = self._packing.pack(self._windows.locate(self._order[1][begin:end]))
        return self._packing.shuffle(rows, np.random.default_rng((self._seed, self._source, epoch, block)))


@dataclasses.dataclass(frozen=True)
class Part:
    """One source of a mixture. weight: share of the rows while it lasts."""

    rows: RowOrder
    weight: float


class Mixture:
    """Rows of sources, each as often as its weight says at every moment; a source that ends is left out."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """Starts at the first row of each."""
        self._parts = parts
        self._counts = [0] * len(parts)
        self._ended = [False] * len(parts)

    def take(self, count: int) -> list[PlannedRow]:
        """Returns the next rows; fewer than `count` at the end of all sources."""
        taken: list[PlannedRow] = []
        while len(taken) < count and not all(self._ended):
            source = self._next_source()
            rows = self._parts[source].rows.take(1)
            # A pass may end exactly where the last row was taken: only an empty answer is the end of all passes.
            self._ended[source] = not rows
            self._counts[source] += len(rows)
            taken.extend(rows)
        return taken

    def state(self) -> dict[str, Any]:
        """Returns the rows taken of each source, and the position in each."""
        return {
            "counts": list(self._counts),
            "ended": list(self._ended),
            "sources": [part.rows.state() for part in self._parts],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a position that `state` gave."""
        self._counts, self._ended = list(state["counts"]), list(state["ended"])
        for part, position in zip(self._parts, state["sources"], strict=True):
            part.rows.restore(position)

    def _next_source(self) -> int:
        """The source that is furthest behind its share; the first of equals."""
        left = [place for place, ended in enumerate(self._ended) if not ended]
        return min(left, key=lambda place: (self._counts[place] + 1) / self._parts[place].weight)
