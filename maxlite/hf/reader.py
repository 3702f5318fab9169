"""From the tensors of a source to our parameters, one stacked array at a time."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from maxlite.hf.chunks import Chunk, Progress, build_pool, for_chunks, places_of, share_of
from maxlite.hf.copies import copy_values
from maxlite.hf.plan import Plan
from maxlite.hf.source import Source

# jax takes an array as it is, without a copy, if it begins at a multiple of this.
_ALIGNMENT = 64


def read_parameters(plan: Plan, source: Source, progress: Progress) -> Iterator[tuple[str, np.ndarray]]:
    """Yields path and value of every parameter, in the shape and dtype that the plan's model has for it.

    Each array is made when it is asked for and not held here afterwards: memory is that of one array (of a few, if
    they share tensors) and of a chunk a thread. `check_tensors` comes first.

    progress: called with how many more bytes of files have been read, `num_bytes` in all.
    """
    with build_pool() as pool:
        for paths, pieces in plan.bundles.items():
            arrays = {path: _aligned(plan.parameters[path].shape, plan.parameters[path].dtype) for path in paths}

            def read(chunk: Chunk, arrays: Mapping[str, np.ndarray] = arrays) -> int:
                return _read_chunk(chunk, source, arrays)

            for_chunks(pool, pieces, read, progress)
            del read
            for path in paths:
                yield path, arrays.pop(path)


def num_bytes(plan: Plan, source: Source) -> int:
    """Returns how many bytes of files read_parameters reads."""
    return sum(source.tensors[piece.tensor].nbytes for piece in plan.pieces)


def _read_chunk(chunk: Chunk, source: Source, arrays: Mapping[str, np.ndarray]) -> int:
    piece, start, stop = chunk
    rows = source.rows(piece.tensor, start, stop)
    for region, view in places_of(chunk, arrays):
        copy_values(view, rows[(*region, ...)])
    return share_of(chunk, source.tensors[piece.tensor].nbytes)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)
