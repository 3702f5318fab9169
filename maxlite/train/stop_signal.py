"""SIGTERM and Ctrl-C end a run at a step's end, so that it can save first."""

import signal
import types
from typing import Self

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Notes the first signal. A second Ctrl-C interrupts at once; more SIGTERMs change nothing.

    Listens for the whole of a run, also while it starts and while it waits for its last save.
    """

    def __init__(self) -> None:
        """Nothing is caught before the `with` block begins."""
        self.received: str | None = None
        self._earlier: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        """Begins to listen."""
        for number in _SIGNALS:
            self._earlier[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the handlers back."""
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        del frame
        if number == signal.SIGINT and self.received is not None:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number).name
