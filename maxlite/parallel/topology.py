"""TPU slices that are not here: their devices, to compile for, and what one of them can do.

A name is a generation and a number, as clouds sell it: v5e and v6e count chips, v4, v5p and tpu7x count cores, two a
chip. Only the two cores of a tpu7x chip are devices of their own; elsewhere a chip is a device.
"""

import contextlib
import dataclasses
import importlib.util
import os
from collections.abc import Iterator, Sequence

import jax
from jax.experimental import topologies
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from maxlite.errors import ConfigError

_GIB = 2**30
_CORES_A_CHIP = 2


@dataclasses.dataclass(frozen=True)
class DeviceSpec:
    """What one device can do, from the maker's data sheets.

    memory_bytes: high-bandwidth memory that a compiled program may fill, which is what the compiler itself allows.
    memory_bandwidth: bytes per second between it and the cores.
    link_bandwidth: bytes per second of one link to a neighbour, in one direction; a dimension of the torus has two.
    network_bandwidth: bytes per second to other slices, its share of its host's network cards.
    """

    memory_bytes: int
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float


@dataclasses.dataclass(frozen=True)
class _Generation:
    """name: XLA's. counts_cores: its slices are named by cores. flat: a 2-D torus. largest: slice, in chips.

    chip_config: how XLA is to use the cores of a chip, by its name for it; None leaves that to XLA.
    """

    name: str
    spec: DeviceSpec
    counts_cores: bool
    flat: bool
    largest: int
    chip_config: str | None = None


_GENERATIONS = {
    # Two cores of a v4 chip work as one device, as runs on it have them.
    "v4": _Generation(
        "v4",
        DeviceSpec(int(30.75 * _GIB), 1228e9, 50e9, 6.25e9),
        counts_cores=True,
        flat=False,
        largest=2048,
        chip_config="megacore",
    ),
    "v5e": _Generation(
        "v5e", DeviceSpec(int(15.75 * _GIB), 819e9, 50e9, 3.125e9), counts_cores=False, flat=True, largest=256
    ),
    "v5p": _Generation(
        "v5p", DeviceSpec(int(95.74 * _GIB), 2765e9, 100e9, 6.25e9), counts_cores=True, flat=False, largest=4096
    ),
    "v6e": _Generation(
        "v6e", DeviceSpec(int(31.25 * _GIB), 1638e9, 100e9, 12.5e9), counts_cores=False, flat=True, largest=256
    ),
    # Of all of these a core has half of its chip's.
    "tpu7x": _Generation(
        "tpu7x", DeviceSpec(int(94.75 * _GIB), 3690e9, 50e9, 6.25e9), counts_cores=True, flat=False, largest=4096
    ),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """One or more equal slices.

    devices: of all slices, for `build_mesh` and `jit(...).lower(...).compile()`; nothing can run on them.
    shape: chips along each dimension of a slice's torus. wraps: whether the ends of a dimension are linked.
    """

    num_slices: int
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    devices: Sequence[jax.Device]
    spec: DeviceSpec


def topology_names() -> list[str]:
    """Returns every name, by generation and size."""
    names = []
    for label, generation in _GENERATIONS.items():
        smallest = 1 if generation.flat else 4
        sizes = [2**power for power in range(13) if smallest <= 2**power <= generation.largest]
        # Two chips are no slice of a flat torus.
        chips = [size for size in sizes if size != 2]
        names += [f"{label}-{size * (_CORES_A_CHIP if generation.counts_cores else 1)}" for size in chips]
    return names


def _listed() -> str:
    """All names, each generation once: v5e-1, 4, 8 or v6e-1, 4."""
    numbers: dict[str, list[str]] = {}
    for name in topology_names():
        label, _, number = name.partition("-")
        numbers.setdefault(label, []).append(number)
    return " or ".join(f"{label}-{', '.join(sizes)}" for label, sizes in numbers.items())


def torus(chips: int, flat: bool) -> tuple[int, ...]:
    """Returns the shape of a slice of so many chips: as near to a square or cube as powers of two allow."""
    power = chips.bit_length() - 1
    if flat:
        return (2 ** (power // 2), 2 ** (power - power // 2))
    return (2, 2, 1) if chips == 4 else tuple(2 ** ((power + extra) // 3) for extra in range(3))


def device_spec(device_kind: str) -> DeviceSpec | None:
    """Returns what a TPU of this kind, as jax names it, can do; None for another device."""
    labels = {"TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5": "v5p", "TPU v6 lite": "v6e", "TPU7x": "tpu7x"}
    return _GENERATIONS[labels[device_kind]].spec if device_kind in labels else None


def build_topology(name: str, num_slices: int) -> Topology:
    """Asks libtpu for the devices of `num_slices` slices called `name`; to be called before jax makes an array.

    Raises:
        ConfigError: the name is not known, or libtpu is not installed.
    """
    label, _, number = name.partition("-")
    if name not in topology_names():
        raise ConfigError(f"compile_topology={name} is not known; it is one of {_listed()}.")
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f'compile_topology={name} needs the TPU compiler, which is not installed: pip install "maxlite[tpu]". '
            "Without it, leave compile_topology away and estimate on fake devices: cpu_devices=8."
        )
    _prepare_process()
    generation = _GENERATIONS[label]
    chips = int(number) // (_CORES_A_CHIP if generation.counts_cores else 1)
    shape = torus(chips, generation.flat)
    wraps = tuple(_wraps(shape, generation.flat))
    options = {} if generation.chip_config is None else {"chip_config_name": generation.chip_config}
    description = topologies.get_topology_desc(
        f"{generation.name}:{'x'.join(map(str, shape))}",
        platform="tpu",
        chips_per_host_bounds=(2, 2, 1) if chips > 1 else (1, 1, 1),
        num_slices=num_slices,
        wrap=(*wraps, False)[:3],
        **options,
    )
    return Topology(num_slices, shape, wraps, description.devices, generation.spec)


@contextlib.contextmanager
def without_compile_cache() -> Iterator[None]:
    """Keeps jax from its compile cache: a program for absent devices can be written to it, but not read from it."""
    # jax declares its settings where a type checker does not see them.
    enabled = getattr(jax.config, "jax_enable_compilation_cache")  # noqa: B009
    jax.config.update("jax_enable_compilation_cache", False)
    # jax asks the setting once and remembers the answer.
    reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        reset_cache()


def _wraps(shape: tuple[int, ...], flat: bool) -> list[bool]:
    """A flat slice closes its rings where it is as long as the pod; a cube where all of it is whole blocks of 4."""
    return [size == 16 for size in shape] if flat else [min(shape) >= 4] * 3


def _prepare_process() -> None:
    """Lets libtpu compile here without a chip, beside other processes that use it."""
    os.environ |= {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # Nobody is asked what machine this is, nor is it searched for a chip.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    jax.config.update("jax_platforms", "cpu")
