"""From the tensors of a source to our parameters, one stacked array at a time, and only the parts that are wanted."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from maxlite.hf.boxes import Box, num_elements
from maxlite.hf.chunks import (
    Arrays,
    Boxes,
    Chunk,
    Progress,
    build_pool,
    chunks_to_read,
    for_chunks,
    needed_boxes,
    places_in,
)
from maxlite.hf.copies import copy_values
from maxlite.hf.plan import Piece, Plan
from maxlite.hf.source import Source

# jax takes an array as it is, without a copy, if it begins at a multiple of this.
_ALIGNMENT = 64


def read_parameters(
    plan: Plan, source: Source, boxes: Boxes, progress: Progress
) -> Iterator[tuple[str, dict[Box, np.ndarray]]]:
    """Yields path and wanted boxes of every parameter, in the dtype that the plan's model has for it.

    Of the files only what these boxes need is read, and that once. Each array is made when it is asked for and not
    held here afterwards: memory is that of one parameter's boxes (of a few, if they share tensors) and of a chunk a
    thread. `check_tensors` comes first.

    boxes: path -> what is wanted of the parameter, `whole` of its shape for all of it.
    progress: called with how many more bytes of files have been read, `num_bytes` in all.
    """
    with build_pool() as pool:
        for paths, pieces in plan.bundles.items():
            # A dictionary of its own for each, so that nothing here holds what has been handed on.
            arrays = {path: _new_arrays(plan, path, boxes) for path in paths}
            _read_pieces(pieces, source, arrays, pool, progress)
            for path in paths:
                yield path, arrays.pop(path)


def num_bytes(plan: Plan, source: Source, boxes: Boxes) -> int:
    """Returns how many bytes of files read_parameters reads, but for what a source can only read in vain."""
    return sum(
        _share(piece, source, sum(num_elements(box) for box in needed_boxes(piece, boxes))) for piece in plan.pieces
    )


def _read_pieces(
    pieces: list[Piece], source: Source, arrays: Arrays, pool: ThreadPoolExecutor, progress: Progress
) -> None:
    def read(chunk: Chunk) -> int:
        values = source.part(chunk.piece.tensor, chunk.box)
        for region, view in places_in(chunk):
            copy_values(view, values[(*region, ...)])
        before, after = (_share(chunk.piece, source, count) for count in (chunk.before, chunk.before + values.size))
        return after - before

    for_chunks(pool, (chunk for piece in pieces for chunk in chunks_to_read(piece, arrays)), read, progress)


def _share(piece: Piece, source: Source, elements: int) -> int:
    """Returns how many bytes of files so many elements of a tensor are."""
    return source.tensors[piece.tensor].nbytes * elements // max(1, math.prod(piece.shape))


def _new_arrays(plan: Plan, path: str, boxes: Boxes) -> dict[Box, np.ndarray]:
    dtype = plan.parameters[path].dtype
    return {box: _aligned(tuple(stop - start for start, stop in box), dtype) for box in boxes[path]}


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + nbytes].view(dtype).reshape(shape)
