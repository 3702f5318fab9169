"""What the processes of a run do together, over jax's key-value store; a run of one process just calls.

jax has no public door to its key-value store and barriers, which need no devices and no compiled program, so
this file, and no other, takes the client from `jax._src.distributed`.
"""

import collections
import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax._src import distributed

from maxlite.errors import ConfigError, DistributedError, MaxliteError

T = TypeVar("T")
# jax wants a limit. A process that is lost ends the others long before; one that hangs is the watchdog's.
_NEVER_MS = 7 * 24 * 3600 * 1000
_counts: collections.Counter[str] = collections.Counter()
_counts_lock = threading.Lock()


def process_index() -> int:
    """Returns the number of this process, from 0; starts no backend."""
    return distributed.global_state.process_id if is_joined() else 0


def num_processes() -> int:
    """Returns the number of processes of the run; starts no backend."""
    return distributed.global_state.num_processes if is_joined() else 1


def is_primary() -> bool:
    """Says whether this is process 0, which alone prints the log and writes what there is one of."""
    return process_index() == 0


def require_one_process(command: str) -> None:
    """Raises ConfigError where several processes have joined for a command that one does alone."""
    if num_processes() > 1:
        raise ConfigError(
            f"{command} runs in one process, and {num_processes()} were started; leave `launch`, srun or mpirun away."
        )


def is_joined() -> bool:
    """Says whether this process is one of several that have found each other."""
    return jax.distributed.is_initialized()


def on_primary(name: str, function: Callable[[], T]) -> T:
    """Returns what `function` returned on process 0, which alone calls it.

    The result goes through JSON, on one process too. `name` says what is done; it may be used again, in the same
    order on all processes.

    Raises:
        MaxliteError: what `function` raised, the same on all processes.
        DistributedError: on the others, where it raised something else.
    """
    if num_processes() == 1:
        return json.loads(json.dumps(function()))
    key = _next_key(name)
    if is_primary():
        try:
            text = json.dumps({"result": function()})
        except Exception as error:
            _set(key, _as_json(error, 0, name))
            raise
        _set(key, text)
    else:
        text = _client().blocking_key_value_get(key, _NEVER_MS)
    answer = json.loads(text)
    if "error" in answer:
        raise _from_json(answer)
    return answer["result"]


def together(name: str, function: Callable[[], T]) -> T:
    """Returns this process's own result of `function`, which all call, once it has ended on all of them.

    Raises:
        MaxliteError: where any of them raised one: that of the lowest process, on all.
    """
    if num_processes() == 1:
        return function()
    key = _next_key(name)
    failure, result = None, None
    try:
        result = function()
    except Exception as error:
        failure = error
        _set(f"{key}/{process_index():08d}", _as_json(error, process_index(), name))
    _barrier(key)
    failed = sorted(_client().key_value_dir_get(f"{key}/"))
    if failure is not None and not isinstance(failure, MaxliteError):
        raise failure
    if failed:
        raise _from_json(json.loads(failed[0][1])) from failure
    return result  # type: ignore[return-value]


def exchange(name: str, text: str) -> list[str]:
    """Returns the texts of all processes, in their order."""
    if num_processes() == 1:
        return [text]
    key = _next_key(name)
    _set(f"{key}/{process_index():08d}", text)
    _barrier(key)
    return [value for _, value in sorted(_client().key_value_dir_get(f"{key}/"))]


def wait_for_all(name: str) -> None:
    """Returns once all processes have come here."""
    if num_processes() > 1:
        _barrier(_next_key(name))


class Agreement:
    """Steps at which all processes do a thing together, such as to stop.

    One process announces a step; the others learn of it before they come there, if the step is further ahead than
    processes run ahead of each other. Training steps wait for each other, so that a few are enough.
    """

    def __init__(self, name: str) -> None:
        """Begins anew: what was announced under `name` before, in this process, is forgotten."""
        self._alone: dict[str, int] = {}
        self._key = _next_key(f"agreement/{name}") if num_processes() > 1 else ""

    def announce(self, what: str, step: int) -> None:
        """Says that `what` is to be done after `step`; the first who says so wins."""
        if not self._key:
            self._alone.setdefault(what, step)
            return
        try:
            _client().key_value_set(f"{self._key}/{what}", str(step))
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise DistributedError(f"{what} could not be announced: {error}") from error

    def step_of(self, what: str) -> int | None:
        """Returns the step that was announced for `what`; asks process 0, which takes about a third of a ms."""
        if not self._key:
            return self._alone.get(what)
        found = dict(_client().key_value_dir_get(f"{self._key}/"))
        step = found.get(f"{self._key}/{what}")
        return None if step is None else int(step)


def _client() -> Any:
    assert distributed.global_state.client is not None
    return distributed.global_state.client


def _next_key(name: str) -> str:
    """A key of the store for this use of `name`: keys can be set once, and barriers be passed once."""
    with _counts_lock:
        _counts[name] += 1
        return f"maxlite/{name}/{_counts[name]}"


def _set(key: str, text: str) -> None:
    _client().key_value_set(key, text)


def _barrier(key: str) -> None:
    try:
        _client().wait_at_barrier(key, _NEVER_MS)
    except jax.errors.JaxRuntimeError as error:
        raise DistributedError(f"The processes did not all come to {key}: {error}") from error


def _as_json(error: Exception, process: int, name: str) -> str:
    known = isinstance(error, MaxliteError)
    message = str(error) if known else f"process {process} failed at {name}: {type(error).__name__}: {error}"
    return json.dumps({"error": type(error).__name__ if known else "DistributedError", "message": message})


def _from_json(answer: dict[str, str]) -> MaxliteError:
    kinds: list[type[MaxliteError]] = [MaxliteError]
    for kind in kinds:
        if kind.__name__ == answer["error"]:
            return kind(answer["message"])
        kinds.extend(kind.__subclasses__())
    raise AssertionError(f"no such error: {answer['error']}")
