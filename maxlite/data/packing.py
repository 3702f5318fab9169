"""Rows of T tokens out of windows: several short ones packed into a row, or one padded window a row."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import grain
import numpy as np

from maxlite.data.batch import Batch

# More open rows fill better and cost more time for each window.
NUM_OPEN_ROWS = 32
WINDOW = "window"


class Row(NamedTuple):
    """One row: window int32 [T, 2] (inputs, targets), positions int32 [T], segment_ids int32 [T]; 0 is padding."""

    window: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray


def pack_rows(windows: grain.MapDataset, row_length: int, seed: int | None) -> grain.IterDataset:
    """Packs windows into rows, first fit: a dataset of Row.

    With a seed many rows are open at once and leave in a mixed order. Without one a single row is open, so
    that windows stay in order; more padding is the price.
    """
    packed = grain.experimental.FirstFitPackIterDataset(
        _read_in_turn(windows.map(lambda window: {WINDOW: window})),
        length_struct={WINDOW: row_length},
        num_packing_bins=1 if seed is None else NUM_OPEN_ROWS,
        seed=0 if seed is None else seed,
    )
    return packed.map(
        lambda packed_row: Row(
            packed_row[WINDOW], packed_row[f"{WINDOW}_positions"], packed_row[f"{WINDOW}_segment_ids"]
        )
    )


def pad_rows(windows: grain.MapDataset, row_length: int) -> grain.IterDataset:
    """Pads each window to a row of its own: a dataset of Row."""
    return _read_in_turn(windows.map(functools.partial(_pad, row_length=row_length)))


def stack_rows(rows: Sequence[Row], batch_size: int) -> Batch:
    """Stacks rows to a Batch of [batch_size, T]; rows that are missing are empty."""
    assert len(rows) <= batch_size
    (row_length,) = rows[0].segment_ids.shape
    tokens = np.zeros((2, batch_size, row_length), np.int32)
    positions = np.zeros((batch_size, row_length), np.int32)
    segment_ids = np.zeros((batch_size, row_length), np.int32)
    for index, row in enumerate(rows):
        tokens[:, index] = row.window.T
        positions[index] = row.positions
        segment_ids[index] = row.segment_ids
    return Batch(tokens[0], tokens[1], (segment_ids > 0).astype(np.float32), positions, segment_ids)


def _pad(window: np.ndarray, row_length: int) -> Row:
    length = len(window)
    padding = row_length - length
    return Row(
        np.pad(window, ((0, padding), (0, 0))),
        np.pad(np.arange(length, dtype=np.int32), (0, padding)),
        np.pad(np.ones(length, np.int32), (0, padding)),
    )


def _read_in_turn(windows: grain.MapDataset) -> grain.IterDataset:
    # Windows come from local files in microseconds: grain's default of 16 reading threads only costs.
    return windows.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
