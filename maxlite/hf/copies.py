"""Copying between arrays of different dtype and order of dimensions, a cache's worth at a time."""

import itertools
from collections.abc import Iterator

import numpy as np

# A tile of both arrays stays in the fastest cache: a plain `target[:] = source.T` is four times slower.
_TILE = 128
# Elements converted at once where the orders agree.
_BLOCK = 1 << 18


def copy_values(target: np.ndarray, source: np.ndarray) -> None:
    """Copies `source` into `target` of the same shape, rounding to its dtype to nearest, ties to even."""
    assert target.shape == source.shape, f"{source.shape} does not go into {target.shape}"
    if target.dtype == source.dtype and target.itemsize <= 8:
        # Plain integers: numpy copies them without asking the dtype about every element.
        bits = np.dtype(f"u{target.itemsize}")
        target, source = target.view(bits), source.view(bits)
    for part in _parts(target, source):
        piece = source[part]
        target[part] = piece if piece.dtype == target.dtype else piece.astype(target.dtype)


def _parts(target: np.ndarray, source: np.ndarray) -> Iterator[tuple[slice | int, ...]]:
    """Yields the indices of pieces that together are the whole."""
    if target.ndim < 2 or not _crossed(target, source):
        rows = max(1, _BLOCK * len(target) // max(1, target.size)) if target.ndim else 1
        if target.dtype == source.dtype or target.ndim == 0:
            yield ()
        else:
            yield from ((slice(start, start + rows),) for start in range(0, len(target), rows))
        return
    *lead, rows, columns = target.shape
    for index in itertools.product(*(range(size) for size in lead)):
        for row in range(0, rows, _TILE):
            for column in range(0, columns, _TILE):
                yield (*index, slice(row, row + _TILE), slice(column, column + _TILE))


def _crossed(target: np.ndarray, source: np.ndarray) -> bool:
    """Whether the last two dimensions lie in memory in opposite orders."""
    return (target.strides[-1] > target.strides[-2]) != (source.strides[-1] > source.strides[-2])
