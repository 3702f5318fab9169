"""When a run saves and stops: by steps, by the clock, by a signal; the same step in every process."""

import pytest

from maxlite.train import decisions as module
from maxlite.train.decisions import Decisions
from maxlite.train.stop_signal import StopSignal


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "monotonic", clock.monotonic)
    return clock


def build(tiny_config, *overrides: str) -> tuple[Decisions, StopSignal]:
    stop = StopSignal()
    return Decisions(tiny_config(*overrides).checkpoint, stop), stop


def saves(decisions: Decisions, clock: Clock, seconds: float, steps: int) -> list[int]:
    """The steps after which a run saves whose steps take so many seconds."""
    saved = []
    for done in range(1, steps + 1):
        clock.now = seconds * done
        if decisions.save_due(done):
            saved.append(done)
    return saved


def test_steps_and_minutes_each_save(tiny_config, clock):
    decisions, _ = build(tiny_config, "checkpoint_period=5", "checkpoint_period_minutes=2")
    # After 150 s, and every 120 s from the last one by the clock; besides every fifth step.
    assert saves(decisions, clock, 50.0, 12) == [3, 5, 6, 9, 10, 12]


def test_by_minutes_alone(tiny_config, clock):
    decisions, _ = build(tiny_config, "checkpoint_period=0", "checkpoint_period_minutes=0.5")
    assert saves(decisions, clock, 10.0, 9) == [3, 6, 9]


def test_without_either_nothing_is_due(tiny_config, clock):
    decisions, _ = build(tiny_config, "checkpoint_period=0")
    clock.now = 1e9
    assert not any(decisions.save_due(done) for done in range(1, 100))


def test_a_signal_stops_a_lone_process_at_once(tiny_config):
    decisions, stop = build(tiny_config)
    assert not decisions.stop_due(3)
    stop.received = "SIGTERM"
    assert decisions.stop_due(4)


def test_several_processes_stop_and_save_at_one_step(tiny_config, clock, monkeypatch):
    """Two sets of decisions over one board, the second process a step ahead of the first when it is told."""
    board: dict[str, int] = {}

    class Shared:
        def __init__(self, name: str) -> None:
            self.name = name

        def announce(self, what: str, step: int) -> None:
            board.setdefault(what, step)

        def step_of(self, what: str) -> int | None:
            return board.get(what)

    monkeypatch.setattr(module, "Agreement", Shared)
    monkeypatch.setattr(module, "num_processes", lambda: 2)
    (first, signalled), (second, _) = (build(tiny_config, "checkpoint_period_minutes=1") for _ in range(2))
    monkeypatch.setattr(module, "is_primary", lambda: True)
    clock.now = 61.0
    assert not first.save_due(10)
    monkeypatch.setattr(module, "is_primary", lambda: False)
    assert [second.save_due(done) for done in (11, 12, 13)] == [False, True, False]
    assert [first.save_due(done) for done in (11, 12, 13)] == [False, True, False]
    signalled.received = "SIGTERM"
    assert not first.stop_due(20)
    assert [second.stop_due(done) for done in (21, 22)] == [False, True]
    assert [first.stop_due(done) for done in (21, 22)] == [False, True]
