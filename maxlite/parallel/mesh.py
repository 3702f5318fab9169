"""Degrees of the mesh axes -> a jax Mesh.

Each axis has a degree between slices (dcn) and one within a slice (ici); their product is its size. Axes of
size 1 stay in the mesh: they cost nothing, and every rule then names an axis that exists.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from maxlite.config.schema import MESH_AXES, ParallelConfig
from maxlite.errors import ConfigError

WAYS_OUT = (
    "Change the degrees, or rehearse without the hardware: smoke=true shrinks the model to seconds on a CPU, "
    "and cpu_devices={needed} makes that many fake CPU devices."
)


def resolve_degrees(parallel: ParallelConfig, level: str, num_devices: int) -> tuple[int, ...]:
    """Returns the degree of each of MESH_AXES at `level` ("dcn" or "ici"), a -1 filled in.

    Raises:
        ConfigError: their product is not `num_devices`; names the devices, the degrees and the ways out.
    """
    names, degrees = zip(*parallel.degrees(level).items(), strict=True)
    degrees = list(degrees)
    fixed = math.prod(degree for degree in degrees if degree != -1)
    if -1 in degrees and num_devices % fixed == 0:
        degrees[degrees.index(-1)] = num_devices // fixed
    if math.prod(degrees) != num_devices:
        given = ", ".join(f"{name}={degree}" for name, degree in zip(names, degrees, strict=True))
        what = "devices" if level == "ici" else "slices"
        relation = "does not divide" if -1 in degrees else "is not"
        raise ConfigError(
            f"The {level} degrees ({given}) multiply to {fixed}, which {relation} the {num_devices} {what} here. "
            + (WAYS_OUT.format(needed=fixed) if level == "ici" else "Change the dcn degrees.")
        )
    return tuple(degrees)


def build_mesh(parallel: ParallelConfig, devices: Sequence[jax.Device]) -> Mesh:
    """Arranges `devices` into a mesh with the axes MESH_AXES.

    Raises:
        ConfigError: the degrees do not fit the devices.
    """
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    dcn = resolve_degrees(parallel, "dcn", num_slices)
    ici = resolve_degrees(parallel, "ici", len(devices) // num_slices)
    if num_slices > 1:
        array = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices)
    elif devices[0].platform == "tpu":
        array = mesh_utils.create_device_mesh(ici, devices)
    else:
        array = np.array(devices).reshape(ici)
    # jax.make_mesh would make Explicit axes, under which an embedding gather raises; all axes here are Auto.
    return Mesh(array, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
