"""`maxlite launch local`: the processes of one run, started on this machine."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from typing import IO, TextIO

from maxlite.errors import ConfigError

_USAGE = "maxlite launch local processes=2 -- train base.yml steps=100"
_MOST_PROCESSES = 1024
# The processes of a run end together by themselves. One that does not is asked to, and then made to.
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What the installed `maxlite` does, in this Python; -P keeps files of the working directory from being imported.
_ENTRY_POINT = "import sys; sys.argv[0] = 'maxlite'; from maxlite.launcher.cli import main; sys.exit(main())"


def parse_launch(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Returns the number of processes and the command that each runs.

    arguments: all that stands after `launch`.

    Raises:
        ConfigError: there is no command, or no sound number of processes.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, command = arguments[:end], list(arguments[end + 1 :])
    shown = f"launch {' '.join(own)}"
    if own[:1] != ["local"]:
        raise ConfigError(
            f"{shown}: processes are started on this machine only, `{_USAGE}`; docs/multihost.md shows how clusters "
            "start them."
        )
    sound = re.fullmatch(r"processes=([0-9]{1,6})", own[1]) if len(own) == 2 else None
    if sound is None or not 1 <= int(sound[1]) <= _MOST_PROCESSES:
        raise ConfigError(f"{shown}: give processes= from 1 to {_MOST_PROCESSES}, as in `{_USAGE}`.")
    if not command:
        raise ConfigError(f"{shown}: give a command of maxlite after --, as in `{_USAGE}`.")
    return int(sound[1]), command


def launch_local(num_processes: int, command: Sequence[str]) -> int:
    """Runs `maxlite COMMAND` in `num_processes` processes that find each other; returns the exit code.

    That is 0, or the code of the first that failed; 128 and the signal's number where one was killed. SIGTERM,
    SIGHUP and Ctrl-C are passed on as SIGTERM, so that a training run saves.
    """
    return _Launch(num_processes, command).run()


class _Launch:
    def __init__(self, num_processes: int, command: Sequence[str]) -> None:
        self._command = [sys.executable, "-P", "-c", _ENTRY_POINT, *command]
        self._num_processes = num_processes
        self._children: list[subprocess.Popen[bytes]] = []
        self._copiers: list[threading.Thread] = []
        self._writing = threading.Lock()

    def run(self) -> int:
        earlier = {number: signal.signal(number, self._pass_on) for number in _SIGNALS}
        try:
            address = f"127.0.0.1:{_free_port()}"
            for number in range(self._num_processes):
                self._start(number, address)
            code = self._wait()
            for copier in self._copiers:
                copier.join(_GRACE_SECONDS)
            return code
        finally:
            self._end_all()
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def _start(self, number: int, address: str) -> None:
        place = {
            "MAXLITE_COORDINATOR_ADDRESS": address,
            "MAXLITE_NUM_PROCESSES": str(self._num_processes),
            "MAXLITE_PROCESS_ID": str(number),
        }
        # Process 0 writes to this terminal itself, because of its progress bar.
        pipe = None if number == 0 else subprocess.PIPE
        child = subprocess.Popen(
            self._command,
            env=os.environ | place,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            # In a session of its own, because Ctrl-C is to come from here, once.
            start_new_session=True,
        )
        self._children.append(child)
        for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
            if source is not None:
                self._copiers.append(threading.Thread(target=self._copy, args=(number, source, target), daemon=True))
                self._copiers[-1].start()

    def _copy(self, number: int, source: IO[bytes], target: TextIO) -> None:
        for line in source:
            with self._writing:
                print(f"[{number}] {line.decode(errors='replace').rstrip()}", file=target, flush=True)

    def _wait(self) -> int:
        """Waits until all have ended; those that outlive a failed one for long are ended."""
        code, failed_at = 0, 0.0
        while running := [child for child in self._children if child.poll() is None]:
            code = code or self._failed_code()
            failed_at = failed_at or (time.monotonic() if code else 0.0)
            if failed_at and time.monotonic() - failed_at > _GRACE_SECONDS:
                _end(running)
            time.sleep(_POLL_SECONDS)
        return code or self._failed_code()

    def _failed_code(self) -> int:
        """The exit code of a process that has failed: before others one that was killed, which the others follow."""
        code = min((child.returncode for child in self._children if child.returncode), default=0)
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, frame: types.FrameType | None) -> None:
        del number, frame
        _send(self._children, signal.SIGTERM)

    def _end_all(self) -> None:
        _end([child for child in self._children if child.poll() is None])


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    _send(children, signal.SIGTERM)
    ends = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < ends and any(child.poll() is None for child in children):
        time.sleep(_POLL_SECONDS)
    _send(children, signal.SIGKILL)
    for child in children:
        child.wait()


def _send(children: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(number)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
