import socket

import pytest

from maxlite.processes.channel import Channel


@pytest.fixture
def ends():
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    listener.close()
    channel = Channel(far)
    yield near, channel
    near.close()
    channel.close()


def test_messages_come_whole(ends):
    near, channel = ends
    near.sendall(b'{"a": 1}\n{"b"')
    assert channel.receive() == [{"a": 1}]
    near.sendall(b': "\xc3\xa4"}\n')
    assert channel.receive() == [{"b": "ä"}]
    assert channel.send({"c": [2]})
    assert near.recv(100) == b'{"c": [2]}\n'


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\n", b"[1]\n"])
def test_who_ends_or_is_no_process_of_a_run_is_gone(ends, sent):
    near, channel = ends
    near.sendall(sent)
    near.shutdown(socket.SHUT_WR)
    assert channel.receive() is None


def test_endless_bytes_are_not_kept(ends):
    near, channel = ends
    channel.limit(10)
    near.settimeout(10)
    received: list | None = []
    with pytest.raises(OSError):  # noqa: PT012
        while True:
            near.send(b"x" * 2**16)
            if (received := channel.receive()) is None:
                channel.close()
    assert received is None


def test_a_silent_end_runs_out_of_time(ends):
    _, channel = ends
    channel.limit(0.05)
    with pytest.raises(TimeoutError):
        channel.receive()


def test_a_closed_end_takes_nothing_more(ends):
    near, channel = ends
    near.close()
    assert not all(channel.send({"a": "x" * 1000}) for _ in range(1000))
