import contextlib
import socket
import threading
import time

import pytest

from maxlite.errors import DistributedError
from maxlite.processes.roll_call import Place, call_roll, differences

FACTS = {"jax": "1", "steps": "10"}


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return f"127.0.0.1:{port}"


def hold_all(calls):
    """What each call returned or raised, all at the same time; call k is process k unless it says otherwise."""
    results: list = [None] * len(calls)

    def hold(at, place, facts):
        try:
            results[at] = call_roll(place, facts)
        except DistributedError as error:
            results[at] = str(error)

    threads = [threading.Thread(target=hold, args=(at, *call)) for at, call in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


@contextlib.contextmanager
def closed(results):
    yield results
    for result in results:
        for channel in result.values():
            channel.close()


def test_all_meet_and_stay_connected(address):
    calls = [(Place(address, 4, number, 10), FACTS) for number in (0, 1, 2, 3)]
    with closed(hold_all(calls)) as results:
        assert sorted(results[0]) == [1, 2, 3]
        for number in (1, 2, 3):
            results[0][number].send({"to": number})
            assert list(results[number]) == [0]
            assert results[number][0].receive() == [{"to": number}]
        # The port is free again, for jax's coordinator, while the connections stand.
        socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))).close()


def test_process_0_may_come_last(address):
    late = threading.Timer(0.3, lambda: results.append(call_roll(Place(address, 2, 0, 10), FACTS)))
    results = []
    late.start()
    results.append(call_roll(Place(address, 2, 1, 10), FACTS))
    late.join()
    with closed(results):
        assert {number for result in results for number in result} == {0, 1}


def test_the_missing_are_named_by_all_that_came(address):
    started = time.monotonic()
    results = hold_all([(Place(address, 5, number, 1), FACTS) for number in (0, 2)])
    assert 0.9 < time.monotonic() - started < 8
    assert results[0] == results[1]
    assert results[0].startswith(f"Processes 1, 3, 4 of 5 did not come to {address} within 1 s")


def test_process_0_is_missing(address):
    (result,) = hold_all([(Place(address, 2, 1, 1), FACTS)])
    assert f"Process 0 at {address} was not reached within 1 s" in result


def test_who_differs_is_named_with_both_values(address):
    other = FACTS | {"steps": "11"}
    results = hold_all([(Place(address, 3, number, 10), other if number == 2 else FACTS) for number in (0, 1, 2)])
    assert results[0] == results[1] == results[2]
    assert "process 2 has steps=11, process 0 10" in results[0]
    assert "jax" not in results[0]


@pytest.mark.parametrize(
    "second, words",
    [((3, 1), "Two processes say that they are process 1"), ((4, 2), "Process 2 was told of 4 processes")],
)
def test_places_that_do_not_fit(address, second, words):
    places = [Place(address, 3, 0, 10), Place(address, 3, 1, 10), Place(address, *second, 10)]
    results = hold_all([(place, FACTS) for place in places])
    # One that comes after the fault was found finds nobody.
    assert words in results[0] and any(words in result for result in results[1:])


def test_one_that_goes_and_comes_again_counts_once(address):
    with closed([]) as results:
        thread = threading.Thread(target=lambda: results.append(call_roll(Place(address, 2, 0, 10), FACTS)))
        thread.start()
        host, port = address.split(":")
        for sent in (b"", b"GET / HTTP/1.1\r\n\r\n", b'{"greeting": "maxlite roll call", "process": 1, "num_p'):
            stranger = _connect(host, int(port))
            stranger.sendall(sent)
            stranger.close()
        results.append(call_roll(Place(address, 2, 1, 10), FACTS))
        thread.join(10)
        assert len(results) == 2


def _connect(host, port):
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, port))
        time.sleep(0.05)
    raise AssertionError("nobody listens")


def test_a_taken_port(address):
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        (result,) = hold_all([(Place(address, 2, 0, 1), FACTS)])
    assert f"cannot listen at {address}" in result


def test_differences():
    assert differences({0: FACTS, 1: dict(FACTS)}) is None
    many = {str(number): "x" for number in range(9)}
    text = differences({0: {}, 1: many, 7: {"a": "1"}})
    assert "process 1 has 0=x, process 0 None" in text
    assert "and 5 more, process 7 has a=1, process 0 None" in text
