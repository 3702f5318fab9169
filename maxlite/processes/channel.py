"""JSON messages over a socket, a line each."""

import contextlib
import json
import socket
import sys
from typing import Any

_MOST_BYTES = 4 * 2**20
# A machine that is gone without a word is noticed within 90 s, before jax's own 100 s of missed heartbeats.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


class Channel:
    """One end of a connection between two processes of the run."""

    def __init__(self, connection: socket.socket) -> None:
        """Takes `connection` over."""
        self._connection, self._rest = connection, b""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            for name, value in _KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """Returns the number that a selector waits for."""
        return self._connection.fileno()

    def limit(self, seconds: float | None) -> None:
        """Sets how long `receive` and `send` wait; None for ever."""
        self._connection.settimeout(seconds)

    def send(self, message: dict[str, Any]) -> bool:
        """Sends `message`; False where the other end is gone."""
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self, most_bytes: int = 2**16) -> list[dict[str, Any]] | None:
        """Waits for bytes and returns the messages that they end; None where the other end is gone.

        Raises:
            TimeoutError: the limit is over.
        """
        try:
            data = self._connection.recv(most_bytes)
        except TimeoutError:
            raise
        except OSError:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        # Whoever is not of this run, a scanner of ports, is treated as gone.
        if not data or len(self._rest) > _MOST_BYTES:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
