"""What share of a run's time its steps had, and what the rest went to, over all attempts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from maxlite.metrics.account import Account
from maxlite.metrics.events import BEGIN, BUCKETS, END, SPENT, START, STEP, Event, EventLog, read_events
from maxlite.metrics.step_ends import StepEnds
from maxlite.metrics.timeline import Clock, Span, Timeline, process_start, unix_time

# What is an event of its own when it ends; the others are part of the step after them.
_EVENTS = ("restore", "evaluation", "save")
_LEAST_SHOWN = 0.05


class Goodput:
    """The time of one attempt, from the start of its process, added to that of the attempts before it.

    Each moment is in one bucket: `init` before the steps begin and `step` after, but for what is measured. While the
    devices are at a step, its time is the step's, whatever the process waits for. All calls come from one thread.
    """

    def __init__(self, path: Path | None, began: float | None = None, clock: Clock = unix_time) -> None:
        """Reads the events of earlier attempts and notes the start of this one.

        path: of events.jsonl; None keeps the account in memory only.
        began: seconds since 1970, the process's own start if not given. An event there that is newer (a clock was set
            back, or an earlier run of this process) moves it.

        Raises:
            CheckpointError: the file can't be written, or the one that is there is no log of events.
        """
        self._account = Account()
        for event in read_events(path) if path is not None else ():
            self._account.take(event)
        self._log = EventLog(path) if path is not None else None
        last, began = self._account.last, process_start() if began is None else began
        began = began if last is None else max(began, last.time)
        behind = max(0.0, began - clock())
        self._clock = lambda: clock() + behind
        self._timeline = Timeline(began, "init", self._clock)
        self._began, self._is_first, self._has_ended = began, True, False
        self._ends: StepEnds | None = None
        self._note(Event(START, began))

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the attempt, as one that has not finished unless `end` was told."""
        if not self._has_ended:
            self.end(finished=False)

    @contextmanager
    def measure(self, bucket: str) -> Iterator[None]:
        """Time within goes to `bucket`, but for what is measured within."""
        assert bucket in SPENT, bucket
        before = self._timeline.bucket
        self._timeline.switch(bucket)
        try:
            yield
        finally:
            self._timeline.switch(before)
        if bucket in _EVENTS:
            self._settle(bucket)

    def add(self, bucket: str, seconds: float) -> None:
        """Says that the last `seconds` were of `bucket`, where it is known only now."""
        assert bucket in SPENT, bucket
        self._timeline.carve(bucket, seconds)

    def begin(self, step: int) -> None:
        """Begins the steps of this attempt with `step`; those that earlier attempts did from it on are lost."""
        self._settle(BEGIN, step)
        self._timeline.switch(STEP)
        self._ends = StepEnds(self._clock)

    def dispatched(self, wait: Callable[[], object]) -> None:
        """Notes that a step has been handed to the devices; `wait` returns when they have ended it."""
        assert self._ends is not None, "steps begin before one is dispatched"
        self._ends.watch(wait)

    def step(self, step: int) -> str | None:
        """Notes that the oldest step dispatched has been done; its number is `step`.

        Returns: a line for the log after this attempt's first step, how long it took to get there.
        """
        assert self._ends is not None, "steps begin before one is done"
        busy = self._ends.oldest()
        self._settle(STEP, step, busy)
        if not self._is_first:
            return None
        self._is_first = False
        before = ", ".join(_shown(self._account.spent, [bucket for bucket in SPENT if bucket != STEP]))
        return f"First step ended {busy.ended - self._began:.1f} s after the start ({before or 'nothing else'})"

    def tags(self) -> dict[str, float]:
        """Returns goodput/fraction, a share of 1, goodput/<bucket>_seconds and goodput/lost_steps, of all attempts."""
        seconds = {f"goodput/{bucket}_seconds": self._account.seconds[bucket] for bucket in BUCKETS}
        return {"goodput/fraction": self._account.goodput, **seconds, "goodput/lost_steps": self._account.lost_steps}

    def end(self, *, finished: bool) -> str:
        """Ends the attempt; returns the line that sums up the run.

        finished: nothing was left to do, so that the time until a later start was not lost to this run.
        """
        self._has_ended = True
        try:
            self._settle(END, finished=finished)
        finally:
            if self._ends is not None:
                self._ends.close()
            if self._log is not None:
                self._log.close()
        return summary_line(self._account)

    def _settle(self, kind: str, step: int | None = None, busy: Span | None = None, *, finished: bool = False) -> None:
        spent = self._timeline.settle(STEP, busy)
        self._note(Event(kind, self._timeline.now, spent, step, finished))

    def _note(self, event: Event) -> None:
        if self._log is not None:
            self._log.write(event)
        self._account.take(event)


def summary_line(account: Account) -> str:
    """Formats what a run's time went to, as the last line of its log."""
    attempts = "1 attempt" if account.attempts == 1 else f"{account.attempts} attempts"
    lost = [] if account.lost_steps == 0 else [f"{account.lost_steps} steps lost"]
    parts = ", ".join([*_shown(account.seconds, BUCKETS), *lost])
    return f"Goodput {account.goodput:.1%} of {account.total:.1f} s in {attempts}: {parts or 'nothing was done'}"


def _shown(seconds: dict[str, float], buckets: Sequence[str]) -> list[str]:
    return [f"{bucket} {seconds[bucket]:.1f} s" for bucket in buckets if seconds[bucket] >= _LEAST_SHOWN]
