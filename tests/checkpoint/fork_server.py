"""A program that imports jax and maxlite once and forks for every attempt at a run, so that one costs a second.

It reads one JSON object a line (see `Request`) and answers with one when all processes of the attempt have ended.
jax may be imported before a fork, but must not have started its devices.
"""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxlite.checkpoint.manager import Checkpointer
from maxlite.checkpoint.place import place_of
from maxlite.config.load import load_config
from maxlite.errors import MaxliteError
from maxlite.launcher import sample
from maxlite.launcher.cli import main
from maxlite.parallel.devices import prepare_jax
from maxlite.processes.bell import is_hung, leave_for

_POLL_SECONDS = 0.002
_LIMIT_SECONDS = 120.0
_FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "os.truncate"}


class Request(NamedTuple):
    """One attempt.

    task, arguments: a function of this file. outputs, environments: one for each process. killed: process to be
    killed. at_event: before its so-many-th operation on a file below `folder`; at_second: so long after `after` was
    in its output. grace: seconds that the others then have to end by themselves.
    """

    task: str
    arguments: dict[str, Any]
    outputs: list[str]
    environments: list[dict[str, str]]
    folder: str
    killed: int = -1
    at_event: int | None = None
    at_second: float | None = None
    after: str = ""
    grace: float = 20.0


def serve() -> None:
    """Answers requests until its input ends."""
    warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
    for line in sys.stdin:
        request = Request(**json.loads(line))
        began = time.monotonic()
        pids = []
        for process in range(len(request.outputs)):
            pid = os.fork()
            if pid == 0:
                _attempt(request, process)
            pids.append(pid)
        codes, lingered = _wait(request, pids, began)
        print(json.dumps({"codes": codes, "lingered": lingered, "seconds": time.monotonic() - began}), flush=True)


def _wait(request: Request, pids: list[int], began: float) -> tuple[list[int], list[int]]:
    """Exit codes of all, negative for a signal, and the processes that had to be ended after one was killed."""
    codes: dict[int, int] = {}
    lingered: list[int] = []
    first_end = seen = None
    while len(codes) < len(pids):
        for process, pid in enumerate(pids):
            if process not in codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[process] = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        first_end = first_end or (now if codes else None)
        alive = [process for process in range(len(pids)) if process not in codes]
        if request.at_second is not None and request.killed in alive:
            seen = seen or (now if request.after in _read(request.outputs[0]) else None)
            if seen is not None and now - seen >= request.at_second:
                os.kill(pids[request.killed], signal.SIGKILL)
        if alive and ((first_end and now - first_end > request.grace) or now - began > _LIMIT_SECONDS):
            lingered = lingered or alive
            for process in alive:
                os.kill(pids[process], signal.SIGKILL)
        time.sleep(_POLL_SECONDS)
    return [codes[process] for process in range(len(pids))], lingered


def _read(path: str) -> str:
    return Path(path).read_text() if os.path.exists(path) else ""


def _attempt(request: Request, process: int) -> None:
    """The forked process: ends the interpreter as a process of its own would."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(request.outputs[process], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(request.environments[process])
    if process == request.killed and request.at_event is not None:
        _die_at(request.at_event, request.folder)
    sys.exit(TASKS[request.task](**request.arguments))


def _die_at(number: int, folder: str) -> None:
    """Who lives to the end says how many operations there were."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in _FILE_EVENTS:
            return
        path = arguments[0]
        # What is relative is an entry of an open folder, as rmtree removes them.
        if isinstance(path, str) and (path.startswith(folder) or (not path.startswith("/") and event != "open")):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    atexit.register(lambda: _say(events=count))
    sys.addaudithook(hook)


def save_steps(run: str, last: int, overrides: list[str], hazard: str = "") -> int:
    """Restores the newest step, checks all of its values, and saves the following ones until `last`.

    Says what it did, a JSON object a line.

    hazard: `full` fills the file system during the last save; `read_only` makes it so before that.
    """
    try:
        _save_steps(run, last, overrides, hazard)
    except MaxliteError as error:
        _say(error=str(error))
        if is_hung():
            leave_for(error)
        return error.exit_code
    return 0


def _save_steps(run: str, last: int, overrides: list[str], hazard: str) -> None:
    config = load_config("base.yml", overrides)
    prepare_jax(config)
    abstract = _abstract(jax.sharding.Mesh(np.array(jax.devices()), ("fsdp",)))
    with contextlib.closing(Checkpointer(place_of(run), config.checkpoint)) as checkpointer:
        latest, skipped = checkpointer.latest_step(), checkpointer.skipped_steps
        began = time.monotonic()
        _say(latest=latest, skipped=skipped)
        if latest is not None:
            restored, data_state = checkpointer.restore(latest, abstract)
            assert data_state == {"step": latest}, data_state
            _check(restored, latest)
            _say(restored=latest)
        build = jax.jit(_state, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract))
        for step in range((latest or 0) + 1, last + 1):
            if step == last and hazard == "read_only":
                checkpointer.wait()
                subprocess.run(["mount", "-o", "remount,ro", str(Path(run).parent)], check=True)
            _say(saving=step)
            # The save before this one is waited for.
            checkpointer.save(step, build(step), {"step": step})
            if step > (latest or 0) + 1:
                _say(saved=step - 1, listed=_listed(run))
            if step == last and hazard == "full":
                _fill(Path(run).parent / "ballast")
    _say(saved=last, listed=_listed(run), seconds=time.monotonic() - began)


def _fill(path: Path) -> None:
    """Writes a file until there is no room for another byte."""
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 20)) or file.write(bytes(1))


def execute(command: list[str]) -> None:
    """Runs a program in this program's mount namespace."""
    subprocess.run(command, check=True)


def command(arguments: list[str]) -> None:
    """Does what the command `maxlite ARGUMENTS` does, but for the sample at the end of a training."""
    sample.print_sample = lambda config, result: None
    sys.argv = ["maxlite", *arguments]
    main()


TASKS: dict[str, Callable[..., int | None]] = {"save_steps": save_steps, "command": command, "execute": execute}


def _state(step: Any) -> dict[str, Any]:
    """A state whose every value depends on the step and on its place; 5 MB."""
    return {
        "step": jnp.int32(step),
        "params": {
            "embedding": step * 1000.0 + jnp.arange(512 * 1024, dtype=jnp.float32).reshape(512, 1024),
            "norm": jnp.full((64,), step, jnp.bfloat16),
        },
        "opt_state": {"mu": jnp.arange(1024 * 512, dtype=jnp.uint32).reshape(1024, 512) * jnp.uint32(step)},
    }


def _abstract(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    def one(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec("fsdp") if leaf.ndim == 2 else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(one, jax.eval_shape(_state, 1))


def _check(state: dict[str, Any], step: int) -> None:
    embedding = np.float32(step * 1000) + np.arange(512 * 1024, dtype=np.float32).reshape(512, 1024)
    mu = np.arange(1024 * 512, dtype=np.uint32).reshape(1024, 512) * np.uint32(step)
    expected = {"step": np.int32(step), "params": {"embedding": embedding, "norm": np.full((64,), step)}}
    expected["opt_state"] = {"mu": mu}
    for found, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        for shard in found.addressable_shards:
            assert np.array_equal(np.asarray(shard.data).astype(wanted.dtype), wanted[shard.index])


def _listed(run: str) -> list[str]:
    return sorted(entry.name for entry in (place_of(run) / "checkpoints").iterdir())


def _say(**said: Any) -> None:
    os.write(2, (json.dumps(said) + "\n").encode())


if __name__ == "__main__":
    serve()
