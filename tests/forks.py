"""Starts Python programs as processes in which other people's modules are imported already: most of what a start costs.

A server imports them, and nothing of maxlite, and forks for each program; what a program does, its output and how it
ends are those of a process of its own. What must be seen from the start of an interpreter needs `run_maxlite` of
conftest.py: what is imported when, and variables that Python or jax reads as it is imported.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

MODULES = "typer omegaconf numpy jax optax flax.linen qwix array_record orbax.checkpoint tensorstore tokenizers"
MODULES += " safetensors tensorboardX.summary"

# What the installed `maxlite` does; -P keeps files of the working directory from being imported.
ENTRY_POINT = "import sys; sys.argv[0] = 'maxlite'; from maxlite.launcher.cli import main; sys.exit(main())"


class Ended(NamedTuple):
    """How a process ended, by its exit code or minus the signal, and its two streams."""

    code: int
    stdout: str
    stderr: str


def run_programs(
    code: str,
    arguments: Sequence[Sequence[str]],
    env: Mapping[str, str],
    more_env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    *,
    timeout: float = 240,
) -> list[Ended]:
    """`python -P -c code ARGUMENTS` for each list of arguments, all at once, in `env` and `more_env`.

    Raises:
        TimeoutError: they had not ended in time, and were killed.
    """
    late = [name for name in more_env or {} if name.startswith(("PYTHON", "JAX_"))]
    assert not late, f"{late} are read as modules are imported, which they are here"
    server = _server(tuple(sorted(env.items())))
    with tempfile.TemporaryDirectory() as folder:
        request = {
            "code": code,
            "arguments": [list(words) for words in arguments],
            "env": dict(more_env or {}),
            "cwd": str(cwd or os.getcwd()),
            "folder": folder,
            "timeout": timeout,
        }
        codes = _answer(server, json.dumps(request))
        ended = [
            Ended(code, Path(folder, f"{number}.1").read_text(), Path(folder, f"{number}.2").read_text())
            for number, code in enumerate(codes)
        ]
    if None in codes:
        raise TimeoutError(f"not ended after {timeout} s: {ended}")
    return ended


def fork_maxlite(
    environment: Mapping[str, str],
    arguments: Sequence[str],
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    timeout: float = 240,
) -> Ended:
    """`maxlite ARGUMENTS`, in `environment` and `env`, in programs that are compiled fast rather than well."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    env = {"XLA_FLAGS": " ".join(flags)} | dict(env or {})
    return run_programs(ENTRY_POINT, [arguments], environment, env, cwd, timeout=timeout)[0]


def _answer(server: subprocess.Popen[str], request: str) -> list[int | None]:
    assert server.stdin is not None and server.stdout is not None
    try:
        server.stdin.write(request + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())
    except BaseException:
        # Of a test that was stopped, too: the answer to this must not be taken for that to the next request.
        server.kill()
        _server.cache_clear()
        raise


@functools.cache
def _server(env: tuple[tuple[str, str], ...]) -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-P", __file__], env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    # It ends with its input.
    atexit.register(server.communicate)
    return server


def _serve() -> None:
    """Answers each line, of a request, with the exit codes of its programs; null for those that had to be killed."""
    for name in MODULES.split():
        importlib.import_module(name)
    # Each process imports maxlite anew, and shares what Python makes of its files, which stays out of the checkout.
    sys.dont_write_bytecode, sys.pycache_prefix = False, os.path.join(os.environ["JAX_COMPILATION_CACHE_DIR"], "pyc")
    # Nothing here is garbage: without this, collections in each process would copy all memory.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        pids = []
        for number, arguments in enumerate(request["arguments"]):
            with warnings.catch_warnings():
                # No device has been started, and there are no threads but of pools that wait.
                warnings.simplefilter("ignore")
                pid = os.fork()
            if pid == 0:
                # What it raises is the end of this interpreter too.
                _become(request, number, arguments)
                return
            pids.append(pid)
        print(json.dumps(_wait(pids, request["timeout"])), flush=True)


def _become(request: dict, number: int, arguments: list[str]) -> None:
    """In the forked process: does what a new one would."""
    flags = os.O_WRONLY | os.O_CREAT
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(os.open(os.path.join(request["folder"], f"{number}.{stream}"), flags), stream)
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    sys.argv = ["-c", *arguments]
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    exec(compile(request["code"], "<string>", "exec"), program.__dict__)


def _wait(pids: list[int], seconds: float) -> list[int | None]:
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    _serve()
