import dataclasses

import pytest

from maxlite.config.load import load_config
from maxlite.errors import ConfigError
from maxlite.processes.cluster import Cluster, find_cluster

JAX = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
MAXTEXT = {"JAX_COORDINATOR_IP": "10.0.0.1", "JAX_COORDINATOR_PORT": "99", "NNODES": "2", "NODE_RANK": "1"}
TORCH = {"MASTER_ADDR": "m", "MASTER_PORT": "7", "WORLD_SIZE": "8", "RANK": "5"}
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "2",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HNP = {"OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.0.0.1:3"}


def found(environment, **keys):
    section = load_config("base.yml", [], {}).distributed
    return find_cluster(dataclasses.replace(section, **keys), environment)


KEYS = {"num_processes": 3, "process_id": 2, "coordinator_address": "k:5"}


def test_keys_come_before_variables_and_these_before_the_cluster():
    assert found(JAX | SLURM, **KEYS) == Cluster("keys", "k:5", 3, 2)
    assert found(JAX | SLURM) == Cluster("JAX_NUM_PROCESSES and JAX_PROCESS_ID", "a:1", 4, 3)
    assert found(SLURM).how == "SLURM"
    assert found({}) is None
    assert found(JAX | SLURM, skip_jax_distributed_system=True, **KEYS) is None


@pytest.mark.parametrize(
    "environment, place",
    [
        (JAX, ("a:1", 4, 3, None)),
        (MAXTEXT, ("10.0.0.1:99", 2, 1, None)),
        (TORCH, ("m:7", 8, 5, None)),
        # Several processes a machine: each has the device of its number there.
        (TORCH | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, ("m:7", 8, 5, (1,))),
        (TORCH | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, ("m:7", 8, 5, None)),
        (MPI | {"JAX_COORDINATOR_ADDRESS": "a:1"}, ("a:1", 4, 2, (1,))),
        (MPI | {"JAX_COORDINATOR_ADDRESS": "a:1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, ("a:1", 4, 2, None)),
    ],
)
def test_variables_say_all(environment, place):
    cluster = found(environment)
    assert (
        cluster.coordinator_address,
        cluster.num_processes,
        cluster.process_id,
        cluster.local_device_ids,
    ) == place


@pytest.mark.parametrize(
    "environment, how, one_per_machine",
    [
        (SLURM, "SLURM", True),
        (SLURM | {"SLURM_NTASKS": "8"}, "SLURM", False),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "a:1"}, "SLURM", True),
        (SLURM | {"MASTER_ADDR": "m", "MASTER_PORT": "7"}, "SLURM", True),
        (MPI | HNP, "Open MPI", False),
        (MPI | HNP | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "Open MPI", True),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}, "TPU", False),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, "TPU", False),
    ],
)
def test_what_jax_finds_is_left_to_it(environment, how, one_per_machine):
    assert found(environment) == Cluster(how, one_per_machine=one_per_machine)


@pytest.mark.parametrize(
    "environment",
    [
        SLURM | {"SLURM_NTASKS": "1"},
        MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        TORCH | {"WORLD_SIZE": "1", "RANK": "0"},
        {"TPU_WORKER_HOSTNAMES": "localhost"},
        # A shell of salloc, without a step of srun.
        {name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"},
        # They stand in many an environment, for other programs.
        {"RANK": "1"},
        {"NNODES": "2"},
        {"MASTER_ADDR": "m"},
    ],
)
def test_one_process(environment):
    assert found(environment) is None


@pytest.mark.parametrize("whole", [JAX, MAXTEXT, TORCH])
def test_half_of_a_set_names_the_other_half(whole):
    names = list(whole)
    with pytest.raises(ConfigError) as error:
        found({name: whole[name] for name in names[:2]})
    for name in names:
        assert name in str(error.value)
    assert f"not {' and '.join(names[2:])}" in str(error.value)
    assert "skip_jax_distributed_system" in str(error.value)


@pytest.mark.parametrize(
    "environment, words",
    [
        (JAX | {"JAX_PROCESS_ID": "4"}, ["JAX_PROCESS_ID=4", "JAX_NUM_PROCESSES=4"]),
        (JAX | {"JAX_NUM_PROCESSES": "two"}, ["JAX_NUM_PROCESSES='two'"]),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "host"}, ["JAX_COORDINATOR_ADDRESS=host", "host:port"]),
        (MPI, ["4 processes", "-x JAX_COORDINATOR_ADDRESS="]),
    ],
)
def test_wrong_values_are_shown(environment, words):
    with pytest.raises(ConfigError) as error:
        found(environment)
    for word in words:
        assert word in str(error.value)
