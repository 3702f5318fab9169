"""Rows: targets stay inside their document, positions restart, padding is masked by place and never by id."""

from collections.abc import Callable

import grain
import numpy as np
import pytest

from maxlite.config.schema import DataConfig
from maxlite.data.packing import Row, pack_rows, pad_rows, stack_rows
from maxlite.data.pipeline import build_dataset

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
    assert [field.dtype for field in batch] == [np.int32, np.int32, np.float32, np.int32, np.int32]


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


def windows_of(lengths: list[int]) -> grain.MapDataset:
    """Returns windows whose tokens are all their own index."""
    return grain.MapDataset.source([np.full((length, 2), index, np.int32) for index, length in enumerate(lengths)])


@pytest.mark.parametrize("seed", [None, 5])
def test_packing_loses_and_cuts_nothing(seed: int | None) -> None:
    """Each window is one whole segment of one row, and rows overlap nowhere."""
    lengths = np.random.default_rng(0).integers(1, 17, 300).tolist()
    seen = {}
    for row in pack_rows(windows_of(lengths), 16, seed):
        num_real = int((row.segment_ids > 0).sum())
        assert (row.segment_ids[:num_real] > 0).all()
        for segment in range(1, row.segment_ids.max() + 1):
            tokens = row.window[row.segment_ids == segment]
            index = int(tokens[0, 0])
            assert index not in seen
            seen[index] = len(tokens)
            assert (tokens == index).all()
            assert row.positions[row.segment_ids == segment].tolist() == list(range(len(tokens)))
    assert [seen[index] for index in range(300)] == lengths


def test_packing_without_a_seed_keeps_the_order() -> None:
    """No window overtakes another, though a later one would fill a gap."""
    rows = pack_rows(windows_of([10, 10, 4, 4, 4, 10, 2]), 16, None)
    assert [list(dict.fromkeys(row.window[row.segment_ids > 0, 0].tolist())) for row in rows] == [
        [0],
        [1, 2],
        [3, 4],
        [5, 6],
    ]


def test_packing_fills_rows() -> None:
    """Short documents share rows: at most a tenth of the row is padding."""
    lengths = np.random.default_rng(1).integers(20, 200, 1000).tolist()
    rows = list(pack_rows(windows_of(lengths), 512, 3))
    assert sum(lengths) / (len(rows) * 512) > 0.9


def test_padding_makes_a_row_of_each_window() -> None:
    """A full window has no padding; a short one is padded with zeros."""
    rows = list(pad_rows(windows_of([4, 1, 3]), 4))
    assert [row.segment_ids.tolist() for row in rows] == [[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]]
    assert [row.positions.tolist() for row in rows] == [[0, 1, 2, 3], [0, 0, 0, 0], [0, 1, 2, 0]]
    assert rows[2].window.tolist() == [[2, 2], [2, 2], [2, 2], [0, 0]]


def test_stacking_fills_with_empty_rows() -> None:
    """A row that is missing has no target and no segment."""
    row = Row(np.array([[1, 2], [2, 3]], np.int32), np.array([0, 1], np.int32), np.array([1, 1], np.int32))
    batch = stack_rows([row], batch_size=3)
    assert batch.inputs.tolist() == [[1, 2], [0, 0], [0, 0]]
    assert batch.targets.tolist() == [[2, 3], [0, 0], [0, 0]]
    assert batch.loss_mask.sum(axis=1).tolist() == [2, 0, 0]
    assert batch.segment_ids.sum(axis=1).tolist() == [2, 0, 0]
