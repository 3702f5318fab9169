import json
import math
import signal
import subprocess
import sys
import threading
import time
from random import Random

import pytest

from maxlite.errors import CheckpointError
from maxlite.metrics.account import Account
from maxlite.metrics.events import BUCKETS, STEP, read_events
from maxlite.metrics.goodput import Goodput

# Between a kill and the next start.
PAUSE = 0.05
# A run like the loop's, without jax: it saves every 5 steps, and reports a step when the next one is on its way. It
# kills itself at the place it is told, and prints what it did by a clock of its own.
RUN = """
import contextlib, json, os, pathlib, signal, sys, threading, time
from maxlite.metrics.goodput import Goodput

folder, steps, place = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
saved = folder / "saved"

def at(*names):
    if place in names:
        os.kill(os.getpid(), signal.SIGKILL)

@contextlib.contextmanager
def clocked(bucket):
    began = time.perf_counter()
    yield
    print(json.dumps([bucket, time.perf_counter() - began]), flush=True)

def report(step):
    goodput.step(step)
    print(json.dumps(["done", step]), flush=True)
    at(f"done {step}")

at("import")
with Goodput(folder / "metrics" / "events.jsonl") as goodput:
    at("start")
    done = 0
    if saved.exists():
        with clocked("restore"), goodput.measure("restore"):
            time.sleep(0.05)
            at("restore")
            done = int(saved.read_text())
    goodput.begin(done)
    at("begin")
    flying, first = None, done
    while done < steps:
        with goodput.measure("data_wait"):
            time.sleep(0.02)
            at(f"data {done}")
        ended = threading.Event()
        if done == first:
            began = time.perf_counter()
            with clocked("compile"):
                time.sleep(0.05)
                at("compile")
            goodput.add("compile", time.perf_counter() - began)
        threading.Timer(0.02, ended.set).start()
        goodput.dispatched(ended.wait)
        at(f"sent {done}")
        if flying is not None:
            report(flying)
        flying, done = done, done + 1
        if done % 5 == 0:
            report(flying)
            flying = None
            if done == 10:
                with clocked("evaluation"), goodput.measure("evaluation"):
                    time.sleep(0.06)
                    at("evaluation")
            with clocked("save"), goodput.measure("save"):
                time.sleep(0.05)
                at(f"save {done}")
                saved.with_suffix(".new").write_text(str(done))
                saved.with_suffix(".new").replace(saved)
    print(json.dumps(["line", goodput.end(finished=True)]), flush=True)
"""


class FakeClock:
    now = 1000.0

    def __call__(self):
        return self.now


class FakeSteps:
    """Steps of a device that ends them when it is told."""

    def __init__(self, goodput):
        self.goodput, self.ended = goodput, []

    def send(self):
        self.ended.append(threading.Event())
        self.goodput.dispatched(self.ended[-1].wait)

    def end(self):
        """Ends the oldest; returns when that has been noted."""
        self.ended.pop(0).set()
        self.goodput._ends._in_flight[0].ended.result(timeout=10)


@pytest.fixture
def clock():
    return FakeClock()


def account(path):
    made = Account()
    for event in read_events(path):
        made.take(event)
    return made


def run(folder, environment, *places, steps=20):
    """Attempts that are killed at `places` in turn, then one that ends; returns all that they print."""
    lines = []
    for place in (*places, ""):
        child = subprocess.run(
            [sys.executable, "-c", RUN, str(folder), str(steps), place],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
        )
        assert child.returncode == (-signal.SIGKILL if place else 0), child.stderr
        lines.append([json.loads(line) for line in child.stdout.splitlines()])
        if place:
            time.sleep(PAUSE)
    return lines


@pytest.mark.parametrize(
    ("places", "lost"),
    [
        ((), 0),
        # Step 13 has been reported, 10 to 13 are in no checkpoint.
        (("done 13",), 4),
        # 14 is on its way, and nobody has seen it end.
        (("sent 14",), 3),
        (("data 8", "save 10"), 2 + 5),
        # Before a step: nothing more is lost, whatever the attempt was at.
        (("done 6", "import", "start", "restore", "begin", "compile"), 2),
        (("done 7", "done 8", "evaluation", "done 18"), 3 + 4 + 5 + 4),
    ],
)
def test_killed_runs_account_for_all_their_time(tmp_path, process_environment, places, lost):
    began = time.time()
    attempts = run(tmp_path, process_environment, *places)
    wall = time.time() - began

    made = account(tmp_path / "metrics" / "events.jsonl")
    assert made.total == pytest.approx(wall, rel=0.01, abs=0.1)
    first, *_, last = [event.time for event in read_events(tmp_path / "metrics" / "events.jsonl")]
    assert made.total == pytest.approx(last - first, abs=1e-3)

    done = [step for lines in attempts for what, step in lines if what == "done"]
    assert made.lost_steps == lost == len(done) - len(set(done)) and set(done) == set(range(20))
    for bucket in ("restore", "save", "evaluation", "compile"):
        spent = [seconds for lines in attempts for what, seconds in lines if what == bucket]
        assert made.seconds[bucket] == pytest.approx(math.fsum(spent), abs=0.02 * len(spent) + 1e-6), bucket
    # Between attempts, and in what a killed attempt did after its last event.
    assert PAUSE * len(places) - 0.02 <= made.seconds["down"] < (PAUSE + 0.5) * len(places) + 1e-6
    assert attempts[-1][-1][1].startswith(f"Goodput {made.goodput:.1%} of {made.total:.1f} s in ")


def test_lost_time_is_that_of_the_steps_done_again(tmp_path, process_environment):
    run(tmp_path, process_environment, "done 13")
    events = list(read_events(tmp_path / "metrics" / "events.jsonl"))
    last = [event.kind for event in events].index("start", 1)
    again = [event.spent[STEP] for event in events[:last] if event.kind == STEP and event.step >= 10]
    made = account(tmp_path / "metrics" / "events.jsonl")
    assert len(again) == 4
    assert made.seconds["lost"] == pytest.approx(sum(again))
    assert made.seconds["down"] == pytest.approx(events[last].time - events[last - 1].time)


def test_any_moment_is_a_good_one_to_be_killed(tmp_path, process_environment):
    """SIGKILL from outside, at moments nobody chose."""
    began, done, random = time.time(), [], Random(0)
    for num_lines in (4, 9, 14, 7, 11, 2):
        child = subprocess.Popen(
            [sys.executable, "-c", RUN, str(tmp_path), "1000", ""],
            stdout=subprocess.PIPE,
            text=True,
            env=process_environment,
        )
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(num_lines)]
        time.sleep(random.uniform(0, 0.1))
        child.kill()
        rest, _ = child.communicate(timeout=60)
        lines += rest[: rest.rfind("\n") + 1].splitlines()
        done += [json.loads(line)[1] for line in lines if json.loads(line)[0] == "done"]
    path, saved = tmp_path / "metrics" / "events.jsonl", int((tmp_path / "saved").read_text())
    with Goodput(path) as goodput:
        goodput.begin(saved)
        lost, total = goodput.tags()["goodput/lost_steps"], account(path).total
    assert total == pytest.approx(time.time() - began, rel=0.01, abs=0.1)
    # A step may have been written and not yet printed, once an attempt.
    assert 0 <= lost - (len(done) - saved) <= 6
    assert account(path).attempts == 7


def test_each_moment_of_an_attempt_is_in_one_bucket(tmp_path, clock):
    with Goodput(tmp_path / "events.jsonl", 990.0, clock) as goodput:
        clock.now = 1002.0
        with goodput.measure("restore"):
            clock.now = 1005.0
        clock.now = 1006.0
        goodput.begin(7)
        device = FakeSteps(goodput)
        with goodput.measure("data_wait"):
            clock.now = 1006.5
        clock.now = 1016.5
        goodput.add("compile", 9.0)
        device.send()
        # The device has the first step for 2 s, and the second batch takes 3 s.
        with goodput.measure("data_wait"):
            clock.now = 1018.5
            device.end()
            clock.now = 1019.5
        device.send()
        line = goodput.step(7)
        assert (
            line
            == "First step ended 28.5 s after the start (init 13.0 s, compile 9.0 s, restore 3.0 s, data_wait 1.5 s)"
        )
        clock.now = 1021.5
        device.end()
        assert goodput.step(8) is None
        with goodput.measure("evaluation"):
            clock.now = 1025.5
            goodput.add("compile", 1.0)
        with goodput.measure("save"):
            clock.now = 1026.0
    events = list(read_events(tmp_path / "events.jsonl"))
    assert [(event.kind, event.step) for event in events] == [
        ("start", None),
        ("restore", None),
        ("begin", 7),
        ("step", 7),
        ("step", 8),
        ("evaluation", None),
        ("save", None),
        ("end", None),
    ]
    spent = {bucket: seconds for bucket, seconds in account(tmp_path / "events.jsonl").seconds.items() if seconds}
    assert spent == pytest.approx(
        # The step: 1 s before the first dispatch, 2 s and 2 s of the device.
        {"init": 13.0, "restore": 3.0, "compile": 10.0, "data_wait": 1.5, "step": 5.0, "evaluation": 3.0, "save": 0.5}
    )
    assert events[3].spent == pytest.approx({"data_wait": 1.5, "compile": 9.0, "step": 3.0})
    assert not events[-1].finished


def test_a_wait_that_the_devices_do_not_notice_is_none(tmp_path, clock):
    with Goodput(None, 1000.0, clock) as goodput:
        goodput.begin(0)
        device = FakeSteps(goodput)
        device.send()
        for step in range(3):
            with goodput.measure("data_wait"):
                clock.now += 5.0
            device.send()
            clock.now += 1.0
            device.end()
            goodput.step(step)
        assert goodput.tags()["goodput/data_wait_seconds"] == 0
        assert goodput.tags()["goodput/step_seconds"] == 18.0
        device.end()
        goodput.step(3)


def test_tags_are_of_all_attempts(tmp_path, clock):
    path = tmp_path / "events.jsonl"
    for began, first in ((1000.0, 0), (1020.0, 2)):
        clock.now = began + 1.0
        with Goodput(path, began, clock) as goodput:
            goodput.begin(first)
            device = FakeSteps(goodput)
            for step in range(first, first + 4):
                device.send()
                clock.now += 1.0
                device.end()
                goodput.step(step)
            tags = goodput.tags()
            assert tags["goodput/fraction"] == goodput.tags()["goodput/step_seconds"] / (clock.now - 1000.0)
            line = goodput.end(finished=True) if first else None
    assert tags.keys() == {"goodput/fraction", "goodput/lost_steps", *(f"goodput/{name}_seconds" for name in BUCKETS)}
    assert {name: value for name, value in tags.items() if value} == pytest.approx(
        {
            "goodput/fraction": 6 / 25,
            "goodput/step_seconds": 6.0,
            "goodput/init_seconds": 2.0,
            "goodput/lost_seconds": 2.0,
            "goodput/lost_steps": 2,
            "goodput/down_seconds": 15.0,
        }
    )
    assert (
        line == "Goodput 24.0% of 25.0 s in 2 attempts: step 6.0 s, init 2.0 s, lost 2.0 s, down 15.0 s, 2 steps lost"
    )


def test_a_clock_that_was_set_back_loses_nothing(tmp_path, clock):
    path = tmp_path / "events.jsonl"
    Goodput(path, 995.0, clock).end(finished=False)
    clock.now = 500.0
    goodput = Goodput(path, 490.0, clock)
    clock.now = 503.0
    goodput.end(finished=False)
    made = account(path)
    assert (made.total, made.seconds["init"], made.seconds["down"]) == (8.0, 8.0, 0.0)


def test_a_second_run_of_one_process_begins_where_the_first_ended(tmp_path):
    path = tmp_path / "events.jsonl"
    Goodput(path).end(finished=False)
    before = account(path).total
    began = time.monotonic()
    Goodput(path).end(finished=False)
    assert account(path).total - before <= time.monotonic() - began + 0.05


def test_an_error_ends_the_attempt_and_keeps_what_was_measured(tmp_path, clock):
    path = tmp_path / "events.jsonl"
    with pytest.raises(CheckpointError, match="no room"), Goodput(path, 1000.0, clock) as goodput:
        goodput.begin(0)
        with goodput.measure("save"):
            clock.now = 1004.0
            raise CheckpointError("no room")
    assert [event.kind for event in read_events(path)] == ["start", "begin", "end"]
    assert account(path).seconds["save"] == 4.0
    assert not any(thread.name == "step ends" for thread in threading.enumerate())


def test_a_log_that_is_none_is_left_as_it_is(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text('{"step": 0}\n')
    with pytest.raises(CheckpointError, match="line 1 is not an event"):
        Goodput(path)
    assert path.read_text() == '{"step": 0}\n'
