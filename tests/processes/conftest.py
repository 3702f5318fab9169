import socket
import subprocess
import sys
import threading

import pytest


@pytest.fixture
def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def run_processes(process_environment, free_port):
    """run_processes(code, n): `code` in n processes, which are told port, n and their number; (code, out, err) each."""

    def run(code, num_processes, timeout=60):
        processes = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(free_port), str(num_processes), str(number)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=process_environment,
            )
            for number in range(num_processes)
        ]
        killer = threading.Timer(timeout, lambda: [process.kill() for process in processes])
        killer.start()
        try:
            ended = [(process.communicate(), process.returncode) for process in processes]
        finally:
            killer.cancel()
        return [(code, out, err) for (out, err), code in ended]

    return run
