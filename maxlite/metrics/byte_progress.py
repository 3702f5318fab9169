"""What a transfer shows while it goes: a bar in bytes on a terminal, one line with size and rate at its end."""

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_SECONDS_BETWEEN_DRAWINGS = 0.2


class ByteProgress:
    """Counts bytes towards a total; called with how many more are done."""

    def __init__(self, what: str, total_bytes: int, stream: TextIO | None = None) -> None:
        """what: begins the line, for example "Read DIR". stream: standard output if not given."""
        file = stream or sys.stdout
        self._console = Console(file=file, force_terminal=file.isatty())
        self._bar = Progress(
            TextColumn(escape(what)),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=total_bytes)
        self._what, self._done, self._began, self._draw_at = what, 0, time.perf_counter(), 0.0

    def __call__(self, more_bytes: int) -> None:
        """Moves the bar; it is drawn if the last drawing is not too fresh."""
        self._done += more_bytes
        self._bar.update(self._task, completed=self._done)
        if time.monotonic() >= self._draw_at:
            self._bar.refresh()
            self._draw_at = time.monotonic() + _SECONDS_BETWEEN_DRAWINGS

    def __enter__(self) -> Self:
        """Begins the clock, and draws the bar."""
        self._began = time.perf_counter()
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Takes the bar away; leaves the line if all went well."""
        self._bar.stop()
        if kind is None:
            seconds = max(time.perf_counter() - self._began, 1e-9)
            megabytes = self._done / 1e6
            text = f"{self._what}: {megabytes:,.1f} MB in {seconds:.2f} s ({megabytes / seconds:,.0f} MB/s)"
            self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
