"""The processes that `maxlite data tokenize` encodes in."""

import contextlib
import functools
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from maxlite.errors import DataError

Task = TypeVar("Task")
Result = TypeVar("Result")


@contextlib.contextmanager
def start_workers(work: Callable[[Task], Result], num_workers: int) -> Iterator[Callable[[Task], Callable[[], Result]]]:
    """Gives a function that takes a task and returns one that waits for its result.

    num_workers: processes; 0 = this one, which works when the result is asked for.

    Raises:
        DataError: a process was ended from outside.
    """
    if num_workers == 0:
        yield lambda task: functools.partial(work, task)
        return
    # A forked child would inherit threads' locks.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start_worker)
    try:
        yield lambda task: executor.submit(work, task).result
    except BrokenProcessPool as error:
        raise DataError(
            "A worker process was ended from outside, perhaps for want of memory. The same command again goes on; "
            "fewer --workers need less."
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _start_worker() -> None:
    # Each process has a core to itself.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A killed parent closes no queue, and its workers would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
