"""How the processes of a run end together: who fails tells the others, and who is killed is missed at once.

Each keeps the connection that it made to process 0 at the start. jax's own way is to wait in a collective
until 100 s without a heartbeat are over, and to end by SIGABRT.
"""

import atexit
import os
import selectors
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from maxlite.errors import DistributedError, MaxliteError
from maxlite.processes.channel import Channel

# So long process 0 stays after the end was rung, because jax ends those that miss it, with words of its own.
_LINGER_SECONDS = 1.0
# Processes of one machine are lost one after the other.
_GATHER_SECONDS = 0.2
_NEWS_SECONDS = 1.0
_INTERRUPTED = 130
_bells: list["_Bell"] = []


class _Bell:
    """A thread that listens on all connections of this process."""

    def __init__(self, process_id: int, channels: dict[int, Channel]) -> None:
        self._process_id, self._channels = process_id, channels
        self._left: set[int] = set()
        self._ending = threading.RLock()
        self._selector = selectors.DefaultSelector()
        for number, channel in channels.items():
            self._selector.register(channel, selectors.EVENT_READ, number)
        threading.Thread(target=self._listen, name="maxlite-bell", daemon=True).start()
        atexit.register(self._say_bye)

    def ring(self, code: int, message: str, error: BaseException | None = None) -> NoReturn:
        """Ends this process for a reason of its own, and tells the others; prints the trace of `error`."""
        self._begin_end()
        if error is not None:
            traceback.print_exception(error)
        self._end({"process": self._process_id, "code": code, "message": message}, f"error: {message}")

    def _listen(self) -> None:
        while self._channels:
            lost = self._hear(None)
            if lost:
                self._begin_end()
                ends = time.monotonic() + _GATHER_SECONDS
                while self._channels and (seconds := ends - time.monotonic()) > 0:
                    lost += self._hear(seconds)
                end = {"lost": sorted(lost), "code": DistributedError.exit_code}
                self._end(end, _told(end))

    def _hear(self, seconds: float | None) -> list[int]:
        """Waits for news and returns the processes that went away without a word; ends this one where one failed."""
        lost = []
        for key, _ in self._selector.select(seconds):
            messages = self._channels[key.data].receive()
            if messages is None:
                self._selector.unregister(self._channels.pop(key.data))
                if key.data not in self._left:
                    lost.append(key.data)
            for message in messages or ():
                if "bye" in message:
                    self._left.add(key.data)
                else:
                    self._begin_end()
                    self._end(message, _told(message))
        return lost

    def _begin_end(self) -> None:
        """Returns to one thread only; another that would end the process waits here until it has ended."""
        self._ending.acquire()

    def _end(self, message: dict[str, Any], line: str) -> NoReturn:
        for channel in list(self._channels.values()):
            channel.send(message)
        _print(line)
        if self._process_id == 0:
            time.sleep(_LINGER_SECONDS)
        os._exit(message["code"])

    def _say_bye(self) -> None:
        self._begin_end()
        self._ending.release()
        for channel in list(self._channels.values()):
            channel.send({"bye": self._process_id})


def hang_bell(process_id: int, channels: dict[int, Channel]) -> None:
    """Listens from now on; the process ends when another one fails or is lost.

    channels: as `call_roll` returns them.
    """
    _bells.append(_Bell(process_id, channels))


def is_hung() -> bool:
    """Says whether this process is one of several that end together."""
    return bool(_bells)


def leave(code: int, message: str, error: BaseException | None = None) -> NoReturn:
    """Ends this process with exit code `code` and the line `error: message`, and so every other of the run.

    Nothing is waited for: not jax's shutdown, where all would meet, nor what is being written.
    error: its trace is printed first.
    """
    if _bells:
        _bells[-1].ring(code, message, error)
    if error is not None:
        traceback.print_exception(error)
    _print(f"error: {message}")
    os._exit(code)


def leave_for(error: BaseException) -> NoReturn:
    """Ends this process, and so all of the run, for an exception that nothing caught; others than ours with a trace."""
    if isinstance(error, DistributedError) or not isinstance(error, MaxliteError):
        # It may come of another process that is lost, which is the better news; the bell ends this one then.
        time.sleep(_NEWS_SECONDS)
    if isinstance(error, MaxliteError):
        leave(error.exit_code, str(error))
    if isinstance(error, KeyboardInterrupt):
        leave(_INTERRUPTED, "interrupted")
    leave(1, f"{type(error).__name__}: {error}", error)


def _told(message: dict[str, Any]) -> str:
    if lost := message.get("lost"):
        who = ", ".join(map(str, lost))
        return (
            f"error: {'process' if len(lost) == 1 else 'processes'} {who} lost: killed, or the machine is gone; the "
            "same command goes on from the newest checkpoint."
        )
    return f"error: process {message['process']} failed: {message['message']}"


def _print(line: str) -> None:
    sys.stdout.flush()
    print(line, file=sys.stderr, flush=True)
