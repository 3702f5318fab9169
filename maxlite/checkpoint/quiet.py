"""Keeps orbax's own words off the terminal: what goes wrong in it reaches the user as one CheckpointError."""

import functools
import logging
import sys
from pathlib import Path


@functools.cache
def quiet_orbax() -> None:
    """Drops the log lines of orbax, and the tracebacks of the writes that it leaves behind when a save fails."""
    logging.getLogger("absl").addFilter(_is_not_of_orbax)
    report = sys.unraisablehook

    def report_others(unraisable: "sys.UnraisableHookArgs") -> None:
        # A failed save closes its event loop at the first error; each write still in the air then complains of it.
        if str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = report_others


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in Path(record.pathname).parts
