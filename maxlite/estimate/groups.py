"""Which devices a collective joins, from the notations that XLA writes, and which mesh axes that is.

Devices are places in `mesh.devices.flat`. A program for several slices is written for one of them: its groups count
the devices of a slice, and what goes between slices names devices by their ids, slice * 100000 + place.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import jax
import numpy as np

from maxlite.parallel.devices import slice_of

Groups = tuple[tuple[int, ...], ...]

# [4,2]<=[2,4]T(1,0): the numbers 0 .. n-1 in the shape on the right, transposed, then cut into rows.
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# mesh['a'=4,'b'=2], device_ids=([4,2]T(1,0)) {'b'}: the axes that a group runs along, 'b':(1)2 for a part of one.
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([^)]*(?:\([^)]*\))?[^)]*)\))? \{([^}]*)\}")
_MESH_IOTA = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$")
# {1,2}x{0:3}: slices, by number from one, and the places in them.
_SLICES = re.compile(r"\{([\d,]+)\}x\{(\d+):(\d+)\}")
_ARROWS = re.compile(r"\{(\d+)->(\d+)\}")
_SLICE_STRIDE = 100_000
_LISTS = re.compile(r"\{([\d,\s]*)\}")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh as programs see it. shape: axis -> size; ids, slices: of each device, in the mesh's order."""

    shape: Mapping[str, int]
    ids: tuple[int, ...]
    slices: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of devices."""
        return len(self.ids)

    def of_slice(self, groups: Groups) -> Groups:
        """Returns groups that count the devices of one slice by their places in the mesh."""
        places = [place for place, number in enumerate(self.slices) if number == self.slices[0]]
        return tuple(tuple(places[device] for device in group) for group in groups)

    def of_ids(self, groups: Groups) -> Groups:
        """Returns groups of device ids by their places in the mesh."""
        places = {number: place for place, number in enumerate(self.ids)}
        return tuple(tuple(places[device] for device in group) for group in groups)


def layout_of(mesh: jax.sharding.Mesh) -> Layout:
    """Returns the layout of a mesh of real, fake or absent devices."""
    devices = list(mesh.devices.flat)
    slices = tuple(slice_of(device) for device in devices)
    return Layout(dict(mesh.shape), tuple(device.id for device in devices), slices)


def parse_slice_groups(text: str) -> Groups:
    """Reads what a transfer between slices joins: groups of device ids, or pairs of (from, to)."""
    if match := _SLICES.match(text):
        slices, first, last = _numbers(match[1]), int(match[2]), int(match[3])
        places = range(first, last + 1)
        return tuple(tuple(number * _SLICE_STRIDE + place for number in slices) for place in places)
    inner = text[: text.index("}}") + 1]
    if "->" in inner:
        return tuple((int(source), int(target)) for source, target in _ARROWS.findall(inner))
    return tuple(tuple(_numbers(row)) for row in _LISTS.findall(inner))


def parse_groups(text: str, num_devices: int) -> Groups:
    """Reads the value of `replica_groups=`, which may be followed by more text.

    Raises:
        ValueError: a notation that is not known.
    """
    if match := _MESH.match(text):
        return _rows(_mesh_groups(*match.groups()))
    if match := _IOTA.match(text):
        shape, dims, order = match.groups()
        return _rows(_iota(_numbers(dims), _numbers(order)).reshape(_numbers(shape)))
    if text.startswith("{}"):
        return (tuple(range(num_devices)),)
    if text.startswith("{{"):
        return tuple(tuple(_numbers(row)) for row in _LISTS.findall(text[: text.index("}}") + 1]))
    raise ValueError(f"replica_groups={text[:80]}: a notation that is not known")


def parse_pairs(text: str) -> tuple[tuple[int, int], ...]:
    """Reads the value of `source_target_pairs=`: (from, to), ..."""
    if text.startswith("{}"):
        return ()
    rows = (_numbers(row) for row in _LISTS.findall(text[: text.index("}}") + 1]))
    return tuple((source, target) for source, target in rows)


def axes_of(groups: Iterable[Sequence[int]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the devices of a group differ, in the mesh's order."""
    sizes = tuple(mesh_shape.values())
    differ = np.zeros(len(sizes), bool)
    for group in groups:
        places = np.array(np.unravel_index(np.asarray(group), sizes))
        differ |= (places != places[:, :1]).any(axis=1)
    return tuple(axis for axis, varies in zip(mesh_shape, differ, strict=True) if varies)


def _mesh_groups(axes: str, device_ids: str | None, along: str) -> np.ndarray:
    names, sizes = [], []
    for entry in axes.split(","):
        name, _, size = entry.rpartition("=")
        names.append(name)
        sizes.append(int(size))
    devices = _mesh_devices(device_ids, int(np.prod(sizes))).reshape(sizes)
    # An axis that is used in part is split in three: what lies outside, the part, what lies inside.
    shape: list[int] = []
    place: dict[str, int] = {}
    wanted = [entry.partition(":(") for entry in along.split(",")] if along else []
    cuts = {name: [part for n, _, part in wanted if n == name and part] for name in names}
    for name, size in zip(names, sizes, strict=True):
        edges = {1, size}
        for part in cuts[name]:
            before, _, length = part.partition(")")
            edges |= {int(before), int(before) * int(length)}
        ordered = sorted(edges)
        place |= {f"{name}:{start}": len(shape) + i for i, start in enumerate(ordered[:-1])}
        shape += [end // start for start, end in zip(ordered, ordered[1:], strict=False)]
    picked = []
    for name, _, part in wanted:
        before, _, length = part.partition(")") if part else ("1", "", str(sizes[names.index(name)]))
        first, last = int(before), int(before) * int(length)
        inside = [(int(key.rpartition(":")[2]), at) for key, at in place.items() if key.rpartition(":")[0] == name]
        picked += [at for start, at in inside if first <= start < last]
    split = devices.reshape(shape)
    rest = [axis for axis in range(len(shape)) if axis not in picked]
    width = int(np.prod([shape[axis] for axis in picked], dtype=int))
    return split.transpose([*rest, *picked]).reshape(-1, width)


def _mesh_devices(text: str | None, size: int) -> np.ndarray:
    if text is None:
        return np.arange(size)
    if match := _MESH_IOTA.match(text):
        dims, order = match.groups()
        return _iota(_numbers(dims), _numbers(order))
    return np.array([int(number) for number in re.findall(r"\d+", text)])


def _iota(dims: Sequence[int], order: Sequence[int]) -> np.ndarray:
    numbers = np.arange(int(np.prod(dims))).reshape(dims)
    return numbers.transpose(order) if order else numbers


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in text.split(",")] if text else []


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(int(device) for device in row) for row in array)
