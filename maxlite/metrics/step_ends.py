"""Notes when the devices end a step, which the loop learns only later if it waits for data meanwhile."""

import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from maxlite.metrics.timeline import Clock, Span

# A thread that waits inside a library while Python ends would end the process the hard way.
_PATIENCE_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class _InFlight:
    began: float
    wait: Callable[[], object]
    ended: Future[float]


class StepEnds:
    """A thread that waits for each step in turn, beside the loop."""

    def __init__(self, clock: Clock) -> None:
        """Starts the thread."""
        self._clock = clock
        self._in_flight: deque[_InFlight] = deque()
        self._queue: SimpleQueue[_InFlight | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="step ends", daemon=True)
        self._thread.start()

    def watch(self, wait: Callable[[], object]) -> None:
        """Notes that a step has been handed to the devices; `wait` returns when they have ended it."""
        step = _InFlight(self._clock(), wait, Future())
        self._in_flight.append(step)
        self._queue.put(step)

    def oldest(self) -> Span:
        """Returns from when to when the devices had the oldest step not asked for yet; waits for its end."""
        assert self._in_flight, "a step is watched before it is asked for"
        step = self._in_flight.popleft()
        return Span(step.began, step.ended.result())

    def close(self) -> None:
        """Ends the thread, after the step that it waits for; a second call does nothing."""
        self._queue.put(None)
        self._thread.join(_PATIENCE_SECONDS)

    def _run(self) -> None:
        while (step := self._queue.get()) is not None:
            # Whoever reports the step waits for it too, and is told what went wrong.
            with contextlib.suppress(Exception):
                step.wait()
            step.ended.set_result(self._clock())
