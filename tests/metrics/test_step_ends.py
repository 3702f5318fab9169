import threading
import time

import pytest

from maxlite.metrics.step_ends import StepEnds


@pytest.fixture
def ends():
    made = StepEnds(time.monotonic)
    yield made
    made.close()


def test_the_end_is_noted_when_it_happens_and_not_when_it_is_asked_for(ends):
    began = time.monotonic()
    ends.watch(lambda: time.sleep(0.05))
    time.sleep(0.3)
    span = ends.oldest()
    assert began <= span.began < began + 0.04
    assert 0.05 <= span.ended - span.began < 0.2


def test_the_oldest_comes_first_and_is_waited_for(ends):
    go = threading.Event()
    ends.watch(go.wait)
    ends.watch(lambda: None)
    threading.Timer(0.05, go.set).start()
    first, second = ends.oldest(), ends.oldest()
    assert first.ended - first.began >= 0.05
    assert first.began <= second.began < first.ended <= second.ended


def test_a_step_that_fails_ends_too(ends):
    def fail():
        raise RuntimeError("the device is gone")

    ends.watch(fail)
    ends.watch(lambda: None)
    assert ends.oldest().ended <= ends.oldest().ended


def test_closing_waits_for_the_step_in_flight():
    ended = []
    ends = StepEnds(time.monotonic)
    ends.watch(lambda: (time.sleep(0.05), ended.append(True)))
    ends.close()
    assert ended == [True]
    assert "step ends" not in [thread.name for thread in threading.enumerate()]
    ends.close()
