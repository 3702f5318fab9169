"""Shards of documents in tokens, as files: records of ArrayRecord, and an index with a row for each document.

A record is the tokens of a document, or RECORD_TOKENS of a longer one, as little-endian integers; where not all of them
are trained, the lengths of runs follow, uint32, in turn of tokens that are only read and of trained ones.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from maxlite.data.rows import Example
from maxlite.errors import DataError

RECORDS, INDEX = ".arrayrecord", ".npy"
# A window of a long document needs only the records around it.
RECORD_TOKENS = 8192
INDEX_ROW = np.dtype([("tokens", "<i8"), ("trained", "<i8"), ("name", "<u8")])


class ShardContent(NamedTuple):
    """What a shard holds. digest: of all tokens and masks; largest_id: -1 without any token."""

    documents: int
    tokens: int
    trained: int
    largest_id: int
    digest: str


def write_shard(stem: Path, documents: Iterable[tuple[int, Example]], token_bytes: int) -> ShardContent:
    """Writes the records and the index of a shard, files `stem` plus a suffix; neither has its name before it is whole.

    documents: each with the hash of its row's name.

    Raises:
        DataError: they cannot be written.
    """
    records, index = (stem.with_name(f"{stem.name}{suffix}.part") for suffix in (RECORDS, INDEX))
    try:
        # What a killed process began is not written into.
        records.unlink(missing_ok=True)
        rows, content = _write_records(records, documents, np.dtype(f"<u{token_bytes}"))
        with open(index, "wb") as file:
            np.save(file, rows)
        for part in (records, index):
            _flush(part)
            part.rename(part.with_suffix(""))
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{stem.parent} cannot be written: {error}. Mend that and run the same command again."
        ) from error
    return content


def _write_records(
    path: Path, documents: Iterable[tuple[int, Example]], dtype: np.dtype
) -> tuple[np.ndarray, ShardContent]:
    digest = hashlib.blake2b(digest_size=16)
    rows: list[tuple[int, int, int]] = []
    largest = -1
    # A record is found by itself only if it is no part of a group.
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for name, (tokens, trained) in documents:
        all_trained = trained is None or bool(trained.all())
        written = tokens.astype(dtype)
        largest = max(largest, int(tokens.max(initial=-1)))
        digest.update(len(written).to_bytes(8, "little"))
        for start in range(0, len(written), RECORD_TOKENS):
            place = slice(start, start + RECORD_TOKENS)
            record = written[place].tobytes()
            if not all_trained:
                assert trained is not None
                record += _run_lengths(trained[place])
            digest.update(len(record).to_bytes(8, "little"))
            digest.update(record)
            writer.write(record)
        num_trained = len(tokens) if trained is None else int(trained.sum())
        rows.append((len(tokens), num_trained, name))
    writer.close()
    index = np.array(rows, INDEX_ROW)
    totals = (int(index["tokens"].sum()), int(index["trained"].sum()))
    return index, ShardContent(len(rows), *totals, largest, digest.hexdigest())


def _run_lengths(trained: np.ndarray) -> bytes:
    """Returns how many flags in turn are false and true, beginning with false; nothing if all are true."""
    if trained.all():
        return b""
    ends = np.concatenate((np.flatnonzero(np.diff(trained)) + 1, [len(trained)]))
    lengths = np.diff(ends, prepend=0)
    return np.concatenate(([0], lengths) if trained[0] else (lengths,)).astype("<u4").tobytes()


def flags_of(runs: bytes, length: int) -> np.ndarray:
    """Returns the flags of which `_run_lengths` made `runs`, bool [length]."""
    if not runs:
        return np.ones(length, bool)
    lengths = np.frombuffer(runs, "<u4")
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
