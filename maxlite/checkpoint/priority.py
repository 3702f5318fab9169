"""Lets what works in the background give way to the training step."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

# Linux shows a process's threads here, by name; elsewhere they keep their priority.
_THREADS = Path("/proc/self/task")
_WRITERS = "ts_pool_worker"
_SECONDS_BETWEEN = 0.1
# Of a thread that may hold Python's lock: it gets a little of a busy core. The writers never hold it, and wait.
_LOW = 19


def lower_own_priority() -> None:
    """The thread that calls this gives way to others. Linux alone has a priority for each thread."""
    if _THREADS.is_dir():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW)


@contextlib.contextmanager
def low_writers() -> Iterator[None]:
    """While it lasts, tensorstore's threads write when a core has nothing else to do; they start while it has work."""
    over = threading.Event()

    def lower() -> None:
        while not over.wait(_SECONDS_BETWEEN):
            lower_writers()

    lower_writers()
    thread = threading.Thread(target=lower, name="checkpoint_priority", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def lower_writers() -> int:
    """Makes those threads that there are now wait for idle cores; returns how many there are."""
    lowered = 0
    for thread in _THREADS.glob("*"):
        try:
            if (thread / "comm").read_text().strip() == _WRITERS:
                os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
                lowered += 1
        except (FileNotFoundError, ProcessLookupError):
            continue  # It has ended since.
    return lowered
