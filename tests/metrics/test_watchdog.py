import re
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.monitoring
import pytest

from maxlite.config.schema import MetricsConfig
from maxlite.errors import HangError
from maxlite.metrics.watchdog import Watchdog

LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILED = "/jax/core/compile/backend_compile_duration"

HANGING_RUN = """
import pathlib, sys, threading, time
from types import SimpleNamespace
from maxlite.metrics.watchdog import Watchdog

def waits_for_a_peer():
    threading.Event().wait()

keys = SimpleNamespace(watchdog_factor=5.0, watchdog_min_seconds=0.1)
with Watchdog(keys, pathlib.Path(sys.argv[1])) as watchdog:
    if sys.argv[2] == "step":
        for _ in range(3):
            time.sleep(0.02)
            watchdog.beat(0.02)
    waits_for_a_peer()
"""


@pytest.fixture
def watch(tmp_path, section):
    """watch(factor, least): a watchdog that notes its errors, and those errors."""
    errors = []

    def build(factor=5.0, least=0.2):
        metrics = section(MetricsConfig, watchdog_factor=factor, watchdog_min_seconds=least)
        return Watchdog(metrics, tmp_path / "metrics" / "stacks_process_0.txt", errors.append), errors

    return build


def wait_for(errors, seconds=20.0):
    until = time.monotonic() + seconds
    while not errors and time.monotonic() < until:
        time.sleep(0.01)
    return errors


@pytest.mark.parametrize(("place", "seconds"), [("step", 0.1), ("start", 1.2)])
def test_a_run_that_hangs_ends_with_its_stacks_written(tmp_path, process_environment, place, seconds):
    stacks = tmp_path / "metrics" / "stacks_process_0.txt"
    began = time.monotonic()
    child = subprocess.run(
        [sys.executable, "-c", HANGING_RUN, str(stacks), place],
        capture_output=True,
        text=True,
        timeout=120,
        env=process_environment,
    )
    assert child.returncode == 9
    assert time.monotonic() - began > seconds
    assert child.stderr.startswith("error: No step ended for" if place == "step" else "error: Nothing moved for")
    assert str(stacks) in child.stderr and child.stderr.count("\n") == 1
    text = stacks.read_text()
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d process \d+: No", text)
    assert "waits_for_a_peer" in text and "_write_stacks" in text


def test_steps_that_end_are_left_alone(watch):
    watchdog, errors = watch(least=0.3)
    with watchdog:
        for _ in range(20):
            time.sleep(0.05)
            watchdog.beat(0.05)
    assert errors == []


def test_the_error_says_what_was_allowed_and_what_to_change(watch):
    watchdog, errors = watch(factor=10.0, least=0.2)
    with watchdog:
        watchdog.beat(0.004)
        wait_for(errors)
        time.sleep(0.5)
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())
    assert len(errors) == 1 and isinstance(errors[0], HangError) and errors[0].exit_code == 9
    assert "the median step takes 0.004 s, and 0.2 s are allowed here" in str(errors[0])
    assert "watchdog_min_seconds=0.2" in str(errors[0]) and "watchdog_factor=10 (0 = never)" in str(errors[0])


def test_the_limit_follows_the_median(watch):
    watchdog, _ = watch(factor=50.0, least=10.0)
    assert watchdog.limit == 120.0
    watchdog.beat(9.0)
    assert watchdog.limit == 450.0
    for _ in range(2):
        watchdog.beat(0.5)
    assert watchdog.limit == 25.0
    for _ in range(200):
        watchdog.beat(0.1)
    assert watchdog.limit == 10.0
    with watchdog.patience():
        with watchdog.patience():
            assert watchdog.limit == 120.0
        assert watchdog.limit == 120.0
    assert watchdog.limit == 10.0


def test_patience_ends_too(watch):
    watchdog, errors = watch(least=0.1)
    with watchdog:
        watchdog.beat(0.01)
        with watchdog.patience():
            began = time.monotonic()
            assert wait_for(errors)
            assert time.monotonic() - began >= 1.2


def test_signs_of_life_within_patience_count(watch):
    watchdog, errors = watch(least=0.05)
    with watchdog:
        watchdog.beat(0.01)
        with watchdog.patience():
            for _ in range(12):
                time.sleep(0.1)
                watchdog.alive()
    assert errors == []


def test_a_compilation_is_given_time(watch):
    watchdog, errors = watch(factor=1.0, least=100.0)
    with watchdog:
        watchdog.beat(0.01)
        limits = []
        listen = lambda event, *_, **__: limits.append((event, watchdog.limit))  # noqa: E731
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            jax.jit(lambda x: x * 3.25 + len(limits))(jax.numpy.ones(7))
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        assert {limit for event, limit in limits if event == LOWERED} == {1200.0}
        assert {limit for event, limit in limits if event == COMPILED} == {100.0}
        assert watchdog.limit == 100.0
    # Nobody listens any more.
    jax.monitoring.record_event_duration_secs(LOWERED, 1.0)
    assert watchdog.limit == 100.0 and errors == []


def test_lowering_alone_gives_time_until_a_step_ends(watch):
    watchdog, _ = watch(factor=1.0, least=100.0)
    with watchdog:
        watchdog.beat(0.01)
        jax.jit(lambda x: x * 7.125).lower(jax.ShapeDtypeStruct((3,), "float32"))
        assert watchdog.limit == 1200.0
        watchdog.beat(0.01)
        assert watchdog.limit == 100.0


def test_a_process_that_was_stopped_has_not_hung(watch, monkeypatch):
    watchdog, errors = watch(factor=1.0, least=2.0)
    stopped = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + stopped[0], strftime=time.strftime)
    monkeypatch.setattr("maxlite.metrics.watchdog.time", clock)
    with watchdog:
        watchdog.beat(0.01)
        time.sleep(0.5)
        # What SIGSTOP and SIGCONT an hour later are to it.
        stopped[0] = 3600.0
        time.sleep(0.5)
        assert errors == []
        assert wait_for(errors)


def test_zero_never_looks(watch):
    watchdog, errors = watch(factor=0.0, least=0.01)
    with watchdog:
        assert not any(thread.name == "watchdog" for thread in threading.enumerate())
        time.sleep(0.3)
    assert errors == []


def test_stacks_that_cannot_be_written_are_no_reason_to_stay(tmp_path, watch):
    (tmp_path / "metrics").write_text("")
    watchdog, errors = watch(least=0.1)
    with watchdog:
        watchdog.beat(0.01)
        wait_for(errors)
    assert "stacks_process_0.txt: File exists" in str(errors[0])


def test_last_words_that_do_not_come_out_are_cut_short(tmp_path, process_environment):
    """The watchdog's own end may hang: its file lies on the file system that hangs, or nobody reads the terminal."""
    code = HANGING_RUN.replace(
        "keys =",
        "import maxlite.metrics.watchdog as room\nroom._LAST_WORDS_SECONDS = 0.5\n"
        "room.faulthandler.dump_traceback = lambda *_, **__: time.sleep(100)\nkeys =",
    )
    child = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "stacks.txt"), "step"], env=process_environment, timeout=60
    )
    assert child.returncode == 9
