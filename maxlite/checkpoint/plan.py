"""Which process writes which bytes of which array: a pure function of shapes and shardings, the same on every process.

As orbax writes: each part of an array once. Where several devices hold the same part, each of them writes one of as
many equal slices of it, if a dimension can be cut so; otherwise the first of them writes all of it.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax

from maxlite.checkpoint.tree import leaf_paths

# (start, stop) of each dimension.
Region = tuple[tuple[int, int], ...]

_HOST_MEMORY = "pinned_host"
# Arrays in the host's memory are laid out in tiles. orbax cuts those alone that are whole tiles.
_TILE_ELEMENTS, _TILE_ROW = 1024, 128


class Piece(NamedTuple):
    """What one device writes of an array."""

    process: int
    region: Region
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """Who writes an array. pieces: disjoint, together all of it, in the order of the mesh's devices."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    pieces: tuple[Piece, ...]

    def bytes_of(self) -> collections.Counter[int]:
        """Returns process -> bytes that it writes; a process that writes none is left out."""
        counted: collections.Counter[int] = collections.Counter()
        for piece in self.pieces:
            counted[piece.process] += piece.num_bytes
        return counted


def plan_writes(state: Any, process_of: Callable[[jax.Device], int] | None = None) -> dict[str, LeafPlan]:
    """Returns slash-joined path -> who writes that leaf. Bytes are those in memory, before compression.

    Args:
        state: pytree of arrays or jax.ShapeDtypeStruct, with shardings of all processes' devices.
        process_of: which process a device belongs to; None asks the device.
    """
    owner = process_of or (lambda device: device.process_index)
    return {path: _plan_leaf(leaf, owner) for path, leaf in leaf_paths(state).items()}


def process_bytes(plan: Mapping[str, LeafPlan], num_processes: int) -> list[int]:
    """Returns the bytes that each process writes of all leaves."""
    total: collections.Counter[int] = collections.Counter()
    for leaf in plan.values():
        total.update(leaf.bytes_of())
    assert total.keys() <= set(range(num_processes)), "a device of a process that is not counted"
    return [total[process] for process in range(num_processes)]


def _plan_leaf(leaf: Any, owner: Callable[[jax.Device], int]) -> LeafPlan:
    shape, itemsize = tuple(leaf.shape), leaf.dtype.itemsize
    held = {device: _region(index, shape) for device, index in leaf.sharding.devices_indices_map(shape).items()}
    copies = collections.Counter(held.values())
    (num_copies,) = set(copies.values())
    part = next(iter(held.values()))
    cut = None if _stays_whole(part, leaf.sharding.memory_kind) else _cut_dimension(part, num_copies)
    seen: collections.Counter[Region] = collections.Counter()
    pieces = []
    for device, region in held.items():
        copy, seen[region] = seen[region], seen[region] + 1
        if cut is not None:
            region = _slice(region, cut, copy, num_copies)
        elif copy > 0:
            continue
        pieces.append(Piece(owner(device), region, _num_elements(region) * itemsize))
    return LeafPlan(shape, str(leaf.dtype), math.prod(shape) * itemsize, tuple(pieces))


def _region(index: Iterable[slice], shape: tuple[int, ...]) -> Region:
    return tuple(places.indices(size)[:2] for places, size in zip(index, shape, strict=True))


def _stays_whole(part: Region, memory_kind: str | None) -> bool:
    if memory_kind != _HOST_MEMORY:
        return False
    last = part[-1][1] - part[-1][0] if part else 1
    return len(part) < 2 or _num_elements(part) % _TILE_ELEMENTS != 0 or last % _TILE_ROW != 0


def _cut_dimension(part: Region, num_copies: int) -> int | None:
    """The first dimension of a part that divides into a slice for each copy."""
    if num_copies == 1 or _num_elements(part) == 0:
        return None
    return next((dim for dim, (start, stop) in enumerate(part) if (stop - start) % num_copies == 0), None)


def _slice(region: Region, dim: int, copy: int, num_copies: int) -> Region:
    start, stop = region[dim]
    size = (stop - start) // num_copies
    return (*region[:dim], (start + copy * size, start + (copy + 1) * size), *region[dim + 1 :])


def _num_elements(region: Region) -> int:
    return math.prod(stop - start for start, stop in region)
