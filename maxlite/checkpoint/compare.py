"""Two steps side by side, array by array: which they lack, other shapes and dtypes, other values."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxlite.checkpoint.leaves import open_leaves
from maxlite.checkpoint.record import Leaf
from maxlite.checkpoint.step_folder import verify_files

# Values are compared in blocks of so many elements, beside the two arrays themselves.
_BLOCK = 1 << 20


class LeafDifference(NamedTuple):
    """How the values of an array differ. NaN equals NaN, and -0 equals 0.

    count, total: elements that differ, of so many. largest: absolute difference of those that are finite in both.
    not_finite: elements among `count` that are infinite or NaN in one or both.
    """

    path: str
    count: int
    total: int
    largest: float
    not_finite: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """only_first, only_second: what one step alone has. shapes, dtypes: path -> (first, second), where they differ.

    values: of arrays of one shape, those that differ. equal: number of arrays with equal values.
    """

    only_first: dict[str, Leaf]
    only_second: dict[str, Leaf]
    shapes: dict[str, tuple[Leaf, Leaf]]
    dtypes: dict[str, tuple[Leaf, Leaf]]
    values: list[LeafDifference]
    equal: int


def compare_steps(first: Path, second: Path) -> Comparison:
    """Compares the arrays of two steps' folders; two arrays are in memory at a time.

    Raises:
        CheckpointError: one of them is damaged.
    """
    one, other = verify_files(first).leaves, verify_files(second).leaves
    pairs = {path: (leaf, other[path]) for path, leaf in one.items() if path in other}
    shapes = {path: pair for path, pair in pairs.items() if pair[0].shape != pair[1].shape}
    with open_leaves(first, one) as reader, open_leaves(second, other) as other_reader:
        alike = [path for path in pairs if path not in shapes]
        found = [_difference(path, reader.read(path), other_reader.read(path)) for path in alike]
    return Comparison(
        only_first={path: leaf for path, leaf in one.items() if path not in pairs},
        only_second={path: leaf for path, leaf in other.items() if path not in pairs},
        shapes=shapes,
        dtypes={path: pair for path, pair in pairs.items() if pair[0].dtype != pair[1].dtype},
        values=[difference for difference in found if difference.count],
        equal=sum(difference.count == 0 for difference in found),
    )


def _difference(path: str, first: np.ndarray, second: np.ndarray) -> LeafDifference:
    count, largest, not_finite = 0, 0.0, 0
    for one, other in _blocks(first, second):
        differs = one != other
        differs &= ~((one != one) & (other != other))
        if not differs.any():
            continue
        x, y = one[differs].astype(np.float64), other[differs].astype(np.float64)
        finite = np.isfinite(x) & np.isfinite(y)
        count += x.size
        not_finite += x.size - int(finite.sum())
        largest = max(largest, float(np.abs(x[finite] - y[finite]).max(initial=0.0)))
    return LeafDifference(path, count, first.size, largest, not_finite)


def _blocks(first: np.ndarray, second: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields beginning to end in pieces, in a dtype that holds the values of both exactly."""
    first, second = first.reshape(-1), second.reshape(-1)
    for start in range(0, first.size, _BLOCK):
        one, other = first[start : start + _BLOCK], second[start : start + _BLOCK]
        if one.dtype != other.dtype:
            one, other = one.astype(np.float64), other.astype(np.float64)
        yield one, other
