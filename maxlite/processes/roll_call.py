"""The start of a run of several processes: all come to process 0 and say what they are, before jax connects them.

jax's own start ends a process by SIGABRT where another is missing, and names none. So process 0 listens at
the coordinator's address first, and lets go of it once all are there and alike; jax's coordinator listens there next.
"""

import dataclasses
import os
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from maxlite.errors import DistributedError
from maxlite.processes.channel import Channel

_GREETING = "maxlite roll call"
_RETRY_SECONDS = 0.1
# What process 0 needs to answer all, once its time is over.
_GRACE_SECONDS = 10
_MOST_SHOWN = 4
Facts = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Place:
    """Which process this is. seconds: to wait for the others."""

    address: str
    num_processes: int
    process_id: int
    seconds: int


def call_roll(place: Place, facts: Facts) -> dict[int, Channel]:
    """Returns the connections of this process, by process: process 0 has one to each, the others to process 0.

    facts: what must be the same on all processes, name -> value.

    Raises:
        DistributedError: a process is missing, is there twice or differs; on all that came, and names it.
    """
    return _Register(place, facts).call() if place.process_id == 0 else {0: _answer(place, facts)}


class _Register:
    """Process 0's side: who has come, with which facts."""

    def __init__(self, place: Place, facts: Facts) -> None:
        self._place, self._facts = place, facts
        self._ends = time.monotonic() + place.seconds
        self._came: dict[int, tuple[Channel, Facts]] = {}
        self._selector = selectors.DefaultSelector()

    def call(self) -> dict[int, Channel]:
        listener = _listen(self._place.address)
        self._selector.register(listener, selectors.EVENT_READ)
        try:
            fault = self._wait_for_all(listener)
        finally:
            self._let_go(listener)
        fault = fault or self._missing() or differences({0: self._facts, **{k: f for k, (_, f) in self._came.items()}})
        for channel, _ in self._came.values():
            channel.limit(None)
            channel.send({"fault": fault})
        if fault:
            for channel, _ in self._came.values():
                channel.close()
            raise DistributedError(fault)
        return {number: channel for number, (channel, _) in self._came.items()}

    def _wait_for_all(self, listener: socket.socket) -> str | None:
        while len(self._came) < self._place.num_processes - 1 and (left := self._ends - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    channel = Channel(connection)
                    channel.limit(_GRACE_SECONDS)
                    self._selector.register(channel, selectors.EVENT_READ)
                elif fault := self._hear(key.fileobj):
                    return fault
        return None

    def _hear(self, channel: Any) -> str | None:
        """Takes in what a process says of itself, or that it is gone again; returns what is wrong with it."""
        messages = channel.receive()
        if messages is None:
            self._selector.unregister(channel)
            channel.close()
            self._came = {number: came for number, came in self._came.items() if came[0] is not channel}
            return None
        for message in messages:
            number, count = message.get("process"), message.get("num_processes")
            if message.get("greeting") != _GREETING or not isinstance(number, int) or not isinstance(count, int):
                continue
            fault = None
            if count != self._place.num_processes:
                fault = f"Process {number} was told of {count} processes, process 0 of {self._place.num_processes}."
            elif number in self._came or not 0 < number < count:
                fault = f"Two processes say that they are process {number}; each has a process_id of its own."
            if fault:
                # It closes with the others that are not kept.
                channel.send({"fault": fault})
                return fault
            self._came[number] = (channel, message["facts"])
        return None

    def _let_go(self, listener: socket.socket) -> None:
        """Closes what is not the connection of a process of the run."""
        kept = [channel for channel, _ in self._came.values()]
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not listener and key.fileobj not in kept:
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        listener.close()

    def _missing(self) -> str | None:
        missing = sorted(set(range(1, self._place.num_processes)) - self._came.keys())
        if not missing:
            return None
        return (
            f"{_processes(missing)} of {self._place.num_processes} did not come to {self._place.address} within "
            f"{self._place.seconds} s (jax_distributed_initialization_timeout): start all {self._place.num_processes} "
            "with the same coordinator_address, which every machine can reach, or read what those have printed."
        )


def differences(facts: Mapping[int, Facts]) -> str | None:
    """Returns a message that names the processes which differ from process 0, and how; None where none does."""
    found = []
    for number in sorted(facts):
        names = [name for name in {**facts[0], **facts[number]} if facts[0].get(name) != facts[number].get(name)]
        shown = [f"{name}={facts[number].get(name)}, process 0 {facts[0].get(name)}" for name in names[:_MOST_SHOWN]]
        if names:
            more = f"; and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
            found.append(f"process {number} has {'; '.join(shown)}{more}")
    if not found:
        return None
    more = f", and {len(found) - _MOST_SHOWN} processes more" if len(found) > _MOST_SHOWN else ""
    return f"All processes of a run must be alike, but {', '.join(found[:_MOST_SHOWN])}{more}."


def _answer(place: Place, facts: Facts) -> Channel:
    """Another process's side: goes to process 0 and waits until it says that all are there."""
    channel = Channel(_connect(place))
    channel.limit(place.seconds + _GRACE_SECONDS)
    greeting = {"greeting": _GREETING, "process": place.process_id, "num_processes": place.num_processes}
    channel.send({**greeting, "facts": dict(facts)})
    fault = _fault_heard(place, channel)
    if fault:
        channel.close()
        raise DistributedError(fault)
    channel.limit(None)
    return channel


def _fault_heard(place: Place, channel: Channel) -> str | None:
    messages: Sequence[dict[str, Any]] | None = []
    try:
        while messages is not None and not messages:
            # Byte by byte: what follows the answer is the bell's.
            messages = channel.receive(1)
    except TimeoutError:
        return f"{_process_0(place)} was reached, but said nothing; is it another program?"
    if messages is None:
        return f"{_process_0(place)} went away before all had come; read what it has printed, if it is of this run."
    return messages[0]["fault"]


def _connect(place: Place) -> socket.socket:
    host, port = _split(place.address)
    ends = time.monotonic() + place.seconds
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(ends - time.monotonic(), _RETRY_SECONDS))
        except OSError as error:
            # It may not have started yet, nor its name be known.
            if time.monotonic() > ends:
                raise DistributedError(
                    f"{_process_0(place)} was not reached within {place.seconds} s "
                    f"(jax_distributed_initialization_timeout): {error}. Start it, or correct coordinator_address."
                ) from error
        time.sleep(_RETRY_SECONDS)


def _listen(address: str) -> socket.socket:
    port = _split(address)[1]
    both = socket.has_dualstack_ipv6()
    # jax's name for the address to listen at, where it is not any.
    host = _split(os.environ["JAX_COORDINATOR_BIND_ADDRESS"])[0] if "JAX_COORDINATOR_BIND_ADDRESS" in os.environ else ""
    family = socket.AF_INET6 if both and (not host or ":" in host) else socket.AF_INET
    try:
        return socket.create_server(
            (host, port), family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6 and not host
        )
    except OSError as error:
        raise DistributedError(
            f"Process 0 cannot listen at {address}: {error.strerror}. The port may be another run's, or two processes "
            "say that they are process 0; coordinator_address is a free port of process 0's machine."
        ) from error


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _process_0(place: Place) -> str:
    return f"Process 0 at {place.address}"


def _processes(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:20])) + (f" and {len(numbers) - 20} more" if len(numbers) > 20 else "")
    return f"Process {shown}" if len(numbers) == 1 else f"Processes {shown}"
