"""Runs of rows of a tensor and where they lie in our parameters: what reading and writing move at a time."""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from maxlite.hf.boxes import Box, index_of, num_elements, union, whole
from maxlite.hf.plan import Piece, Slot
from maxlite.hf.source import row_ranges
from maxlite.hf.transforms import Region

# Called with how many more bytes of files have been read or written.
Progress = Callable[[int], object]
# A region of a tensor, and the view of one of our arrays that it is.
Place = tuple[Region, np.ndarray]
# Path -> boxes of the parameter -> an array that holds just that box, C-contiguous.
Arrays = Mapping[str, Mapping[Box, np.ndarray]]
# Path -> boxes of the parameter that are wanted.
Boxes = Mapping[str, Iterable[Box]]

# Few enough that what was read is still in the cache when it is copied; enough that calls do not count.
_CHUNK_ELEMENTS = 1 << 20
_MOST_THREADS = 4
# A model may have a million chunks.
_MOST_QUEUED = 1000


class Chunk(NamedTuple):
    """A box of a tensor of the files that is read or written at once.

    places: of the whole tensor; `places_in` gives those of the chunk.
    before: how many elements of the tensor come in chunks before this one.
    """

    piece: Piece
    box: Box
    places: list[Place]
    before: int


def places_of(piece: Piece, arrays: Arrays) -> list[Place]:
    """Returns the regions of a tensor that our arrays have, and for each the view of an array that it is."""
    places = []
    for slot, box, region, part in _regions_of(piece, arrays):
        held = arrays[slot.path][box][index_of(part, box)]
        places.append((region, piece.transform.view(held[(*[0] * len(slot.index), ...)])))
    return places


def needed_boxes(piece: Piece, boxes: Boxes) -> tuple[Box, ...]:
    """Returns boxes of a tensor of the files that together hold what the boxes of our parameters need, each once."""
    return _hulls(region for _, _, region, _ in _regions_of(piece, boxes))


def chunks_to_read(piece: Piece, arrays: Arrays) -> Iterator[Chunk]:
    """Yields as chunks what our arrays need of a tensor."""
    places = places_of(piece, arrays)
    return _chunks(piece, _hulls(region for region, _ in places), places)


def chunks_to_write(piece: Piece, arrays: Mapping[str, np.ndarray]) -> Iterator[Chunk]:
    """Yields as chunks of whole rows a tensor of whose parameters there is all."""
    places = places_of(piece, {path: {whole(array.shape): array} for path, array in arrays.items()})
    return _chunks(piece, [whole(piece.shape)], places)


def places_in(chunk: Chunk) -> Iterator[Place]:
    """Yields regions of a chunk that together are all of it, and for each the view of an array that it is."""
    for region, view in chunk.places:
        inside, taken = [], []
        for along, (start, stop), size in zip(region, chunk.box, view.shape, strict=True):
            first = max(0, -((along.start - start) // along.step))
            last = min(size, -((along.start - stop) // along.step))
            if first >= last:
                break
            begin, end = (along.start + number * along.step - start for number in (first, last - 1))
            inside.append(slice(begin, end + 1, along.step))
            taken.append(slice(first, last))
        else:
            yield tuple(inside), view[tuple(taken)] if taken else view


def for_chunks(
    pool: ThreadPoolExecutor, chunks: Iterable[Chunk], move: Callable[[Chunk], int], progress: Progress
) -> None:
    """Calls `move` for every chunk, several at once, and `progress` with what each returns."""
    remaining = iter(chunks)
    while queued := list(itertools.islice(remaining, _MOST_QUEUED)):
        for count in pool.map(move, queued):
            progress(count)


def build_pool() -> ThreadPoolExecutor:
    """Returns as many threads as are worth while for copying."""
    return ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1))


def _regions_of(piece: Piece, boxes: Boxes) -> Iterator[tuple[Slot, Box, Region, Box]]:
    """Yields for each box of a parameter that has part of the tensor: regions of the tensor, parts of the parameter."""
    shapes = tuple(slot.shape for slot in piece.slots)
    for number, slot in enumerate(piece.slots):
        lead = len(slot.index)
        at = tuple((entry, entry + 1) for entry in slot.index)
        for box in boxes[slot.path]:
            if all(start <= entry < stop for entry, (start, stop) in zip(slot.index, box, strict=False)):
                for region, part in piece.transform.regions(shapes, number, box[lead:]):
                    yield slot, box, region, at + part


def _hulls(regions: Iterable[Region]) -> tuple[Box, ...]:
    # Tensors whose rows or columns take turns are wanted from all parameters that share them, so hulls hold no more.
    return union(frozenset(tuple((along.start, along.stop) for along in region) for region in regions))


def _chunks(piece: Piece, boxes: Iterable[Box], places: list[Place]) -> Iterator[Chunk]:
    before = 0
    for box in boxes:
        for run in _runs(box):
            yield Chunk(piece, run, places, before)
            before += num_elements(run)


def _runs(box: Box) -> list[Box]:
    """Cuts a box into runs of rows."""
    if not box:
        return [box]
    (first, last), *others = box
    sizes = (last - first, num_elements(tuple(others)))
    return [((first + start, first + stop), *others) for start, stop in row_ranges(sizes, _CHUNK_ELEMENTS)]
