import pytest

from maxlite.metrics.account import Account
from maxlite.metrics.events import BEGIN, END, START, STEP, Event


def attempt(start, first, steps, *, seconds=1.0, init=2.0):
    """An attempt killed after `steps` steps: starts at `start`, and begins with step `first`."""
    began = start + init
    yield Event(START, start)
    yield Event(BEGIN, began, {"init": init}, step=first)
    for done in range(steps):
        yield Event(STEP, began + seconds * (done + 1), {"step": seconds}, step=first + done)


def account(*attempts):
    made = Account()
    for events in attempts:
        for event in events:
            made.take(event)
    return made


def spent(made):
    return {bucket: seconds for bucket, seconds in made.seconds.items() if seconds}


def test_nothing_is_nothing():
    assert (Account().total, Account().goodput, Account().attempts) == (0, 0, 0)


def test_one_attempt():
    made = account(attempt(100.0, 0, 6))
    assert spent(made) == {"init": 2, "step": 6}
    assert (made.goodput, made.attempts, made.lost_steps) == (6 / 8, 1, 0)


def test_steps_done_again_are_lost_with_their_own_time():
    # 10 steps of 1 s, of which 7 are in a checkpoint; 5 s later 7 steps of 0.5 s.
    made = account(attempt(100.0, 0, 10), attempt(117.0, 7, 7, seconds=0.5))
    assert spent(made) == {"init": 4, "step": 7 + 3.5, "lost": 3, "down": 5}
    assert made.lost_steps == 3
    assert made.total == 122.5 - 100.0
    assert made.spent["step"] == 3.5 and made.spent["lost"] == 0


def test_a_step_is_lost_once_for_each_time_that_it_was_done():
    made = account(attempt(0.0, 0, 8), attempt(20.0, 5, 2), attempt(30.0, 5, 4), attempt(50.0, 9, 1))
    # 5, 6, 7 of the first, 5 and 6 of the second; what the third did counts.
    assert made.lost_steps == 5
    assert spent(made) == {"init": 8, "step": 10, "lost": 5, "down": 10 + 6 + 14}
    assert made.total == 53.0


def test_an_attempt_killed_before_its_steps_is_time_down():
    made = account(attempt(0.0, 0, 8), [Event(START, 20.0)], attempt(30.0, 8, 2))
    assert spent(made) == {"init": 4, "step": 10, "down": 20}
    assert made.attempts == 3


@pytest.mark.parametrize(("finished", "down"), [(False, 1000), (True, 0)])
def test_the_time_after_a_run_that_had_finished_is_nobodys(finished, down):
    made = account(attempt(0.0, 0, 8), [Event(END, 11.0, {"save": 1.0}, finished=finished)], attempt(1011.0, 8, 1))
    assert made.seconds["down"] == down
    assert made.total == down + 11 + 3
    assert made.lost_steps == 0


def test_steps_that_no_event_told_of_are_not_lost():
    made = account(attempt(0.0, 5, 2), attempt(10.0, 9, 2), attempt(20.0, 6, 1))
    assert made.lost_steps == 3
    assert made.seconds["lost"] == 3


def test_a_step_done_again_without_a_beginning_counts_once():
    made = account(attempt(0.0, 0, 4), [Event(STEP, 7.0, {"step": 1.0}, step=2)])
    assert (made.lost_steps, made.seconds["step"], made.seconds["lost"]) == (2, 3, 2)
