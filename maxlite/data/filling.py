"""Planned rows filled with tokens: the batch, or one process's part of it."""

from collections.abc import Sequence

import numpy as np

from maxlite.data.batch import Batch
from maxlite.data.row_order import PlannedRow
from maxlite.data.token_store import Span, TokenStore


def fill_batch(
    rows: Sequence[PlannedRow], stores: Sequence[TokenStore], shape: tuple[int, int], *, with_sources: bool
) -> Batch:
    """Returns a Batch of `shape` [B, T] that holds `rows`; rows and places that are missing are padding.

    stores: the documents of each source. with_sources: the batch says which source a token came from.

    Raises:
        DataError: a document cannot be read.
    """
    inputs, targets, positions, segment_ids, source_ids = (np.zeros(shape, np.int32) for _ in range(5))
    loss_mask = np.zeros(shape, np.float32)
    for source, store in enumerate(stores):
        places: list[tuple[int, int, int]] = []
        spans: list[Span] = []
        for number, row in enumerate(rows):
            if row.source == source:
                column = 0
                for segment, (document, start, length) in enumerate(
                    zip(*(part.tolist() for part in row.segments), strict=True), 1
                ):
                    spans.append(Span(document, start, start + length + 1))
                    places.append((number, column, segment))
                    column += length
        for (number, column, segment), (tokens, trained) in zip(places, store.read_many(spans), strict=True):
            length = len(tokens) - 1
            place = (number, slice(column, column + length))
            inputs[place] = tokens[:-1]
            targets[place] = tokens[1:]
            loss_mask[place] = 1 if trained is None else trained[1:]
            positions[place] = np.arange(length)
            segment_ids[place] = segment
            source_ids[place] = source
    return Batch(inputs, targets, loss_mask, positions, segment_ids, source_ids if with_sources else None)
