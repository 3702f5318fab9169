"""One process's time, cut into pieces that touch, each in one bucket."""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_IMPORTED = time.monotonic()
_OFFSET = time.time() - _IMPORTED
Clock = Callable[[], float]


class Span(NamedTuple):
    """From one moment to another, both of the same clock."""

    began: float
    ended: float


class Timeline:
    """Knows at each moment what the time goes to, so that nothing is counted twice or left out."""

    def __init__(self, began: float, bucket: str, clock: Clock) -> None:
        """Begins at a moment that may lie before now."""
        self.bucket, self._clock = bucket, clock
        self._pieces: list[tuple[str, Span]] = []
        self.now = began

    def switch(self, bucket: str) -> None:
        """From now on, time goes to `bucket`."""
        before, self.now = self.now, max(self.now, self._clock())
        self._pieces.append((self.bucket, Span(before, self.now)))
        self.bucket = bucket

    def carve(self, bucket: str, seconds: float) -> None:
        """Says that the last `seconds` were of `bucket`, as far as the current piece goes back."""
        self.switch(self.bucket)
        current, (began, ended) = self._pieces.pop()
        cut = max(began, ended - seconds)
        self._pieces += [(current, Span(began, cut)), (bucket, Span(cut, ended))]

    def settle(self, claimant: str, claimed: Span | None) -> dict[str, float]:
        """Returns bucket -> seconds since the last call, which add up to the time since then.

        claimed: belongs to the bucket `claimant`, whatever was said then.
        """
        self.switch(self.bucket)
        pieces, self._pieces = self._pieces, []
        spent: defaultdict[str, float] = defaultdict(float)
        for bucket, (began, ended) in pieces:
            share = 0.0 if claimed is None else max(0.0, min(ended, claimed.ended) - max(began, claimed.began))
            spent[claimant] += share
            spent[bucket] += ended - began - share
        return dict(spent)


def unix_time() -> float:
    """Returns the seconds since 1970 by a clock that never goes back within this process."""
    return _OFFSET + time.monotonic()


def process_start() -> float:
    """Returns when this process began, by `unix_time`.

    Linux tells it, to 10 ms. Elsewhere it is the moment at which this module was imported.
    """
    if sys.platform != "linux":
        return _OFFSET + _IMPORTED
    # The name in brackets may hold anything; after it, the 20th field is the start in ticks since the machine's.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return unix_time() - max(age, 0.0)
