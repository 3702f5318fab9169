"""Degrees of the mesh axes: the -1 filled in, and their product held against the devices."""

import math

from maxlite.config.schema import ParallelConfig
from maxlite.errors import ConfigError

WAYS_OUT = (
    "Change the degrees, or rehearse without the hardware: smoke=true shrinks the model to seconds on a CPU, "
    "and cpu_devices={needed} makes that many fake CPU devices."
)


def fake_slices(parallel: ParallelConfig, num_devices: int) -> int:
    """Returns how many slices `num_devices` fake devices stand for: the product of the dcn degrees, -1 as 1.

    Where they do not divide the devices there is one, and `resolve_degrees` says what is wrong.
    """
    slices = math.prod(degree for degree in parallel.degrees("dcn").values() if degree != -1)
    return slices if slices > 0 and num_devices % slices == 0 else 1


def fake_degrees(parallel: ParallelConfig, num_devices: int) -> dict[str, int]:
    """Returns key -> degree at both levels for `num_devices` fake devices, a -1 filled in.

    Raises:
        ConfigError: as `resolve_degrees`, at the first level that does not fit.
    """
    slices = fake_slices(parallel, num_devices)
    found: dict[str, int] = {}
    for level, count in (("dcn", slices), ("ici", num_devices // slices)):
        found.update(zip(parallel.degrees(level), resolve_degrees(parallel, level, count), strict=True))
    return found


def resolve_degrees(parallel: ParallelConfig, level: str, num_devices: int) -> tuple[int, ...]:
    """Returns the degree of each of MESH_AXES at `level` ("dcn" or "ici"), a -1 filled in.

    num_devices: devices of a slice for ici, slices for dcn.

    Raises:
        ConfigError: their product is not `num_devices`; names the devices, the degrees and the ways out.
    """
    degrees = parallel.degrees(level)
    fixed = math.prod(degree for degree in degrees.values() if degree != -1)
    if fixed > 0 and num_devices % fixed == 0:
        degrees = {name: num_devices // fixed if degree == -1 else degree for name, degree in degrees.items()}
    if math.prod(degrees.values()) != num_devices:
        given = ", ".join(f"{name}={degree}" for name, degree in degrees.items() if degree != 1) or "all 1"
        what = "devices" if level == "ici" else "slices"
        relation = "does not divide" if -1 in degrees.values() else "is not"
        raise ConfigError(
            f"The {level} degrees ({given}) multiply to {fixed}, which {relation} the {num_devices} {what} here. "
            + (WAYS_OUT.format(needed=fixed) if level == "ici" else "Change the dcn degrees.")
        )
    return tuple(degrees.values())
