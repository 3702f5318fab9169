"""The documents of a run: read and encoded, or opened where they were tokenized before; some held out."""

import dataclasses
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from maxlite.config.data_schema import DataConfig, MixtureSource
from maxlite.data.encoder import Encoder, build_encoder
from maxlite.data.readers import source_files, source_rows
from maxlite.data.rows import BadRow, Example, Row
from maxlite.data.token_folder import TokenFolder, name_hash
from maxlite.data.token_store import MemoryTokens, TokenStore
from maxlite.data.tokenizer import Tokenizer
from maxlite.data.windows import Pieces
from maxlite.errors import ConfigError, DataError

# Rows that are handed to the encoder at once.
CHUNK_ROWS = 256
HASH_RANGE = 2**64


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Rows that were left out. first: the place and problem of the first."""

    count: int = 0
    first: str | None = None

    def describe(self) -> str:
        """One phrase."""
        return f"{self.count:,} rows skipped" + (f", the first {self.first}" if self.first else "")

    def __add__(self, other: "Skipped") -> "Skipped":
        """Counts both."""
        return Skipped(self.count + other.count, self.first or other.first)


class Documents(NamedTuple):
    """Documents in tokens. name_hashes: uint64 [N], of names that are the same wherever the data lies."""

    store: TokenStore
    name_hashes: np.ndarray
    skipped: Skipped
    where: str


@dataclasses.dataclass(frozen=True)
class Source:
    """Documents in tokens, and which of them are trained on.

    weight, epochs: of dataset_mixture. held_out_store: where those held out lie, if not in `store`.
    """

    name: str
    weight: float
    epochs: int | None
    store: TokenStore
    train: Pieces
    held_out: Pieces | None
    held_out_store: TokenStore
    skipped: Skipped
    where: str


def open_source(data: DataConfig, mixed: MixtureSource | None, tokenizer: Tokenizer | None, vocab_size: int) -> Source:
    """Opens the source that dataset_path is, or one of a mixture, with the documents that it holds out.

    Raises:
        DataError: nothing to read, or a row that cannot be read and bad_rows=stop.
        ConfigError: keys that do not fit the tokenizer.
    """
    paths = data.dataset_path if mixed is None else (mixed.path,)
    key = "dataset_path" if mixed is None else "dataset_mixture"
    encoder = None if data.dataset_type == "tokenized" else build_encoder(data, tokenizer, vocab_size)

    def open_paths(paths: tuple[str, ...] | None, key: str, split: str) -> Documents:
        if encoder is None:
            return _open_folder(paths, key, tokenizer, vocab_size)
        where = ", ".join(paths) if paths is not None else data.dataset_name or sysconfig.get_path("stdlib")
        rows = source_rows(data, paths, source_files(data, paths, key), split)
        return read_documents(data, rows, encoder, vocab_size, where)

    documents = open_paths(paths, key, data.train_split)
    other = None
    if data.eval_dataset_path is not None:
        other = open_paths(data.eval_dataset_path, "eval_dataset_path", data.eval_split or data.train_split)
    elif data.eval_split is not None:
        other = open_paths(paths, key, data.eval_split)
    if other is None:
        train, held_out = hold_out(documents, data.eval_fraction)
    else:
        train, held_out = _whole(documents.store), _whole(other.store)
    return Source(
        name=mixed.name if mixed is not None else data.dataset_type,
        weight=1.0 if mixed is None else mixed.weight,
        epochs=data.num_epoch if mixed is None else mixed.epochs,
        store=documents.store,
        train=train,
        held_out=held_out,
        held_out_store=(other or documents).store,
        skipped=documents.skipped if other is None else documents.skipped + other.skipped,
        where=documents.where if other is None else f"{documents.where}, held out {other.where}",
    )


def read_documents(
    data: DataConfig, rows: Iterable[Row | BadRow], encoder: Encoder, vocab_size: int, where: str
) -> Documents:
    """Reads and encodes all rows; their tokens stay in memory.

    where: what was given, for messages.

    Raises:
        DataError: no row is left, or one cannot be read and bad_rows=stop.
    """
    hashes: list[int] = []
    skipped = SkippedRows(data)

    def examples() -> Iterator[Example]:
        good = skipped.good(rows)
        while chunk := list(islice(good, CHUNK_ROWS)):
            for row, encoded in zip(chunk, encoder(chunk), strict=True):
                if isinstance(encoded, BadRow):
                    skipped.add(encoded)
                else:
                    hashes.append(name_hash(row.name))
                    yield encoded

    store = MemoryTokens(examples(), vocab_size)
    if not hashes:
        raise DataError(f"{where} holds no document: {skipped.found.describe()}. Give files with some in them.")
    return Documents(store, np.array(hashes, np.uint64), skipped.found, where)


class SkippedRows:
    """Stops at a row that cannot be read, or counts it, as bad_rows says; a file that is no text is always counted."""

    def __init__(self, data: DataConfig) -> None:
        """Has seen none."""
        self._stops = data.bad_rows == "stop" and data.dataset_type != "text"
        self.found = Skipped()

    def good(self, rows: Iterable[Row | BadRow]) -> Iterator[Row]:
        """Yields the rows that can be read."""
        for row in rows:
            if isinstance(row, BadRow):
                self.add(row)
            else:
                yield row

    def add(self, row: BadRow) -> None:
        """Raises DataError, or counts `row`."""
        if self._stops:
            raise DataError(f"{row.where}: {row.problem}. Mend the row, or set bad_rows=skip to count such rows only.")
        first = self.found.first or f"{row.where}: {row.problem}"
        self.found = Skipped(self.found.count + 1, first)


def hold_out(documents: Documents, fraction: float) -> tuple[Pieces, Pieces | None]:
    """Splits documents into those trained on and those held out.

    A document's name decides, so adding some moves none of the others. At least one document stays on each side. A
    lone document gives its last `fraction` of tokens instead.
    """
    whole = _whole(documents.store)
    if fraction == 0:
        return whole, None
    count = len(whole.document)
    if count == 1:
        return _cut(whole, fraction)
    ranks = documents.name_hashes
    is_held_out = ranks < fraction * HASH_RANGE
    is_held_out[np.argmin(ranks)] = True
    is_held_out[np.argmax(ranks)] = False
    return Pieces(*(part[~is_held_out] for part in whole)), Pieces(*(part[is_held_out] for part in whole))


def _whole(store: TokenStore) -> Pieces:
    count = len(store.num_tokens)
    return Pieces(np.arange(count), np.zeros(count, np.int64), store.num_tokens)


def _cut(whole: Pieces, fraction: float) -> tuple[Pieces, Pieces | None]:
    length = int(whole.stop[0])
    cut = length - max(1, round(length * fraction))
    # Both sides need a token and the one after it.
    if cut < 2 or length - cut < 2:
        return whole, None
    return whole._replace(stop=np.array([cut])), whole._replace(start=np.array([cut]))


def _open_folder(paths: tuple[str, ...] | None, key: str, tokenizer: Tokenizer | None, vocab_size: int) -> Documents:
    if paths is None or len(paths) != 1:
        given = "nothing" if paths is None else ", ".join(paths)
        raise ConfigError(
            f"dataset_type=tokenized takes one folder that `maxlite data tokenize` wrote, not {given}; set {key} to "
            "it, or give several as dataset_mixture."
        )
    folder = TokenFolder(paths[0])
    if folder.largest_id >= vocab_size:
        raise ConfigError(
            f"{paths[0]} holds token {folder.largest_id}, but the model's vocab_size={vocab_size} has no row for it; "
            "make vocab_size larger, or tokenize anew with the model's own tokenizer."
        )
    if tokenizer is not None and folder.tokenizer_digest not in (None, tokenizer.digest):
        raise ConfigError(
            f"{paths[0]} was tokenized with another tokenizer than tokenizer_path gives; give the one that it was "
            "written with, or tokenize anew."
        )
    skipped = Skipped(folder.num_skipped, folder.first_skipped)
    return Documents(folder, folder.name_hashes, skipped, paths[0])
