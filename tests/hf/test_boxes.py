import itertools

import numpy as np
import pytest

from maxlite.hf.boxes import Box, index_of, num_elements, union, whole


def random_boxes(rng: np.random.Generator, shape: tuple[int, ...], count: int) -> frozenset[Box]:
    def bounds(size: int) -> tuple[int, int]:
        first, last = sorted(int(cut) for cut in rng.choice(size + 1, 2, replace=False))
        return first, last

    return frozenset(tuple(bounds(size) for size in shape) for _ in range(count))


@pytest.mark.parametrize("shape", [(9,), (4, 6), (3, 4, 5)])
def test_a_union_has_every_entry_once(shape):
    rng = np.random.default_rng(0)
    for count in itertools.chain([0, 1], [5] * 20):
        boxes = random_boxes(rng, shape, count)
        wanted, found = np.zeros(shape, int), np.zeros(shape, int)
        for box in boxes:
            wanted[index_of(box, whole(shape))] = 1
        for box in union(boxes):
            found[index_of(box, whole(shape))] += 1
            assert num_elements(box) > 0
        np.testing.assert_array_equal(found, wanted)


def test_a_union_is_of_few_boxes():
    def together(*boxes: Box) -> list[Box]:
        return list(union(frozenset(boxes)))

    assert together(*(((row, row + 2), (0, 6)) for row in (0, 2, 4))) == [((0, 6), (0, 6))]
    assert together(*(((0, 6), (column, column + 2)) for column in (0, 2, 4))) == [((0, 6), (0, 6))]
    halves = (((0, 2), (0, 3)), ((0, 2), (3, 6)), ((5, 6), (0, 6)))
    assert together(*halves) == [((0, 2), (0, 6)), ((5, 6), (0, 6))]
    assert together(()) == [()]
    assert together(((0, 0), (0, 6)), ((0, 4), (3, 3))) == together() == []


def test_index_within_another_box():
    held = np.arange(12).reshape(3, 4)
    np.testing.assert_array_equal(held[index_of(((11, 12), (5, 7)), ((10, 13), (4, 8)))], [[5, 6]])
    assert num_elements(((11, 12), (5, 7))) == 2
    assert num_elements(()) == 1
