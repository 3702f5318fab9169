"""The devices of a run: those of the machine, or fake ones on its CPU."""

import contextlib
import os
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxlite.config.schema import Config, RunConfig
from maxlite.errors import ConfigError
from maxlite.processes.group import num_processes
from maxlite.processes.join import join, show_place

# jax's name of the host's memory that devices copy from and to.
HOST_MEMORY = "pinned_host"


def slice_of(device: jax.Device) -> int:
    """Returns the slice that a device is in; devices that know of none are all in one."""
    return getattr(device, "slice_index", None) or 0


def prepare_jax(config: Config) -> None:
    """Joins the other processes of the run, turns on the compile cache and asks for `cpu_devices` fake devices.

    To be called before jax makes an array. In a process whose devices exist already (a test, a notebook),
    `run_devices` takes the first ones instead.

    Raises:
        ConfigError, DistributedError: as `join` and `show_place`.
    """
    run = config.run
    join(config)
    if run.jax_cache_dir is not None:
        _require_writable(Path(run.jax_cache_dir).expanduser())
        jax.config.update("jax_compilation_cache_dir", str(Path(run.jax_cache_dir).expanduser()))
        # jax's own defaults leave small programs out; a run's start is made of small programs.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if run.cpu_devices:
        # Refused by jax once devices exist, and there is no public question for that; run_devices then counts them.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", run.cpu_devices)
            jax.config.update("jax_platforms", "cpu")
    show_place()


def run_devices(run: RunConfig) -> list[jax.Device]:
    """Returns the devices of the run, of all its processes, one process after the other.

    Raises:
        ConfigError: this process has fewer than `cpu_devices`.
    """
    if not run.cpu_devices:
        return jax.devices()
    here = jax.local_devices(backend="cpu")
    if len(here) < run.cpu_devices:
        raise ConfigError(
            f"cpu_devices={run.cpu_devices}, but this process already runs with {len(here)} CPU devices; "
            "start a new one, without xla_force_host_platform_device_count in XLA_FLAGS."
        )
    devices = jax.devices("cpu")
    groups = [[d for d in devices if d.process_index == process] for process in range(num_processes())]
    return [device for group in groups for device in group[: run.cpu_devices]]


def host_value(array: jax.Array) -> np.ndarray:
    """Returns the whole of `array`, also where other processes hold parts of it; then all call this together."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise ConfigError(f"jax_cache_dir={folder} can't be written; choose another folder, or jax_cache_dir=null.")


def device_memory_bytes(devices: list[jax.Device]) -> int | None:
    """Returns the memory that one device can use now, or None where neither it nor the system says.

    Fake CPU devices share what the host has available.
    """
    here = [device for device in devices if device.process_index == jax.process_index()]
    stats = here[0].memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    memory_info = Path("/proc/meminfo")
    if here[0].platform != "cpu" or not memory_info.is_file():
        return None
    fields = dict(line.split(":", 1) for line in memory_info.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024 // len(here)
