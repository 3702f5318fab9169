"""What a transfer shows while it goes: a bar in bytes on a terminal, one line with size and rate at its end."""

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from maxlite.metrics.progress import TerminalBar, console_of


class ByteProgress(TerminalBar):
    """Counts bytes towards a total; called with how many more are done."""

    def __init__(self, what: str, total_bytes: int, stream: TextIO | None = None) -> None:
        """what: begins the line, for example "Read DIR". stream: standard output if not given."""
        super().__init__(
            TextColumn(escape(what)),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console_of(stream or sys.stdout),
        )
        self._task = self._bar.add_task("", total=total_bytes)
        self._what, self._done, self._began = what, 0, time.perf_counter()

    def __call__(self, more_bytes: int) -> None:
        """Moves the bar."""
        self._done += more_bytes
        self._bar.update(self._task, completed=self._done)
        self.draw()

    def __enter__(self) -> Self:
        """Begins the clock, and draws the bar."""
        self._began = time.perf_counter()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Takes the bar away; leaves the line if all went well."""
        super().__exit__(kind, error, trace)
        if kind is None:
            seconds = max(time.perf_counter() - self._began, 1e-9)
            megabytes = self._done / 1e6
            self.line(f"{self._what}: {megabytes:,.1f} MB in {seconds:.2f} s ({megabytes / seconds:,.0f} MB/s)")
