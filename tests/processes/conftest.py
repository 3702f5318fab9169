import socket

import pytest

from tests import forks


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def run_processes(process_environment, free_port):
    """run_processes(code, n): `code` in n processes, which are told port, n and their number; (code, out, err) each."""

    def run(code, num_processes, timeout=60):
        arguments = [[str(free_port), str(num_processes), str(number)] for number in range(num_processes)]
        return forks.run_programs(code, arguments, process_environment, timeout=timeout)

    return run
