"""Rows: targets stay inside their document, positions restart, padding is masked by place and never by id."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from maxlite.config.schema import DataConfig
from maxlite.data.packing import Packing, Rows
from maxlite.data.pipeline import build_dataset
from maxlite.data.windows import Segments

WriteFiles = Callable[..., str]
BuildDataConfig = Callable[..., DataConfig]
BOS, EOS = 256, 257


def test_a_packed_row_by_hand(write_files: WriteFiles, build_data_config: BuildDataConfig) -> None:
    """Documents of 3, 7 and 5 bytes make streams of 5, 9 and 7 tokens: 4, 8 and 6 targets in one row (P29, P30)."""
    folder = write_files({"1": "abc", "2": "ABCDEFG", "3": "vwxyz"})
    data = build_data_config(dataset_path=(folder,), enable_data_shuffling=False)
    batch = next(build_dataset(data, vocab_size=258, batch_size=1).train)
    streams = [[BOS, *b"abc", EOS], [BOS, *b"ABCDEFG", EOS], [BOS, *b"vwxyz", EOS]]
    padding = [0] * 14
    assert batch.inputs[0].tolist() == streams[0][:-1] + streams[1][:-1] + streams[2][:-1] + padding
    assert batch.targets[0].tolist() == streams[0][1:] + streams[1][1:] + streams[2][1:] + padding
    assert batch.loss_mask[0].tolist() == [1.0] * 18 + [0.0] * 14
    assert batch.positions[0].tolist() == [*range(4), *range(8), *range(6)] + padding
    assert batch.segment_ids[0].tolist() == [1] * 4 + [2] * 8 + [3] * 6 + padding
    assert [field.dtype for field in batch[:5]] == [np.int32, np.int32, np.float32, np.int32, np.int32]


def test_an_unpacked_row_by_hand(write_files: WriteFiles, build_data_config: BuildDataConfig) -> None:
    """One document a row; the end marks are real targets (P31)."""
    folder = write_files({"1": "abc", "2": "\0\1".replace("\0", "x"), "3": "v"})
    data = build_data_config(
        dataset_path=(folder,), enable_data_shuffling=False, packing=False, max_target_length=5, num_epoch=1
    )
    (batch,) = build_dataset(data, vocab_size=258, batch_size=4).train
    assert batch.targets.tolist() == [
        [*b"abc", EOS, 0],
        [*b"x\1", EOS, 0, 0],
        [*b"v", EOS, 0, 0, 0],
        [0] * 5,
    ]
    assert batch.loss_mask.sum() == 9
    assert (batch.targets == EOS).sum() == batch.loss_mask[batch.targets == EOS].sum() == 3
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0], [0, 1, 2, 0, 0], [0, 1, 0, 0, 0], [0] * 5]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0], [0] * 5]


def segments_of(lengths: list[int]) -> Segments:
    """Returns a document of each length."""
    count = len(lengths)
    return Segments(np.arange(count), np.zeros(count, np.int64), np.array(lengths, np.int64))


def packing(kind: str = "first_fit", row_length: int = 16, **changes: Any) -> Packing:
    """Returns a packing of rows of 16."""
    plain = Packing(kind, row_length, max_segments=None, in_order=False, buckets=(), group_size=1)
    return dataclasses.replace(plain, **changes)


def documents(rows: Rows) -> list[list[int]]:
    """Returns the documents of each row."""
    return [rows.row(number).document.tolist() for number in range(len(rows))]


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("kind", ["first_fit", "best_fit", "none"])
@pytest.mark.parametrize("max_segments", [None, 2])
def test_packing_loses_and_cuts_nothing(kind: str, in_order: bool, max_segments: int | None) -> None:
    """Each window is one whole segment of one row, and no row is overfull."""
    lengths = np.random.default_rng(0).integers(1, 17, 300).tolist()
    rows = packing(kind, in_order=in_order, max_segments=max_segments).pack(segments_of(lengths))
    rows = packing(kind).shuffle(rows, np.random.default_rng(1))
    seen = sum(documents(rows), [])
    assert sorted(seen) == list(range(300))
    for number in range(len(rows)):
        row = rows.row(number)
        assert 0 < row.length.sum() <= 16 and len(row.length) <= (max_segments or 16)
        assert row.length.tolist() == [lengths[document] for document in row.document]


def test_packing_in_order() -> None:
    """No window overtakes another, though a later one would fill a gap."""
    rows = packing(in_order=True).pack(segments_of([10, 10, 4, 4, 4, 10, 2, 16, 1]))
    assert documents(rows) == [[0], [1, 2], [3, 4], [5, 6], [7], [8]]


def test_first_fit_and_best_fit_by_hand() -> None:
    """First fit takes the oldest row with room, best fit the one where least room is left."""
    lengths = [8, 10, 5, 3]
    assert documents(packing("first_fit").pack(segments_of(lengths))) == [[0, 2, 3], [1]]
    assert documents(packing("best_fit").pack(segments_of(lengths))) == [[0, 3], [1, 2]]


@pytest.mark.parametrize("kind", ["first_fit", "best_fit"])
def test_packing_fills_rows(kind: str) -> None:
    """Short documents share rows: a few hundredths of the places are padding."""
    lengths = np.random.default_rng(1).integers(20, 200, 2000).tolist()
    rows = packing(kind, 512).pack(segments_of(lengths))
    assert sum(lengths) / (len(rows) * 512) > 0.96


def test_concat_then_split_by_hand() -> None:
    """Only the last row is not full; a window that is cut goes on in the next row where it stopped."""
    rows = packing("concat_then_split", 8).pack(segments_of([5, 20, 1]))
    assert documents(rows) == [[0, 1], [1], [1], [1, 2]]
    assert rows.segments.start.tolist() == [0, 0, 3, 11, 19, 0]
    assert rows.segments.length.tolist() == [5, 3, 8, 8, 1, 1]


def test_rows_of_a_bucket_stay_together() -> None:
    """Whole batches are of one bucket; what is left of each stands at the end."""
    lengths = [2, 9, 3, 12, 4, 10, 1, 16, 4]
    bucketed = packing("none", buckets=(4, 16), group_size=2)
    rows = bucketed.shuffle(bucketed.pack(segments_of(lengths)), np.random.default_rng(0))
    assert sorted(sum(documents(rows), [])) == list(range(9))
    is_short = [rows.row(number).length[0] <= 4 for number in range(9)]
    assert all(is_short[place] == is_short[place + 1] for place in range(0, 8, 2))
