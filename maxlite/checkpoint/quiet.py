"""Keeps orbax's own words off the terminal: what goes wrong in it reaches the user as one CheckpointError."""

import functools
import logging
import sys
import warnings
from pathlib import Path


def quiet_orbax() -> None:
    """Drops the log lines of orbax, and what the writes that a failed save leaves behind complain of."""
    warnings.filterwarnings("ignore", message=r"coroutine '.*async_serialize.*' was never awaited")
    _hook_reports()


@functools.cache
def _hook_reports() -> None:
    logging.getLogger("absl").addFilter(_is_not_of_orbax)
    logging.getLogger("asyncio").addFilter(_is_not_of_orbax)
    report = sys.unraisablehook

    def report_others(unraisable: "sys.UnraisableHookArgs") -> None:
        # A failed save closes its event loop at the first error; each write still in the air then complains of it.
        if str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = report_others


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    # asyncio's complaint of a task whose error nobody fetched names the file that the task is from.
    return "orbax" not in Path(record.pathname).parts and "/orbax/checkpoint/" not in record.getMessage()
