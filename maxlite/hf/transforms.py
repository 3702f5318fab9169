"""How one tensor of a Hugging Face folder holds one or several of our parameters.

A transform never computes: it names, for each of our arrays, a view of it in the layout of the file and the region
of the file's tensor where that view lies. Reading copies region to view, writing copies view to region, so that
every transform is its own inverse, and a tensor can be read or written a few rows at a time.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

Shape = tuple[int, ...]
Region = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Transform:
    """The layout of a file's tensor in terms of ours.

    text: what it does, in words, for `convert-hf --explain`.
    turn: our array (C-contiguous) -> a view of it with the dimensions of the file.
    axis: the file's axis along which several of our arrays share one tensor; None if it holds just one.
    interleaved: whether they take turns along that axis, instead of standing one after the other.
    grouped: whether `turn` gives [groups, rows, ...], of which the file makes one dimension: group after group, and in
        each the rows of one array after those of another.
    """

    text: str
    turn: Callable[[np.ndarray], np.ndarray]
    axis: int | None = None
    interleaved: bool = False
    grouped: bool = False

    def file_shape(self, shapes: tuple[Shape, ...]) -> Shape:
        """Returns the shape in the file of a tensor that holds our arrays of these shapes."""
        parts = [self.turn(np.broadcast_to(np.uint8(0), shape)).shape for shape in shapes]
        if self.axis is None:
            assert len(parts) == 1, "only a joined or interleaved tensor holds several arrays"
            return parts[0]
        axis = self.axis % len(parts[0])
        others = {part[:axis] + part[axis + 1 :] for part in parts}
        assert len(others) == 1, f"arrays of the shapes {parts} cannot share one tensor along axis {axis}"
        shape = parts[0][:axis] + (sum(part[axis] for part in parts),) + parts[0][axis + 1 :]
        return (shape[0] * shape[1], *shape[2:]) if self.grouped else shape

    def regions(self, arrays: tuple[np.ndarray, ...]) -> list[tuple[Region, np.ndarray]]:
        """Returns for each of our arrays the region of the file's tensor that it is, and a view of it to match."""
        views = [self.turn(array) for array in arrays]
        assert all(np.may_share_memory(view, array) for view, array in zip(views, arrays, strict=True))
        everything = [slice(0, size, 1) for size in views[0].shape]
        if self.axis is None:
            return [(tuple(everything), views[0])]
        if self.grouped:
            return _grouped_regions(views)
        regions, start, axis = [], 0, self.axis % views[0].ndim
        for index, view in enumerate(views):
            along = slice(start, start + view.shape[axis], 1)
            if self.interleaved:
                along = slice(index, len(views) * view.shape[axis], len(views))
            start = along.stop
            regions.append((tuple(everything[:axis] + [along] + everything[axis + 1 :]), view))
        return regions


def _grouped_regions(views: list[np.ndarray]) -> list[tuple[Region, np.ndarray]]:
    """As `Transform.regions`, for views [groups, rows, ...]."""
    regions, start, period = [], 0, sum(view.shape[1] for view in views)
    for view in views:
        others = tuple(slice(0, size, 1) for size in view.shape[2:])
        for group, rows in enumerate(view):
            first = group * period + start
            regions.append(((slice(first, first + len(rows), 1), *others), rows))
        start += view.shape[1]
    return regions


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
