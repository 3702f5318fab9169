"""Degrees of the mesh axes -> a jax Mesh.

Each axis has a degree between slices (dcn) and one within a slice (ici); their product is its size. Axes of
size 1 stay in the mesh: they cost nothing, and every rule then names an axis that exists.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from maxlite.config.degrees import fake_slices, resolve_degrees
from maxlite.config.schema import MESH_AXES, ParallelConfig
from maxlite.errors import ConfigError
from maxlite.parallel.devices import slice_of


def build_mesh(parallel: ParallelConfig, devices: Sequence[jax.Device]) -> Mesh:
    """Arranges `devices` into a mesh with the axes MESH_AXES.

    Several devices of one CPU are fake ones, and stand for as many slices as the dcn degrees multiply to: the first
    slice has the first devices.

    Raises:
        ConfigError: the degrees do not fit the devices.
    """
    num_slices = len({slice_of(device) for device in devices})
    fake = num_slices == 1 and devices[0].platform == "cpu"
    if fake:
        num_slices = fake_slices(parallel, len(devices))
    dcn = resolve_degrees(parallel, "dcn", num_slices)
    ici = resolve_degrees(parallel, "ici", len(devices) // num_slices)
    if fake:
        array = _sliced(devices, dcn, ici)
    elif num_slices > 1 or devices[0].platform == "tpu":
        array = _along_links(devices, dcn, ici)
    else:
        array = np.array(devices).reshape(ici)
    # jax.make_mesh would make Explicit axes, under which an embedding gather raises; all axes here are Auto.
    return Mesh(array, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _along_links(devices: Sequence[jax.Device], dcn: tuple[int, ...], ici: tuple[int, ...]) -> np.ndarray:
    """Neighbours along an axis are neighbours in the torus where its shape allows that."""
    try:
        # Without splitting, an axis must take whole dimensions of the torus: 8 x 2 would not fit one of 4 x 4.
        if max(dcn) > 1:
            return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=True)
        return mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"The ici degrees {ici} of the axes {', '.join(MESH_AXES)} cannot be laid over the links of these devices "
            f"({devices[0].device_kind}): {error} Change the degrees."
        ) from error


def _sliced(devices: Sequence[jax.Device], dcn: tuple[int, ...], ici: tuple[int, ...]) -> np.ndarray:
    """The order that create_hybrid_device_mesh gives real slices: along an axis, all of one slice before the next."""
    array = np.array(devices).reshape(*dcn, *ici)
    rank = len(dcn)
    array = array.transpose([axis for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for axis in pair])
    return array.reshape([between * within for between, within in zip(dcn, ici, strict=True)])
