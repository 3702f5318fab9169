"""Degrees of the mesh axes: the -1 filled in, and their product held against the devices."""

import math

from maxlite.config.schema import ParallelConfig
from maxlite.errors import ConfigError

WAYS_OUT = (
    "Change the degrees, or rehearse without the hardware: smoke=true shrinks the model to seconds on a CPU, "
    "and cpu_devices={needed} makes that many fake CPU devices."
)


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
        given = ", ".join(f"{name}={degree}" for name, degree in degrees.items())
        what = "devices" if level == "ici" else "slices"
        relation = "does not divide" if -1 in degrees.values() else "is not"
        raise ConfigError(
            f"The {level} degrees ({given}) multiply to {fixed}, which {relation} the {num_devices} {what} here. "
            + (WAYS_OUT.format(needed=fixed) if level == "ici" else "Change the dcn degrees.")
        )
    return tuple(degrees.values())
