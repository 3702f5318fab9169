"""The log of what a run's time went to: `metrics/events.jsonl`, one event a line, appended to by every attempt.

An attempt is one start of the command. A line is in the file before the run goes on, so that an attempt that is
killed leaves all events but what it was at.
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maxlite.errors import CheckpointError
from maxlite.metrics.json_lines import JsonLines, writing

# In the order in which they are told.
BUCKETS: tuple[str, ...] = ("step", "init", "compile", "restore", "data_wait", "evaluation", "save", "lost", "down")
# What an attempt can spend time on; the others are known only when a later one begins.
SPENT = BUCKETS[:-2]
START, BEGIN, STEP, END = "start", "begin", "step", "end"
_KINDS = {START, BEGIN, STEP, END, "restore", "evaluation", "save"}
_WITH_STEP = {BEGIN, STEP}


@dataclasses.dataclass(frozen=True)
class Event:
    """One line.

    kind: start (of an attempt), begin (of its steps), restore, step, evaluation, save or end.
    time: when it ended, in seconds since 1970; it never goes back from line to line.
    spent: bucket -> seconds, of all the time since the attempt's event before this one.
    step: that a step event is of, or that an attempt begins with.
    finished: with an end: nothing was left to do.
    """

    kind: str
    time: float
    spent: Mapping[str, float] = dataclasses.field(default_factory=dict)
    step: int | None = None
    finished: bool = False

    def row(self) -> dict[str, Any]:
        """Returns it as the object that stands in the file, times in whole microseconds."""
        spent = {bucket: round(seconds, 6) for bucket, seconds in self.spent.items() if seconds > 0}
        row: dict[str, Any] = {"event": self.kind, "time": round(self.time, 6), "spent": spent}
        if self.step is not None:
            row["step"] = self.step
        if self.kind == END:
            row["finished"] = self.finished
        return row


class EventLog:
    """Appends events. One process writes at a time (RunDirectory.lock)."""

    def __init__(self, path: Path) -> None:
        """Opens the file; a last line that was cut off is taken out. Raises CheckpointError if it can't be written."""
        with writing(path):
            if path.exists():
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._lines = JsonLines(path)

    def write(self, event: Event) -> None:
        """Appends one event. Raises CheckpointError if it can't be written."""
        self._lines.write(event.row())

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._lines.close()


def read_events(path: Path) -> Iterator[Event]:
    """Returns the events that are there, without a last line that was cut off; none where there is no file.

    Raises:
        CheckpointError: the file can't be read, or it holds something else.
    """
    if not path.exists():
        return
    with _reading(path), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield _event(path, number, line)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}.") from error


def _event(path: Path, number: int, line: bytes) -> Event:
    try:
        row = json.loads(line)
        kind, spent = row["event"], {bucket: float(seconds) for bucket, seconds in row["spent"].items()}
        if kind not in _KINDS or not spent.keys() <= set(SPENT) or (kind in _WITH_STEP) != ("step" in row):
            raise ValueError(f"unknown: {row}")
        step = int(row["step"]) if kind in _WITH_STEP else None
        return Event(kind, float(row["time"]), spent, step, kind == END and row["finished"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: line {number} is not an event of a run. Move the file away; the run then begins a new one, and "
            "its time so far is not counted."
        ) from error
