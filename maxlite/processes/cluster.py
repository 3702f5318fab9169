"""Where a process finds its place among the processes of a run: keys, plain variables, or the cluster itself."""

import dataclasses
import importlib.util
from collections.abc import Mapping

from maxlite.config.schema import DistributedConfig
from maxlite.errors import ConfigError

_JAX_ADDRESS = "JAX_COORDINATOR_ADDRESS"
# Sets of variables, each the address of process 0 (host:port, or host and port), how many there are, and which this
# is. The last is that of torch's launchers, which start one process for each device.
_PLAIN = (
    (_JAX_ADDRESS, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    ("JAX_COORDINATOR_IP", "JAX_COORDINATOR_PORT", "NNODES", "NODE_RANK"),
    ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"),
)
# Variables that mean other things too, and say nothing about a cluster when they stand alone.
_NOT_ALONE = {"JAX_COORDINATOR_PORT", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"}
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_TPU_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What is known of a run's processes. What is None is found by jax, which knows the kind of cluster.

    how: who said so, for messages. coordinator_address: host:port of process 0.
    one_per_machine: the process has all devices of its machine; None: jax decides.
    local_device_ids: the devices of its machine that it has; None: no such limit is known.
    """

    how: str
    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    one_per_machine: bool = False
    local_device_ids: tuple[int, ...] | None = None


def find_cluster(keys: DistributedConfig, environment: Mapping[str, str]) -> Cluster | None:
    """Returns what the keys, or else `environment`, say of the processes of the run; None where there is one.

    Raises:
        ConfigError: a variable is no number, or some of those that belong together are missing.
    """
    if keys.skip_jax_distributed_system:
        return None
    if keys.num_processes is not None:
        found = Cluster("keys", keys.coordinator_address, keys.num_processes, keys.process_id)
    else:
        found = _plain_variables(environment) or _known_to_jax(environment)
    return None if found is None or found.num_processes == 1 else found


def _plain_variables(environment: Mapping[str, str]) -> Cluster | None:
    for names in _PLAIN:
        given = [name for name in names if environment.get(name)]
        if len(given) == len(names):
            return _from_variables(names, environment)
    for names in _PLAIN:
        given = [name for name in names if environment.get(name)]
        telling = len(given) > 1 or not _NOT_ALONE.issuperset(given)
        if given and telling and _known_to_jax(environment) is None:
            missing = [name for name in names if name not in given]
            raise ConfigError(
                f"The environment has {_listed(given, environment)} and not {' and '.join(missing)}: give a process "
                f"all of {', '.join(names)}, or none; skip_jax_distributed_system=true runs one process alone."
            )
    return None


def _from_variables(names: tuple[str, ...], environment: Mapping[str, str]) -> Cluster:
    *address, count, index = names
    num_processes, process_id = _number(count, environment), _number(index, environment)
    if not 0 <= process_id < num_processes:
        raise ConfigError(f"The environment has {index}={process_id}, which is not below {count}={num_processes}.")
    where = ":".join(environment[name] for name in address)
    if not where.rpartition(":")[2].isdecimal():
        raise ConfigError(f"The environment has {address[0]}={where}, without a port; it is host:port of process 0.")
    ids = None
    if index == "RANK" and int(environment.get("LOCAL_WORLD_SIZE", "1")) > 1:
        ids = (_number("LOCAL_RANK", environment),)
    return Cluster(f"{count} and {index}", where, num_processes, process_id, local_device_ids=ids)


def _known_to_jax(environment: Mapping[str, str]) -> Cluster | None:
    return _slurm(environment) or _open_mpi(environment) or _tpu(environment) or _kubernetes(environment)


def _slurm(environment: Mapping[str, str]) -> Cluster | None:
    if not all(name in environment for name in _SLURM):
        return None
    tasks = _number("SLURM_NTASKS", environment)
    if tasks == 1:
        return Cluster("SLURM", num_processes=1)
    # jax gives each task of SLURM and Open MPI one device, even the only task of a machine.
    return Cluster("SLURM", one_per_machine=environment.get("SLURM_STEP_NUM_NODES") == str(tasks))


def _open_mpi(environment: Mapping[str, str]) -> Cluster | None:
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return None
    size = _number("OMPI_COMM_WORLD_SIZE", environment)
    if size == 1:
        return Cluster("Open MPI", num_processes=1)
    alone = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
    if "OMPI_MCA_orte_hnp_uri" in environment:
        return Cluster("Open MPI", one_per_machine=alone)
    # Open MPI 5 tells its processes their numbers, and not where process 0 is.
    address = environment.get(_JAX_ADDRESS)
    if not address:
        raise ConfigError(
            f"Open MPI started {size} processes and, from version 5 on, does not tell where process 0 is; add "
            f"-x {_JAX_ADDRESS}=HOST:PORT to mpirun, with the first host and a free port."
        )
    ids = None if alone else (_number("OMPI_COMM_WORLD_LOCAL_RANK", environment),)
    rank = _number("OMPI_COMM_WORLD_RANK", environment)
    return Cluster("Open MPI", address, size, rank, one_per_machine=alone, local_device_ids=ids)


def _tpu(environment: Mapping[str, str]) -> Cluster | None:
    """Of TPUs on Kubernetes; a TPU machine on its own asks its metadata server, which is left to jax."""
    hosts = next((environment[name] for name in _TPU_HOSTS if environment.get(name)), None)
    if hosts is None:
        return None
    alone = "," not in hosts and environment.get("MEGASCALE_NUM_SLICES", "1") in ("", "1")
    return Cluster("TPU", num_processes=1) if alone else Cluster("TPU")


def _kubernetes(environment: Mapping[str, str]) -> Cluster | None:
    """Of an indexed job; jax asks Kubernetes about it through a package that need not be there."""
    indexed = {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys()
    return Cluster("Kubernetes") if indexed and importlib.util.find_spec("kubernetes") else None


def _number(name: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise ConfigError(f"The environment has {name}={text!r}, which is no number from 0.")
    return int(text)


def _listed(names: list[str], environment: Mapping[str, str]) -> str:
    return " and ".join(f"{name}={environment[name]}" for name in names)
