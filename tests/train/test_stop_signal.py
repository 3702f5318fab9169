import os
import signal

import pytest

from maxlite.train.stop_signal import StopSignal


def test_the_first_signal_is_noted_and_more_of_them_change_nothing():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert stop.received is None
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_interrupt_does_not_wait():
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
