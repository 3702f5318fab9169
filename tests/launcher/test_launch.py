import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from maxlite.errors import ConfigError
from maxlite.launcher.launch import parse_launch

CONFIG = ["config", "base.yml"]


@pytest.mark.parametrize(
    "arguments, parsed",
    [
        (["local", "processes=2", "--", "train", "base.yml", "steps=1"], (2, ["train", "base.yml", "steps=1"])),
        (["local", "processes=1", "--", "eval", "--", "--json"], (1, ["eval", "--", "--json"])),
    ],
)
def test_what_is_run(arguments, parsed):
    assert parse_launch(arguments) == parsed


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "on this machine only"),
        (["slurm", "processes=2", "--", "train"], "docs/multihost.md"),
        (["local", "--", "train"], "processes= from 1 to"),
        (["local", "processes=0", "--", "train"], "processes=0"),
        (["local", "processes=9999", "--", "train"], "processes=9999"),
        (["local", "processes=2", "steps=1", "--", "train"], "steps=1"),
        (["local", "processes=2", "train", "base.yml"], "processes="),
        (["local", "processes=2"], "after --"),
        (["local", "processes=2", "--"], "after --"),
    ],
)
def test_what_cannot_be_run(arguments, words):
    with pytest.raises(ConfigError) as error:
        parse_launch(arguments)
    assert words in str(error.value)
    assert "maxlite launch local processes=2 -- train base.yml" in str(error.value)


@pytest.fixture
def run_launch(process_environment):
    """run_launch(code, n): starts a launch of n processes of `code`, which knows its `number`."""
    started = []
    # With it Python writes a line in pieces, between which another process may write.
    environment = {name: value for name, value in process_environment.items() if name != "PYTHONUNBUFFERED"}

    def start(code, num_processes, grace=10.0):
        entry = f"import os, signal, sys, time; number = int(os.environ['MAXLITE_PROCESS_ID']); {code}"
        program = (
            "import sys; from maxlite.launcher import launch\n"
            f"launch._ENTRY_POINT = {entry!r}\n"
            f"launch._GRACE_SECONDS = {grace}\n"
            f"sys.exit(launch.launch_local({num_processes}, ['train']))"
        )
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def test_each_is_told_its_place_and_its_command(run_launch):
    code = (
        "names = ('MAXLITE_NUM_PROCESSES', 'MAXLITE_COORDINATOR_ADDRESS');"
        "print(sys.argv[1:], [os.environ[name] for name in names], flush=True);"
        "print('e', number, file=sys.stderr)"
    )
    out, err = run_launch(code, 3).communicate(timeout=30)
    lines = out.splitlines()
    (first,) = (line for line in lines if line.startswith("['"))
    assert first.startswith("['train'] ['3', '127.0.0.1:")
    assert sorted(lines) == sorted([first, f"[1] {first}", f"[2] {first}"])
    assert sorted(err.splitlines()) == ["[1] e 1", "[2] e 2", "e 0"]


@pytest.mark.parametrize(
    "code, exit_code",
    [
        ("0", 0),
        ("sys.exit(6 if number == 1 else 0)", 6),
        ("time.sleep(0.5 * number); sys.exit([8, 3][number])", 8),
        ("time.sleep(0.5 - 0.5 * number); sys.exit([8, 3][number])", 3),
        ("os.kill(os.getpid(), signal.SIGKILL) if number == 0 else sys.exit(0)", 137),
        # The one that was killed is what happened, though the other follows as soon as the pipe is closed.
        (
            "pipe = open(PIPE, 'w' if number else 'r');"
            "os.kill(os.getpid(), signal.SIGKILL) if number else sys.exit(8 + len(pipe.read()))",
            137,
        ),
    ],
)
def test_the_exit_code_is_that_of_the_first_that_failed(run_launch, tmp_path, code, exit_code):
    os.mkfifo(tmp_path / "pipe")
    process = run_launch(code.replace("PIPE", repr(str(tmp_path / "pipe"))), 2)
    process.communicate(timeout=30)
    assert process.returncode == exit_code


@pytest.mark.parametrize("stubborn", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN);"])
def test_those_that_stay_are_ended(run_launch, stubborn):
    started = time.monotonic()
    process = run_launch(f"{stubborn} sys.exit(5) if number == 1 else time.sleep(60)", 2, grace=0.5)
    process.communicate(timeout=30)
    assert process.returncode == 5
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_passed_on_as_sigterm(run_launch, number):
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); print('ready', flush=True); time.sleep(60)"
    process = run_launch(code, 2)
    assert sorted([process.stdout.readline(), process.stdout.readline()]) == ["[1] ready\n", "ready\n"]
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 75


def test_a_real_command_and_its_error(run_maxlite):
    result = run_maxlite(["launch", "local", "processes=2", "--", *CONFIG, "stepz=1"])
    assert result.code == 2
    first, second = sorted(result.stderr.splitlines(), reverse=True)
    assert first.startswith("error: command line: unknown key stepz")
    assert second == f"[1] {first}"
    bad = run_maxlite(["launch", "local", "processes=two", "--", *CONFIG])
    assert (bad.code, bad.stderr.count("\n")) == (2, 1)
    assert "processes=two" in bad.stderr
