"""Boxes of arrays: a first and a last entry + 1 for each dimension."""

import functools
import itertools
import math
from collections.abc import Iterable

Box = tuple[tuple[int, int], ...]


def whole(shape: Iterable[int]) -> Box:
    """Returns the box that is all of an array."""
    return tuple((0, size) for size in shape)


def num_elements(box: Box) -> int:
    """Returns how many elements a box has."""
    return math.prod(stop - start for start, stop in box)


def index_of(box: Box, origin: Box) -> tuple[slice, ...]:
    """Returns the index by which an array that is `origin` gives `box`, which lies within it."""
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, origin, strict=True))


# Layers are alike, and so are experts.
@functools.lru_cache(maxsize=256)
def union(boxes: frozenset[Box]) -> tuple[Box, ...]:
    """Returns boxes that do not overlap and together hold what any of `boxes` does, and nothing else; long ones."""
    if len(boxes) < 2:
        return tuple(box for box in boxes if num_elements(box))
    # What lies along the first dimension behind the same part of the others.
    along: dict[Box, list[tuple[int, int]]] = {}
    for bounds, *others in sorted(boxes):
        along.setdefault(tuple(others), []).append(bounds)
    merged = {others: _merge(ranges) for others, ranges in along.items()}
    cuts = sorted({cut for ranges in merged.values() for bounds in ranges for cut in bounds})
    found: list[tuple[tuple[int, int], tuple[Box, ...]]] = []
    for start, stop in itertools.pairwise(cuts):
        behind = [others for others, ranges in merged.items() if any(a <= start and stop <= b for a, b in ranges)]
        rest = union(frozenset(behind))
        if found and found[-1] == ((found[-1][0][0], start), rest):
            start = found.pop()[0][0]
        found.append(((start, stop), rest))
    return tuple((bounds, *box) for bounds, rest in found for box in rest)


def _merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Joins ranges, in the order of their starts, that touch or overlap; drops empty ones."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        elif start < stop:
            merged.append((start, stop))
    return merged
