"""When a run saves and when it stops: the same step in every process, though each has its own clock and signals."""

import time

from maxlite.config.schema import CheckpointConfig
from maxlite.processes.group import Agreement, is_primary, num_processes
from maxlite.train.stop_signal import StopSignal

_SECONDS_A_MINUTE = 60
# A process has at most one step in flight when it hands the next one to its devices, and a step ends only when all
# processes have handed it over. So none is more than one step ahead of another, and a step announced two ahead is
# heard of by all before they reach it.
_STEPS_AHEAD = 2


class Decisions:
    """Asked by the loop of every process between any two steps."""

    def __init__(self, checkpoint: CheckpointConfig, stop: StopSignal) -> None:
        """Counts minutes from now."""
        self._checkpoint, self._stop = checkpoint, stop
        self._agreement = Agreement("loop")
        self._saves = 0
        self._saved_at = time.monotonic()

    def stop_due(self, done: int) -> bool:
        """Says whether the run stops after `done` steps, because a process received a signal."""
        if self._stop.received is not None and self._agreement.step_of("stop") is None:
            self._agreement.announce("stop", self._ahead(done))
        return self._has_come("stop", done)

    def save_due(self, done: int) -> bool:
        """Says whether the state after `done` steps is to be saved, by steps or by minutes."""
        period, minutes = self._checkpoint.checkpoint_period, self._checkpoint.checkpoint_period_minutes
        by_minutes = False
        if minutes is not None:
            name = f"save {self._saves}"
            if is_primary() and time.monotonic() - self._saved_at >= minutes * _SECONDS_A_MINUTE:
                self._agreement.announce(name, self._ahead(done))
            by_minutes = self._has_come(name, done)
        if by_minutes:
            self._saves += 1
            self._saved_at = time.monotonic()
        return by_minutes or is_due(period, done)

    def _has_come(self, what: str, done: int) -> bool:
        step = self._agreement.step_of(what)
        return step is not None and done >= step

    @staticmethod
    def _ahead(done: int) -> int:
        return done + _STEPS_AHEAD if num_processes() > 1 else done


def is_due(period: int, done: int) -> bool:
    """Says whether `done` is a multiple of `period`; of 0 none is."""
    return period > 0 and done % period == 0
