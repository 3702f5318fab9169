import subprocess
import sys
import time

import pytest

from maxlite.metrics.timeline import Span, Timeline, process_start, unix_time


class FakeClock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return FakeClock()


def test_time_before_it_was_made_counts(clock):
    line = Timeline(90.0, "init", clock)
    clock.now = 101.5
    assert line.settle("step", None) == {"init": 11.5, "step": 0}
    assert line.now == 101.5


def test_each_moment_is_in_one_bucket(clock):
    line = Timeline(100.0, "init", clock)
    for now, bucket in ((101.0, "restore"), (104.0, "init"), (104.5, "step"), (106.0, "save")):
        clock.now = now
        line.switch(bucket)
    clock.now = 110.0
    assert line.settle("step", None) == {"init": 1.5, "restore": 3.0, "step": 1.5, "save": 4.0}
    clock.now = 111.0
    assert line.settle("step", None) == {"save": 1.0, "step": 0}


def test_what_is_known_afterwards_is_taken_from_the_current_piece(clock):
    line = Timeline(100.0, "step", clock)
    clock.now = 110.0
    line.carve("compile", 4.0)
    clock.now = 112.0
    assert line.settle("step", None) == {"step": 8.0, "compile": 4.0}
    clock.now = 113.0
    line.switch("evaluation")
    clock.now = 115.0
    # More than there is: what came before is settled, or was measured.
    line.carve("compile", 60.0)
    clock.now = 116.0
    assert line.settle("step", None) == {"step": 1.0, "compile": 2.0, "evaluation": 1.0}


def test_what_is_claimed_belongs_to_the_claimant(clock):
    line = Timeline(100.0, "step", clock)
    for now, bucket in ((102.0, "data_wait"), (107.0, "step"), (108.0, "data_wait"), (109.0, "step")):
        clock.now = now
        line.switch(bucket)
    clock.now = 110.0
    # From within the first piece to within the second wait: 5 s of the first wait, 0.5 s of the second.
    assert line.settle("step", Span(101.0, 108.5)) == pytest.approx({"step": 4.0 + 5.0 + 0.5, "data_wait": 0.5})


def test_a_clock_that_goes_back_stands_still(clock):
    line = Timeline(100.0, "step", clock)
    clock.now = 105.0
    line.switch("save")
    clock.now = 103.0
    line.switch("step")
    clock.now = 106.0
    assert line.settle("step", None) == {"step": 6.0, "save": 0.0}


def test_unix_time_is_the_time():
    assert unix_time() == pytest.approx(time.time(), abs=1.0)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells when a process began")
def test_a_process_knows_when_it_began(process_environment):
    # A shell starts, is replaced by Python, and that sleeps before it imports anything: all of that is its time.
    code = "import time; time.sleep(0.3); from maxlite.metrics.timeline import process_start; print(process_start())"
    before = time.time()
    child = subprocess.run(
        ["sh", "-c", 'sleep 0.2; exec "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=process_environment,
    )
    assert before - 0.02 <= float(child.stdout) <= before + 0.4
    assert process_start() < before
