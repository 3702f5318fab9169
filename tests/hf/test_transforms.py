import itertools

import numpy as np
import pytest

from maxlite.hf.boxes import index_of, whole
from maxlite.hf.transforms import Transform, by_head, depthwise, flat, grouped, interleaved, joined, kernel, same


def numbers(*shape: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + np.prod(shape), dtype=np.int32).reshape(shape)


GATE, UP = numbers(3, 4, 5), numbers(3, 4, 5, start=1000)
# Heads of 2 rows, and 3 for each of them.
HEADS, OTHERS = numbers(4, 3, 2), numbers(4, 3, 3, 1, start=1000)
GROUPS = np.concatenate([array[:, head].reshape(4, -1).T for head in range(3) for array in (HEADS, OTHERS)])
TAPS, MORE_TAPS = numbers(4, 3, 2), numbers(4, 5, start=1000)
QUERY, KEY = numbers(4, 3, 2), numbers(4, 2, 2, start=1000)
TURNS = np.stack([GATE, UP], axis=-1).reshape(3, 4, 10)

CASES = {
    "same": (same(), (numbers(5, 4),), numbers(5, 4)),
    "scalar": (same(), (numbers(),), numbers()),
    "flat": (flat(), (numbers(4, 3),), numbers(12)),
    "kernel": (kernel(), (numbers(4, 6),), numbers(4, 6).T),
    "kernel of heads": (kernel(), (numbers(4, 3, 2),), numbers(4, 6).T),
    "kernel from heads": (kernel(2), (numbers(3, 2, 4),), numbers(6, 4).T),
    "experts' kernels": (kernel(stacked=True), (GATE,), np.stack([one.T for one in GATE])),
    "halves": (joined(same(), -1), (GATE, UP), np.concatenate([GATE, UP], axis=2)),
    "unequal": (joined(kernel(), 0), (QUERY, KEY), np.concatenate([QUERY.reshape(4, 6).T, KEY.reshape(4, 4).T])),
    "turns": (interleaved(same(), -1), (GATE, UP), TURNS),
    "turns of rows": (interleaved(kernel(stacked=True), 1), (GATE, UP), TURNS.swapaxes(1, 2)),
    "groups": (grouped(by_head()), (HEADS, OTHERS), GROUPS),
    "groups of biases": (
        grouped(same()),
        (numbers(3, 2), numbers(3, 1, start=100)),
        np.array([0, 1, 100, 2, 3, 101, 4, 5, 102]),
    ),
    "taps": (
        joined(depthwise(), 0),
        (TAPS, MORE_TAPS),
        np.concatenate([TAPS.reshape(4, 6), MORE_TAPS], axis=1).T[:, None],
    ),
    "three": (interleaved(same(), 0), (numbers(2), numbers(2), numbers(2)), np.array([0, 0, 0, 1, 1, 1])),
}


@pytest.mark.parametrize("transform, ours, theirs", CASES.values(), ids=CASES)
def test_both_ways(transform: Transform, ours, theirs):
    shapes = tuple(array.shape for array in ours)
    assert transform.file_shape(shapes) == theirs.shape
    written = np.full_like(theirs, -1)
    for number, array in enumerate(ours):
        read = np.full_like(array, -1)
        for region, part in transform.regions(shapes, number, whole(array.shape)):
            inside = index_of(part, whole(array.shape))
            written[(*region, ...)] = transform.view(array[(*inside, ...)])
            transform.view(read[(*inside, ...)])[...] = theirs[(*region, ...)]
        np.testing.assert_array_equal(read, array)
    np.testing.assert_array_equal(written, theirs)


@pytest.mark.parametrize("transform, ours, theirs", CASES.values(), ids=CASES)
def test_every_box(transform: Transform, ours, theirs):
    shapes = tuple(array.shape for array in ours)
    for number, array in enumerate(ours):
        ranges = [list(itertools.combinations(range(size + 1), 2)) for size in array.shape]
        for box in itertools.product(*ranges):
            wanted = array[(*index_of(box, whole(array.shape)), ...)]
            # An array of its own, as it is held for a device: the strides are not those of the whole.
            read = np.full_like(wanted, -1, order="C")
            used = np.zeros_like(theirs)
            for region, part in transform.regions(shapes, number, box):
                transform.view(read[(*index_of(part, box), ...)])[...] = theirs[(*region, ...)]
                used[(*region, ...)] += 1
            np.testing.assert_array_equal(read, wanted)
            assert used.max() == 1 and used.sum() == wanted.size


def test_a_box_is_cut_no_more_than_the_file_asks_for():
    shapes = ((8, 6, 4),)
    assert list(kernel().regions(shapes, 0, ((2, 4), (1, 3), (0, 4)))) == [
        ((slice(4, 12, 1), slice(2, 4, 1)), ((2, 4), (1, 3), (0, 4)))
    ]
    assert len(list(kernel().regions(shapes, 0, ((2, 4), (1, 3), (0, 2))))) == 2
    assert len(list(same().regions(shapes, 0, ((2, 4), (1, 3), (0, 2))))) == 1
    assert list(same().regions(shapes, 0, ((2, 2), (0, 6), (0, 4)))) == []


def test_arrays_that_do_not_fit_together():
    with pytest.raises(AssertionError, match="cannot share one tensor along axis 0"):
        joined(kernel(), 0).file_shape(((4, 6), (5, 6)))
    with pytest.raises(AssertionError, match="holds several"):
        kernel().file_shape(((4, 6), (4, 6)))
