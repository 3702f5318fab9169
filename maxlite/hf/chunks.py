"""Runs of rows of a tensor and where they lie in our parameters: what reading and writing move at a time."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from maxlite.hf.plan import Piece
from maxlite.hf.source import row_ranges
from maxlite.hf.transforms import Region

# Called with how many more bytes of files have been read or written.
Progress = Callable[[int], object]
Chunk = tuple[Piece, int, int]

# Few enough that what was read is still in the cache when it is copied; enough that calls do not count.
_CHUNK_ELEMENTS = 1 << 20
_MOST_THREADS = 4
# A model may have a million chunks.
_MOST_QUEUED = 1000


def for_chunks(pool: ThreadPoolExecutor, pieces: list[Piece], move: Callable[[Chunk], int], progress: Progress) -> None:
    """Calls `move` for every chunk of some tensors, several at once, and `progress` with what each returns.

    A chunk is (tensor, first row, last row + 1).
    """
    chunks = [(piece, *rows) for piece in pieces for rows in row_ranges(piece.shape, _CHUNK_ELEMENTS)]
    for start in range(0, len(chunks), _MOST_QUEUED):
        for count in pool.map(move, chunks[start : start + _MOST_QUEUED]):
            progress(count)


def places_of(chunk: Chunk, arrays: Mapping[str, np.ndarray]) -> Iterator[tuple[Region, np.ndarray]]:
    """Yields regions of a chunk that together are all of it, and for each a view of the parameter that it is."""
    piece, start, stop = chunk
    parts = tuple(arrays[slot.path][(*slot.index, ...)] for slot in piece.slots)
    for region, view in piece.transform.regions(parts):
        if not region:
            yield (), view
            continue
        along, *others = region
        first = max(0, -((along.start - start) // along.step))
        last = min(len(view), -((along.start - stop) // along.step))
        if first < last:
            begin, end = (along.start + number * along.step - start for number in (first, last - 1))
            yield (slice(begin, end + 1, along.step), *others), view[first:last]


def share_of(chunk: Chunk, nbytes: int) -> int:
    """Returns how many of the `nbytes` of its tensor a chunk is; those of all its chunks add up to them."""
    piece, start, stop = chunk
    rows = piece.shape[0] if piece.shape else 1
    return nbytes * stop // rows - nbytes * start // rows


def build_pool() -> ThreadPoolExecutor:
    """Returns as many threads as are worth while for copying."""
    return ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1))
