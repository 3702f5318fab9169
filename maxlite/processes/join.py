"""How a process comes to be one of several: it finds its place, meets the others, and looks at what all have.

jax finds out about clusters by itself, but does not say what it found before it connects, so this file asks
`jax._src.clusters`.
"""

import importlib.metadata
import json
import os
import platform
import sys

import jax
from jax._src import clusters

from maxlite.config.schema import PROCESS_KEYS, Config
from maxlite.errors import DistributedError
from maxlite.processes.bell import hang_bell
from maxlite.processes.cluster import Cluster, find_cluster
from maxlite.processes.group import exchange, is_joined, num_processes, process_index
from maxlite.processes.roll_call import Place, call_roll, differences

# What may differ between processes: their places, and folders of their own machine.
_OWN_KEYS = {*PROCESS_KEYS, "jax_distributed_initialization_timeout", "jax_cache_dir"}
_LIBRARIES = ("maxlite", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
# Who is killed is missed at once by the bell, and who is cut off after 90 s; jax is the second to notice.
_HEARTBEAT_SECONDS = 100
# jax's own wait for the others at the end has no use of a limit: who is lost ends all.
_SHUTDOWN_SECONDS = 7 * 24 * 3600
# Of this process, once it has joined; and whether it was shown.
_places: list[str] = []
_shown: list[str] = []


def join(config: Config) -> None:
    """Meets the other processes of the run, if it has any; once for each process, before jax makes a device.

    Raises:
        ConfigError: the environment says half of where the others are.
        DistributedError: a process is missing or differs, on all that are there.
    """
    if is_joined():
        return
    seconds = config.distributed.jax_distributed_initialization_timeout
    cluster = find_cluster(config.distributed, os.environ) or _cloud_tpu()
    if cluster is None:
        return
    address, count, index, local_ids = _complete(cluster, seconds)
    if count == 1:
        return
    connections = call_roll(Place(address, count, index, seconds), _facts(config))
    hang_bell(index, connections)
    # Signals are this program's own: a SIGTERM is a save and an end, agreed on by all.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        address,
        count,
        index,
        local_device_ids=local_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=seconds,
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )
    _places.append(f"Process {index} of {count} ({cluster.how}), coordinator {address}")


def show_place() -> None:
    """Prints the place of a process that is one of several, on standard error; standard output is then process 0's.

    Makes the devices; does nothing when called again.

    Raises:
        DistributedError: the processes have other numbers or kinds of devices; on all of them.
    """
    if num_processes() == 1 or _shown:
        return
    check_devices()
    _shown.append(place_line())
    print(_shown[0], file=sys.stderr, flush=True)
    _keep_output(process_index())


def check_devices() -> None:
    """Compares what devices the processes have, and makes them.

    Raises:
        DistributedError: they have other numbers or kinds of devices, on all processes.
    """
    here = jax.local_devices()
    kinds = sorted({device.device_kind for device in here})
    facts = {"devices": str(len(here)), "kind of device": ", ".join(kinds), "platform": here[0].platform}
    found = [json.loads(text) for text in exchange("check devices", json.dumps(facts))]
    if fault := differences(dict(enumerate(found))):
        raise DistributedError(fault)


def place_line() -> str:
    """Returns which process this is, who said so, and how many of the devices it has; starts the backend."""
    devices = f"{jax.local_device_count()} of {jax.device_count()} {jax.default_backend()} devices"
    return f"{_places[-1] if _places else 'One process'}, {devices}"


def _complete(cluster: Cluster, seconds: int) -> tuple[str, int, int, list[int] | None]:
    """What jax's own detection adds to `cluster`: address, number of processes, number of this one, its devices."""
    ids = None if cluster.local_device_ids is None else list(cluster.local_device_ids)
    if cluster.coordinator_address and cluster.num_processes is not None and cluster.process_id is not None:
        return cluster.coordinator_address, cluster.num_processes, cluster.process_id, ids
    try:
        address, count, index, found_ids = clusters.ClusterEnv.auto_detect_unset_distributed_params(
            os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, None, None, seconds
        )
    except (RuntimeError, OSError, ValueError) as error:
        raise DistributedError(f"{cluster.how} does not say where the other processes are: {error}") from error
    if address is None or count is None or index is None:
        raise DistributedError(
            f"{cluster.how} does not say where the other processes are; give coordinator_address, num_processes and "
            "process_id, or skip_jax_distributed_system=true to run alone."
        )
    return address, count, index, None if cluster.one_per_machine or found_ids is None else list(found_ids)


def _cloud_tpu() -> Cluster | None:
    """A machine of a TPU that has several; such machines know it from a server, which only jax asks."""
    tpu = next(kind for kind in clusters.ClusterEnv._cluster_types if kind.name == "gcetpu")
    try:
        return Cluster("Cloud TPU") if tpu.is_env_present() else None
    except OSError:
        # No such server: a TPU elsewhere, whose processes are found by keys or variables.
        return None


def _keep_output(process: int) -> None:
    """Gives standard output to what process 0 prints itself; not to gloo, which writes a line for each device there."""
    given = sys.stdout
    given.flush()
    target = os.dup(given.fileno()) if process == 0 else os.open(os.devnull, os.O_WRONLY)
    sys.stdout = os.fdopen(target, "w", encoding=given.encoding, errors=given.errors, buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, given.fileno())
    os.close(nowhere)


def _facts(config: Config) -> dict[str, str]:
    versions = {d.name: d.version for d in importlib.metadata.distributions() if d.name in _LIBRARIES}
    keys = {name: str(value) for name, value in config.flat().items() if name not in _OWN_KEYS}
    return {**versions, "python": platform.python_version(), **keys}
