"""Attempts at one run that are killed, and what each must have left for the next."""

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SERVER = Path(__file__).with_name("fork_server.py")
KILLED = -9
KEPT = 2
# An attempt that lives to say how many operations on files it made.
COUNT_EVENTS = {"killed": 0, "at_event": 10**9}


@contextlib.contextmanager
def serving(environment: dict[str, str], *before: str) -> Iterator[subprocess.Popen[str]]:
    """A fork server; before: a program and its arguments that ends by starting it."""
    environment = environment | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command, pipe = [*before, sys.executable, "-P", str(SERVER)], subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0


class Ended(NamedTuple):
    """How an attempt ended: the exit code and the output of each process; those that had to be ended."""

    codes: list[int]
    lingered: list[int]
    seconds: float
    outputs: list[str]

    @property
    def said(self) -> list[dict[str, Any]]:
        """The JSON lines of process 0; a line cut off by the kill is left out."""
        lines = [line for line in self.outputs[0].splitlines(keepends=True) if line.startswith("{")]
        return [json.loads(line) for line in lines if line.endswith("}\n")]

    def all(self, what: str) -> list[Any]:
        return [said[what] for said in self.said if what in said]


class Attempts:
    """Starts attempts at the run `folder`/run, each of so many processes.

    outputs: a folder for what they print; `folder` by default. environment: for all of them.
    """

    def __init__(
        self,
        server: subprocess.Popen[str],
        folder: Path,
        processes: int = 1,
        outputs: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.server, self.folder, self.processes = server, folder, processes
        self.run, self.outputs = f"{folder}/run", outputs or folder
        self.environment = environment or {}
        self.outputs.mkdir(exist_ok=True)

    def start(self, task: str, arguments: dict[str, Any], **kill: Any) -> Ended:
        outputs = [self.outputs / f"output_{process}" for process in range(self.processes)]
        for output in outputs:
            output.unlink(missing_ok=True)
        request = {"task": task, "arguments": arguments, "folder": self.run, **kill}
        request |= {"outputs": [str(output) for output in outputs], "environments": self._environments()}
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        answer = json.loads(self.server.stdout.readline())
        return Ended(**answer, outputs=[output.read_text() for output in outputs])

    def save(self, last: int, *overrides: str, **kill: Any) -> Ended:
        fixed = [f"max_num_checkpoints_to_keep={KEPT}", f"cpu_devices={8 // self.processes}"]
        arguments = {"run": self.run, "last": last, "overrides": [*fixed, *overrides]}
        if hazard := kill.pop("hazard", ""):
            arguments["hazard"] = hazard
        return self.start("save_steps", arguments, **kill)

    def listing(self) -> list[str]:
        """The entries of the checkpoints' folder: a number is a whole step, and another name begins with its number."""
        # The server may see another file system at that place.
        folder = Path(f"/proc/{self.server.pid}/root{self.run}/checkpoints")
        names = os.listdir(folder) if folder.is_dir() else []
        # By the probe a save finds out whether it may write here; the next save takes away what a kill left of it.
        return sorted(name for name in names if name != ".probe")

    def _environments(self) -> list[dict[str, str]]:
        if self.processes == 1:
            return [self.environment]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        shared = self.environment | {
            "MAXLITE_COORDINATOR_ADDRESS": address,
            "MAXLITE_NUM_PROCESSES": str(self.processes),
        }
        return [shared | {"MAXLITE_PROCESS_ID": str(process)} for process in range(self.processes)]


class Chain:
    """What is known of a run after some attempts, and what the next must agree with."""

    def __init__(self, attempts: Attempts) -> None:
        self.attempts = attempts
        self.durable = self.announced = self.skips = self.kills = 0

    def attempt(self, steps: int, **kill: Any) -> Ended:
        """Goes on for so many steps after the newest that was begun, and checks what the attempt found and did."""
        left = self.attempts.listing()
        ended = self.attempts.save(self.announced + steps, **kill)
        self.kills += KILLED in ended.codes
        if ended.all("latest"):
            self._check(ended, left, f"before {left}, after {self.attempts.listing()}, {kill}\n{ended}")
        return ended

    def _check(self, ended: Ended, left: list[str], detail: str) -> None:
        latest, skipped = ended.all("latest")[0] or 0, ended.all("skipped")[0]
        unfinished = [name for name in left if not name.isdecimal()]
        # Nothing that was said to be on disk is lost, and nothing half-written is taken for a step.
        assert self.durable <= latest <= self.announced, detail
        assert latest == max((int(name) for name in left if name.isdecimal()), default=0), detail
        # What is skipped is named.
        newer = [number for name in unfinished if (number := int(name.partition(".")[0])) > latest]
        assert len(skipped) == len(newer), detail
        assert all(re.match(rf"{number}\b.*never finished", line) for number, line in zip(newer, skipped, strict=True))
        # Its values are right, and the step that was being saved is saved again.
        begun = ended.all("saving")
        if begun and latest:
            assert ended.all("restored") == [latest], detail
        assert begun == list(range(latest + 1, latest + 1 + len(begun))), detail
        # A new step takes the place of an old one only when it is whole.
        for said in ended.said:
            if "saved" in said:
                kept = {str(step) for step in range(max(said["saved"] - KEPT, 0) + 1, said["saved"] + 1)}
                assert kept <= set(said["listed"]), detail
        self.skips += len(newer)
        self.durable = max([self.durable, *ended.all("saved")])
        self.announced = max([self.announced, *begun])


def kills(whole: Ended, count: int, processes: int, seed: int) -> Iterator[dict[str, Any]]:
    """Places of kills, spread over an attempt: by turns before an operation on a file, and at a time.

    whole: an attempt that ended; its `events` are those of process 0.
    """
    (events,), (seconds,) = whole.all("events"), whole.all("seconds")
    choose = random.Random(seed)
    for number in range(count):
        share = (number // 2 + choose.random()) / ((count + 1) // 2)
        if number % 2:
            yield {"killed": 0, "at_event": 1 + int(share * events)}
        else:
            yield {"killed": choose.randrange(processes), "at_second": share * seconds, "after": '{"latest"'}
