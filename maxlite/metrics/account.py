"""What the time of a run, over all its attempts, went to."""

import math
from array import array

from maxlite.metrics.events import BEGIN, BUCKETS, END, START, STEP, Event


class Account:
    """Sums of events, in the order in which they were written.

    seconds: bucket -> seconds of the run. They add up to the time from its first start to the last event, without
        the time between the end of an attempt that had finished and a later start.
    spent: bucket -> seconds of the last attempt.
    lost_steps: steps that were done, and done again by a later attempt because no checkpoint held them.
    """

    def __init__(self) -> None:
        """Nothing has been spent."""
        self.seconds, self.spent = dict.fromkeys(BUCKETS, 0.0), dict.fromkeys(BUCKETS, 0.0)
        self.lost_steps, self.attempts = 0, 0
        self.last: Event | None = None
        # At a step's number, the time of it that counts; NaN where no event told of it.
        self._steps = array("d")

    @property
    def total(self) -> float:
        """Seconds of all buckets."""
        return math.fsum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The share of the time in which steps were done that count; 0 before any time has passed."""
        total = self.total
        return self.seconds[STEP] / total if total > 0 else 0.0

    def take(self, event: Event) -> None:
        """Adds one event."""
        if event.kind == START:
            self._start(event)
        for bucket, seconds in event.spent.items():
            self.seconds[bucket] += seconds
            self.spent[bucket] += seconds
        if event.kind == BEGIN:
            assert event.step is not None, "an attempt begins with a step"
            self._lose_from(event.step)
        elif event.kind == STEP:
            assert event.step is not None, "a step has a number"
            self._lose_from(event.step)
            self._steps.append(event.spent.get(STEP, 0.0))
        self.last = event

    def _start(self, event: Event) -> None:
        self.attempts += 1
        self.spent = dict.fromkeys(BUCKETS, 0.0)
        if self.last is not None and not (self.last.kind == END and self.last.finished):
            self.seconds["down"] += event.time - self.last.time

    def _lose_from(self, step: int) -> None:
        lost = [seconds for seconds in self._steps[step:] if not math.isnan(seconds)]
        del self._steps[step:]
        self.lost_steps += len(lost)
        self.seconds["lost"] += math.fsum(lost)
        self.seconds[STEP] -= math.fsum(lost)
        self._steps.extend([math.nan] * (step - len(self._steps)))
