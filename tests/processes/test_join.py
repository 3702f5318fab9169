import os
import time

import pytest

from maxlite.config.load import load_config
from maxlite.errors import DistributedError
from maxlite.processes import join as joining

SLURM = {
    "SLURM_JOB_ID": "4099",
    "SLURM_STEP_NODELIST": "node[007-008],other",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "2",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_VERSION": "4.1.6",
    "OMPI_MCA_orte_hnp_uri": "8192.0;tcp://10.0.0.1:34911",
}
TORCH = {"MASTER_ADDR": "m", "MASTER_PORT": "7", "WORLD_SIZE": "8", "RANK": "5"}


class Joined(Exception):
    """What `join` gave jax."""


@pytest.mark.parametrize(
    "environment, place, devices",
    [
        # The ports are those that jax makes of the numbers of jobs: 65535 - 2^12 + 1 and the remainder of 2^12.
        (SLURM, ("node007:61443", 4, 3), [1]),
        (SLURM | {"SLURM_STEP_NUM_NODES": "4"}, ("node007:61443", 4, 3), None),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "a:1"}, ("a:1", 4, 3), [1]),
        (SLURM | {"JAX_COORDINATOR_PORT": "5"}, ("node007:5", 4, 3), [1]),
        (MPI, ("10.0.0.1:61442", 2, 1), None),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ("10.0.0.1:61442", 2, 1), [0]),
        (TORCH, ("m:7", 8, 5), None),
    ],
)
def test_jax_is_told_the_place_that_the_cluster_says(monkeypatch, environment, place, devices):
    places = []

    def stop(*given, local_device_ids, **others):
        assert others["cluster_detection_method"] == "deactivate"
        raise Joined(given, local_device_ids)

    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "JAX_COORDINATOR")):
            monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(joining, "call_roll", lambda place, facts: places.append((place, facts)))
    monkeypatch.setattr(joining, "hang_bell", lambda *_: None)
    monkeypatch.setattr(joining.jax.distributed, "initialize", stop)
    monkeypatch.setattr(joining.jax.config, "update", lambda *_: None)
    with pytest.raises(Joined) as joined:
        joining.join(load_config("base.yml", ["jax_distributed_initialization_timeout=9"], {}))
    assert joined.value.args == (place, devices)
    (roll,) = places
    assert (roll[0].address, roll[0].num_processes, roll[0].process_id, roll[0].seconds) == (*place, 9)
    # What is compared at the start: keys and versions, and nothing that is a process's own.
    assert {"learning_rate", "jax", "jaxlib", "orbax-checkpoint", "python"} <= roll[1].keys()
    assert not {"process_id", "coordinator_address", "num_processes", "jax_cache_dir"} & roll[1].keys()


def test_a_cluster_that_does_not_answer(monkeypatch):
    for name, value in (MPI | {"OMPI_MCA_orte_hnp_uri": "8192.0;nonsense"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DistributedError, match="Open MPI does not say where"):
        joining.join(load_config("base.yml", [], {}))


def test_one_process_joins_nothing_and_is_not_announced(capsys):
    joining.join(load_config("base.yml", ["num_processes=1", "process_id=0", "coordinator_address=a:1"], {}))
    joining.show_place()
    assert capsys.readouterr() == ("", "")
    assert joining.place_line() == "One process, 8 of 8 cpu devices"


def test_only_one_of_two_was_started(fork_maxlite, free_port):
    """A clear error within the set time (P50)."""
    for number in (0, 1):
        keys = ["num_processes=2", f"process_id={number}", f"coordinator_address=127.0.0.1:{free_port}"]
        started = time.monotonic()
        result = fork_maxlite(["train", "base.yml", "jax_distributed_initialization_timeout=2", *keys])
        assert result.code == 8
        assert time.monotonic() - started < 60
        assert f"Process {1 - number}" in result.stderr
        assert "within 2 s" in result.stderr
        assert result.stderr.count("\n") == 1


CODE = """
import os, sys, time
port, count, number = map(int, sys.argv[1:])
BEFORE
from maxlite.config.load import load_config
from maxlite.errors import DataError, PreemptedError
from maxlite.parallel.devices import host_value, prepare_jax, run_devices
import jax, numpy
from maxlite.launcher import cli
keys = ["jax_cache_dir=null", "jax_distributed_initialization_timeout=60", *KEYS]
config = load_config("base.yml", keys, {})
def act():
    prepare_jax(config)
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(run_devices(config.run), ("x",)), jax.P("x"))
    x = jax.make_array_from_callback((4,), sharding, lambda at: numpy.ones(4)[at])
    add = jax.jit(lambda x: x / x.sum())
    for step in range(10000):
        # Gloo's threads starve, and all stand still, where more than 32 programs wait for each other.
        x = add(x).block_until_ready()
        if step == 3:
            AFTER
cli.app = act
cli.main()
"""
BY_KEYS = "[f'num_processes={count}', f'process_id={number}', f'coordinator_address=127.0.0.1:{port}', 'cpu_devices=2']"


def program(before="", keys=BY_KEYS, after="sys.exit(0)"):
    return CODE.replace("BEFORE", before).replace("KEYS", keys).replace("AFTER", after)


def test_two_tasks_of_slurm(run_processes):
    """By jax's own detection, on this machine (P50)."""
    task = "{'SLURM_JOB_ID': '7', 'SLURM_STEP_NODELIST': 'localhost', 'SLURM_NTASKS': '2', 'SLURM_LOCALID': '0'}"
    before = f"os.environ.update({task}); os.environ.update(SLURM_PROCID=str(number), JAX_COORDINATOR_PORT=str(port))"
    ended = run_processes(program(before, "['cpu_devices=2']"), 2)
    assert [code for code, _, _ in ended] == [0, 0], ended
    for number, (_, _, err) in enumerate(ended):
        assert f"Process {number} of 2 (SLURM), coordinator localhost:" in err
        assert "2 of 4 cpu devices" in err


def test_other_devices_are_an_error_on_both(run_processes):
    before = "os.environ['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={2 + number}'"
    keys = BY_KEYS.replace(", 'cpu_devices=2'", "")
    for code, _, err in run_processes(program(before, keys), 2):
        assert code == 8
        assert "process 1 has devices=3, process 0 2" in err


def test_a_process_killed_in_a_collective_is_named(run_processes):
    first, second = run_processes(program(after="os.kill(os.getpid(), 9) if number else 0"), 2)
    assert (first[0], second[0]) == (8, -9)
    assert "error: process 1 lost" in first[2]
    assert "Traceback" not in first[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "after, code, line",
    [
        ("1 / (1 - number)", 1, "ZeroDivisionError"),
        ("if number: raise DataError('no rows')", 3, "no rows"),
        ("if number: raise KeyboardInterrupt", 130, "interrupted"),
        # All that is to be done is done: a stop that all have agreed on, after work of other lengths.
        ("time.sleep(number); raise PreemptedError('saved')", 75, "error: saved"),
    ],
)
def test_the_command_line_ends_all(run_processes, after, code, line):
    first, second = run_processes(program(after=after), 2)
    assert (first[0], second[0]) == (code, code), (first, second)
    assert line in second[2].splitlines()[-1]
    assert line in first[2].splitlines()[-1]
    assert ("Traceback" in second[2]) == (code == 1)
