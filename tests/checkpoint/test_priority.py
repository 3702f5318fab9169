import os
import sys
import threading
from pathlib import Path

import pytest

from maxlite.checkpoint import priority
from maxlite.checkpoint.manager import Checkpointer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")


def test_one_thread_alone_gives_way():
    found = []

    def lower():
        priority.lower_own_priority()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=lower)
    thread.start()
    thread.join()
    assert found == [19]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19


def test_writers_wait_for_idle_cores(tmp_path, states):
    checkpointer = Checkpointer(tmp_path, states.config())
    checkpointer.save(1, states.build(states.mesh(x=2)), {})
    checkpointer.close()
    with priority.low_writers():
        writers = [int(thread.name) for thread in Path("/proc/self/task").glob("*") if is_writer(thread)]
    assert writers and {os.sched_getscheduler(writer) for writer in writers} == {os.SCHED_IDLE}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def is_writer(thread: Path) -> bool:
    return (thread / "comm").read_text().startswith("ts_pool")
