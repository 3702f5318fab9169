"""Degrees of the mesh axes -> a jax Mesh.

Each axis has a degree between slices (dcn) and one within a slice (ici); their product is its size. Axes of
size 1 stay in the mesh: they cost nothing, and every rule then names an axis that exists.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from maxlite.config.degrees import resolve_degrees
from maxlite.config.schema import MESH_AXES, ParallelConfig


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
