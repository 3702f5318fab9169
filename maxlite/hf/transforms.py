"""How one tensor of a Hugging Face folder holds one or several of our parameters.

A transform never computes: it names, for each of our arrays or any box of one, a view of it in the layout of the file
and the region of the file's tensor where that view lies. Reading copies region to view, writing copies view to
region, so that every transform is its own inverse, and a tensor can be read or written a few rows at a time, or only
the part that some devices hold.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import numpy as np

from maxlite.hf.boxes import Box

Shape = tuple[int, ...]
Region = tuple[slice, ...]
Turn = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Transform:
    """The layout of a file's tensor in terms of ours.

    text: what it does, in words, for `convert-hf --explain`.
    turn: our array (C-contiguous) -> a view of it with the dimensions of the file, some of ours merged, then permuted.
    axis: the file's axis along which several of our arrays share one tensor; None if it holds just one.
    interleaved: whether they take turns along that axis, instead of standing one after the other.
    grouped: whether `turn` gives [groups, rows, ...], of which the file makes one dimension: group after group, and in
        each the rows of one array after those of another.
    """

    text: str
    turn: Turn
    axis: int | None = None
    interleaved: bool = False
    grouped: bool = False

    def file_shape(self, shapes: tuple[Shape, ...]) -> Shape:
        """Returns the shape in the file of a tensor that holds our arrays of these shapes."""
        parts = [_turned_shape(self.turn, shape) for shape in shapes]
        if self.axis is None:
            assert len(parts) == 1, "only a joined or interleaved tensor holds several arrays"
            return parts[0]
        axis = self.axis % len(parts[0])
        others = {part[:axis] + part[axis + 1 :] for part in parts}
        assert len(others) == 1, f"arrays of the shapes {parts} cannot share one tensor along axis {axis}"
        shape = parts[0][:axis] + (sum(part[axis] for part in parts),) + parts[0][axis + 1 :]
        return (shape[0] * shape[1], *shape[2:]) if self.grouped else shape

    def regions(self, shapes: tuple[Shape, ...], number: int, box: Box) -> tuple[tuple[Region, Box], ...]:
        """Returns boxes that together are `box` of one of our arrays, and for each the region of the file's tensor.

        shapes: of all our arrays in the tensor. number: which of them.
        """
        return _regions(self, shapes, number, box)

    def region(self, turned: list[tuple[int, int]], shapes: tuple[Shape, ...], number: int) -> Region:
        """Returns where in the file a box of what `turn` makes of one of our arrays lies; of one group if grouped."""
        if self.axis is None:
            return tuple(slice(*bounds, 1) for bounds in turned)
        lengths = [_turned_shape(self.turn, shape)[self.axis] for shape in shapes]
        shift, step = sum(lengths[:number]), 1
        if self.interleaved:
            shift, step = number, len(shapes)
        axis = self.axis % len(turned)
        if self.grouped:
            (group, _), *turned = turned
            shift, axis = shift + group * sum(lengths), axis - 1
        region = [slice(*bounds, 1) for bounds in turned]
        start, stop = turned[axis]
        region[axis] = slice(shift + start * step, shift + (stop - 1) * step + 1, step)
        return tuple(region)

    def view(self, part: np.ndarray) -> np.ndarray:
        """Returns a box that `regions` yields in the layout of its region: a view, not a copy."""
        turned = self.turn(part)
        assert np.may_share_memory(turned, part)
        return turned[0] if self.grouped else turned


# Layers are alike, and so are experts.
@functools.lru_cache(maxsize=256)
def _regions(transform: Transform, shapes: tuple[Shape, ...], number: int, box: Box) -> tuple[tuple[Region, Box], ...]:
    if any(start == stop for start, stop in box):
        return ()
    shape = shapes[number]
    merged = _merged_dimensions(transform.turn, shape)
    # Only entries of a merged dimension that follow one another are one region.
    apart = {dimension for dimensions in merged for dimension in _outside(dimensions, shape, box)}
    apart.update(merged[0] if transform.grouped else ())
    choices = [
        [(entry, entry + 1) for entry in range(*bounds)] if dimension in apart else [bounds]
        for dimension, bounds in enumerate(box)
    ]
    return tuple(
        (transform.region([_bounds(dimensions, shape, part) for dimensions in merged], shapes, number), part)
        for part in itertools.product(*choices)
    )


@functools.lru_cache(maxsize=4096)
def _turned_shape(turn: Turn, shape: Shape) -> Shape:
    return turn(np.broadcast_to(np.uint8(0), shape)).shape


@functools.lru_cache(maxsize=4096)
def _merged_dimensions(turn: Turn, shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Returns for each dimension of the file those of ours that are merged in it, slowest first, but for those of one.

    All that transforms do is to merge dimensions that follow one another and to permute the results, so where they
    went can be seen from the strides.
    """
    # Memory that is never touched.
    turned = turn(np.empty(shape, np.uint8))
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    merged = tuple(
        tuple(d for d, size in enumerate(shape) if size > 1 and stride <= strides[d] < stride * length)
        for stride, length in zip(turned.strides, turned.shape, strict=True)
    )
    assert turned.shape == tuple(math.prod(shape[d] for d in dimensions) for dimensions in merged)
    return merged


def _outside(dimensions: tuple[int, ...], shape: Shape, box: Box) -> tuple[int, ...]:
    """Returns those of some merged dimensions that are slower than another of which `box` has only a part."""
    partial = [place for place, d in enumerate(dimensions) if box[d] != (0, shape[d])]
    return dimensions[: partial[-1]] if partial else ()


def _bounds(dimensions: tuple[int, ...], shape: Shape, box: Box) -> tuple[int, int]:
    """Returns the first and the last entry + 1 of `box` in the dimension that some of ours are merged in."""
    first = last = 0
    for d in dimensions:
        first, last = first * shape[d] + box[d][0], last * shape[d] + box[d][1] - 1
    return first, last + 1


def same() -> Transform:
    """The file's tensor has our shape: norms, embeddings, arrays already stacked over experts."""
    return Transform("as it is", _as_it_is)


def flat() -> Transform:
    """The file's tensor is ours in one dimension: biases and norms of heads, [N, H] <-> [N*H]."""
    return Transform("flattened", lambda array: array.reshape(-1))


def kernel(inputs: int = 1, *, stacked: bool = False) -> Transform:
    """A linear layer: ours is [in..., out...] with `inputs` input dimensions, the file's [out, in].

    stacked: ours is [E, in..., out...] and the file's [E, out, in], all experts in one tensor.
    """

    def turn(array: np.ndarray) -> np.ndarray:
        lead = array.shape[:1] if stacked else ()
        rows = math.prod(array.shape[len(lead) : len(lead) + inputs])
        return array.reshape(*lead, rows, -1).swapaxes(-1, -2)

    text = "transposed" if inputs == 1 else f"{inputs} input dimensions flattened, transposed"
    return Transform(f"each expert {text}" if stacked else text, turn)


def by_head() -> Transform:
    """A linear layer to heads: ours is [in, heads, ...], and this [heads, rows, in]."""
    return Transform("heads first, transposed", lambda array: array.reshape(*array.shape[:2], -1).transpose(1, 2, 0))


def depthwise() -> Transform:
    """A convolution of each feature by itself: ours is [taps, features...], the file's [features, 1, taps]."""
    return Transform("features first", lambda array: array.reshape(len(array), -1).T[:, None])


def joined(inner: Transform, axis: int) -> Transform:
    """Several of our arrays, each laid out by `inner`, one after the other along the file's `axis`."""
    return dataclasses.replace(inner, text=f"{inner.text}, joined along axis {axis}", axis=axis)


def interleaved(inner: Transform, axis: int) -> Transform:
    """Several of our arrays, each laid out by `inner`, taking turns along the file's `axis`."""
    return dataclasses.replace(inner, text=f"{inner.text}, interleaved along axis {axis}", axis=axis, interleaved=True)


def grouped(inner: Transform) -> Transform:
    """Several of our arrays, of each of which `inner` makes [groups, rows, ...]: in the file group after group."""
    return dataclasses.replace(inner, text=f"{inner.text}, joined group by group", axis=1, grouped=True)


def _as_it_is(array: np.ndarray) -> np.ndarray:
    return array
