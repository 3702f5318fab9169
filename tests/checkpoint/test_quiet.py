import logging
import sys
import types

import pytest

from maxlite.checkpoint import quiet


@pytest.fixture
def reported(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    quiet._hook_reports.cache_clear()
    quiet.quiet_orbax()
    yield seen
    quiet._hook_reports.cache_clear()


def test_only_orbax_is_quiet(reported, caplog):
    record = logging.LogRecord("absl", logging.ERROR, "/lib/orbax/checkpoint/a.py", 1, "of orbax", (), None)
    logging.getLogger("absl").handle(record)
    record = logging.LogRecord("absl", logging.ERROR, "/lib/grain/a.py", 1, "of another", (), None)
    logging.getLogger("absl").handle(record)
    for place in ("orbax/checkpoint", "elsewhere"):
        message = f"Task exception was never retrieved: coro=<f() defined at /lib/{place}/a.py:1>"
        logging.getLogger("asyncio").handle(logging.LogRecord("asyncio", 40, "base_events.py", 1, message, (), None))
    assert [text[-40:] for text in caplog.messages] == ["of another", message[-40:]]


def test_only_closed_loops_go_unreported(reported):
    closed = types.SimpleNamespace(exc_value=RuntimeError("Event loop is closed"))
    other = types.SimpleNamespace(exc_value=RuntimeError("something else"))
    sys.unraisablehook(closed)
    sys.unraisablehook(other)
    assert reported == [other]
