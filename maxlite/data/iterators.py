"""Batches from the order of rows: a training iterator that works ahead, and passes over held-out rows."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from maxlite.data.batch import Batch
from maxlite.data.row_order import PlannedRow, RowOrder

Fill = Callable[[list[PlannedRow]], Batch]
_Planned = tuple[Future[Batch] | None, dict[str, Any], int]


class TrainIterator:
    """The training batches, made by threads while a step runs.

    One thread plans, in order; others fill, each a batch of its own. How many there are and how far they are ahead
    changes no batch and no position.
    """

    def __init__(self, rows: RowOrder, batch_size: int, fill: Fill, *, num_workers: int, num_ahead: int) -> None:
        """Plans nothing before the first batch is asked for; from then on only its own thread touches `rows`.

        num_workers: threads that fill; 0 = the one that asks, and nothing is made ahead. num_ahead: batches.
        """
        self._rows, self._batch_size, self._fill = rows, batch_size, fill
        self._state = rows.state()
        self._num_tokens = 0
        self._num_ahead = num_ahead if num_workers else 0
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="plan") if num_workers else None
        self._fillers = ThreadPoolExecutor(num_workers, thread_name_prefix="data") if num_workers else None
        self._ahead: deque[Future[_Planned]] = deque()

    def __iter__(self) -> "TrainIterator":
        """Returns itself."""
        return self

    def __next__(self) -> Batch:
        """Returns the next Batch of [B, T]; raises StopIteration where the passes that were asked for end.

        Raises DataError if a document cannot be read any more.
        """
        if self._planner is None:
            rows = self._rows.take(self._batch_size)
            self._state, self._num_tokens = self._rows.state(), _num_tokens(rows)
            if not rows:
                raise StopIteration
            return self._fill(rows)
        while len(self._ahead) <= self._num_ahead:
            self._ahead.append(self._planner.submit(self._plan))
        batch, self._state, self._num_tokens = self._ahead.popleft().result()
        if batch is None:
            raise StopIteration
        return batch.result()

    def state(self) -> dict[str, Any]:
        """Returns the position behind the last batch handed out, small and fit for JSON."""
        return self._state

    def num_tokens(self) -> int:
        """Returns the tokens, without padding, of the last batch handed out: of all its rows in all processes."""
        return self._num_tokens

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a position that `state` gave, so that the next batch is the one that followed it."""
        self._ahead.clear()
        if self._planner is None:
            self._rows.restore(state)
        else:
            self._planner.submit(self._rows.restore, state).result()
        self._state = state

    def _plan(self) -> _Planned:
        assert self._fillers is not None
        rows = self._rows.take(self._batch_size)
        return self._fillers.submit(self._fill, rows) if rows else None, self._rows.state(), _num_tokens(rows)


def _num_tokens(rows: list[PlannedRow]) -> int:
    return sum(int(row.segments.length.sum()) for row in rows)


def one_pass(rows: RowOrder, batch_size: int, fill: Fill) -> Iterator[Batch]:
    """Yields all rows in batches; the last may have empty rows."""
    while taken := rows.take(batch_size):
        yield fill(taken)
