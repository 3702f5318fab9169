"""Ends a run in which nothing moves any more, so that whoever started it can start it again."""

import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import jax.monitoring

from maxlite.config.schema import MetricsConfig
from maxlite.errors import HangError

# A start compiles, restores and meets the other processes; an evaluation or a save is as long as it is.
_PATIENCE = 12
_RECENT_STEPS = 101
_MOST_SECONDS_BETWEEN_LOOKS = 1.0
# What holds the run up, such as a file system, may hold up its last words too.
_LAST_WORDS_SECONDS = 60.0
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"


def end_process(error: HangError) -> None:
    """Prints the error as the command line does and ends this process, whatever its other threads are at."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


class Watchdog:
    """A thread that looks on. Without a sign of life for too long it writes down what every thread is at.

    Too long is watchdog_factor times the median step, and at least watchdog_min_seconds; 12 times
    watchdog_min_seconds before the first step has ended, while a program is compiled, and within `patience`.
    A time in which the whole process stood still does not count. watchdog_factor=0 never looks.
    """

    def __init__(
        self, metrics: MetricsConfig, stacks_path: Path, on_hang: Callable[[HangError], None] = end_process
    ) -> None:
        """Looks at nothing before the `with` block begins.

        stacks_path: of a file that the stacks of all threads are appended to.
        on_hang: called once, in the watchdog's thread, when they are written.
        """
        self._factor, self._least = metrics.watchdog_factor, metrics.watchdog_min_seconds
        self._stacks_path, self._on_hang = stacks_path, on_hang
        self._steps: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._median: float | None = None
        self._signs, self._patience, self._is_compiling = 0, 0, False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        """Begins to look."""
        if self._factor > 0:
            jax.monitoring.register_event_duration_secs_listener(self._listen)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Looks no more."""
        if self._factor > 0:
            self._done.set()
            self._thread.join()
            jax.monitoring.unregister_event_duration_listener(self._listen)

    def beat(self, seconds: float) -> None:
        """Notes that a step has ended; seconds: what it took, without compiling."""
        self._steps.append(seconds)
        self._median = statistics.median(self._steps)
        self._is_compiling = False
        self.alive()

    def alive(self) -> None:
        """Notes that the run moves: a batch was evaluated, a state is restored."""
        self._signs += 1

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Allows what is within as much time as a start."""
        self.alive()
        self._patience += 1
        try:
            yield
        finally:
            self._patience -= 1
            self.alive()

    @property
    def limit(self) -> float:
        """Seconds without a sign of life that are too long now."""
        patient = self._median is None or self._patience > 0 or self._is_compiling
        return max(self._least * (_PATIENCE if patient else 1), self._factor * (self._median or 0.0))

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """Jax tells when a program has been lowered, and compiles it next."""
        if event in (_LOWERED, _COMPILED):
            self._is_compiling = event == _LOWERED
            self.alive()

    def _look(self) -> None:
        pause = min(_MOST_SECONDS_BETWEEN_LOOKS, self._least / 10)
        seen, quiet, before = self._signs, 0.0, time.monotonic()
        while not self._done.wait(pause):
            # A process that was stopped, or had no processor, finds a gap: it did not look, and does not count it.
            now = time.monotonic()
            quiet, before = quiet + min(now - before, 2 * pause), now
            if self._signs != seen:
                seen, quiet = self._signs, 0.0
            elif quiet > self.limit:
                self._end(quiet)
                return

    def _end(self, quiet: float) -> None:
        end = threading.Timer(_LAST_WORDS_SECONDS, os._exit, (HangError.exit_code,))
        end.daemon = True
        end.start()
        what = "Nothing moved" if self._median is None else "No step ended"
        usual = "no step has ended yet" if self._median is None else f"the median step takes {self._median:.3g} s"
        text = f"{what} for {quiet:.0f} s; {usual}, and {round(self.limit, 1):g} s are allowed here."
        self._on_hang(
            HangError(
                f"{text} {self._write_stacks(text)} The same command goes on from the last checkpoint. If the run was "
                f"slow and did not hang, raise watchdog_min_seconds={self._least:g} or watchdog_factor="
                f"{self._factor:g} (0 = never)."
            )
        )
        end.cancel()

    def _write_stacks(self, text: str) -> str:
        try:
            self._stacks_path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._stacks_path, "a", encoding="utf-8") as file:
                print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}: {text}", file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            return f"What its threads were at could not be written to {self._stacks_path}: {error.strerror}."
        return f"What its threads were at is in {self._stacks_path}."
