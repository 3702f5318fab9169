import io
import os
import pty
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from maxlite.metrics.progress import Progress

LONG = "completed step: 0, [bold]not markup[/bold], " + 200 * "x"


def drive(progress):
    with progress:
        progress.line(LONG)
        for step in range(4):
            progress.update(step, 2.5, 1234.0, 0.125)
        progress.line("after")


def test_not_a_terminal_has_lines_only():
    file = io.StringIO()
    drive(Progress(4, 0, Console(file=file)))

    assert file.getvalue() == f"{LONG}\nafter\n"


def test_not_a_terminal_even_if_colour_is_forced(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    drive(Progress(4, 0))

    assert capsys.readouterr().out == f"{LONG}\nafter\n"


def test_terminal_has_a_bar_and_lines_above_it(monkeypatch):
    monkeypatch.setattr("maxlite.metrics.progress._SECONDS_BETWEEN_DRAWINGS", 0.0)
    threads = threading.active_count()
    file = io.StringIO()
    with Progress(4, 1, Console(file=file, force_terminal=True, width=100)) as progress:
        progress.update(1, 2.5, 1234.0, 0.125)
        progress.line(LONG)
        progress.update(2, 2.25, None, None)
        assert threading.active_count() == threads

    text = file.getvalue()
    assert "\x1b[" in text
    assert LONG in text.replace("\r", "")
    assert "2/4" in text and "loss 2.500 | 1,234 tokens/s | MFU 12.5%" in text
    assert "3/4" in text and "loss 2.250 " in text


@pytest.mark.parametrize("on_terminal", [True, False])
def test_standard_output_decides(on_terminal):
    code = (
        "from maxlite.metrics.progress import Progress\n"
        "with Progress(4, 0) as progress:\n"
        "    progress.update(0, 2.5, 10.0, None)\n"
        "    progress.line('a line')\n"
    )
    environment = {**os.environ, "TERM": "xterm", "FORCE_COLOR": "" if on_terminal else "1"}
    ours, theirs = pty.openpty() if on_terminal else os.pipe()
    subprocess.run([sys.executable, "-c", code], stdout=theirs, env=environment, check=True)
    os.close(theirs)
    output = b""
    # A pseudo-terminal whose other end is closed answers with an error, not with an empty read.
    while chunk := _read(ours):
        output += chunk
    os.close(ours)

    assert (b"\x1b[" in output) is on_terminal
    assert (b"loss 2.500" in output) is on_terminal
    assert b"a line" in output


def _read(descriptor):
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""
