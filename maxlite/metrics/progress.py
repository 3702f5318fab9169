"""What a run shows while it goes: a bar on a terminal, lines alone anywhere else."""

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

_SECONDS_BETWEEN_DRAWINGS = 0.2


class TerminalBar:
    """A bar on a terminal, drawn a few times a second by whoever moves it; nothing elsewhere. Lines go above it."""

    def __init__(self, *columns: ProgressColumn, console: Console) -> None:
        """Draws nothing before it is entered."""
        self._console = console
        self._bar = Bar(*columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal)
        self._draw_at = 0.0

    def line(self, text: str) -> None:
        """Prints a line above the bar, unwrapped and as it is."""
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def draw(self) -> None:
        """Draws the bar, if the last drawing is not too fresh."""
        if time.monotonic() >= self._draw_at:
            self._bar.refresh()
            self._draw_at = time.monotonic() + _SECONDS_BETWEEN_DRAWINGS

    def __enter__(self) -> Self:
        """Draws the bar."""
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Takes the bar away; the lines stay."""
        self._bar.stop()


def console_of(stream: TextIO) -> Console:
    """Returns a console that takes `stream` for a terminal only if it is one."""
    # Without force_terminal, rich takes FORCE_COLOR for a terminal and would draw into a file.
    return Console(file=stream, force_terminal=stream.isatty())


class Progress(TerminalBar):
    """A bar with step, loss, tokens/s, MFU and time left, and lines above it; without a terminal, the lines.

    Drawn from the loop's own thread, a few times a second at most.
    """

    def __init__(self, total_steps: int, start_step: int, console: Console | None = None) -> None:
        """`console`: standard output if not given. `start_step`: steps that an earlier run has done."""
        super().__init__(
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=console or console_of(sys.stdout),
        )
        self._task = self._bar.add_task("", total=total_steps, completed=start_step, numbers="compiling")

    def start_at(self, step: int) -> None:
        """Begins the bar at the steps that an earlier run has done, so that they do not count as speed."""
        self._bar.reset(self._task, completed=step, start=True)

    def update(self, step: int, loss: float, tokens_per_second: float | None, mfu: float | None) -> None:
        """Moves the bar to step `step` being done; it is drawn if the last drawing is not too fresh.

        tokens_per_second: of all devices; None when not known, as for a step that compiled.
        mfu: share of 1; None when not known.
        """
        numbers = f"loss {loss:.3f}"
        if tokens_per_second is not None:
            numbers += f" | {tokens_per_second:,.0f} tokens/s"
        if mfu is not None:
            numbers += f" | MFU {mfu:.1%}"
        self._bar.update(self._task, completed=step + 1, numbers=numbers)
        self.draw()
