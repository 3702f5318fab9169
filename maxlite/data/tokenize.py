"""Documents made into tokens before training: shards written by several processes, resumable at any moment.

Rows are cut into chunks by their sizes alone, and chunk k becomes shard k, so that the folder is byte for byte the same
for any number of processes. A shard counts as written when its JSON file is there.
"""

import collections
import contextlib
import functools
import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxlite.config.schema import DataConfig
from maxlite.data.corpus import SkippedRows
from maxlite.data.encoder import Encoder, build_encoder
from maxlite.data.files import File
from maxlite.data.json_files import read_json
from maxlite.data.readers import source_files, source_rows
from maxlite.data.rows import BadRow, Example, Row
from maxlite.data.token_folder import MANIFEST, name_hash, shown
from maxlite.data.token_shards import INDEX, RECORDS, ShardContent, write_shard
from maxlite.data.token_store import SMALL_VOCABULARY
from maxlite.data.tokenize_begun import begin, describe, digest_of, write_whole
from maxlite.data.tokenize_workers import start_workers
from maxlite.data.tokenizer import build_tokenizer, check_vocabulary
from maxlite.errors import ConfigError, DataError

# What a chunk holds at most, unless one row alone is larger. A process needs some times as much memory.
CHUNK_BYTES = 32 * 2**20
CHUNK_ROWS = 2**17


class Shard(NamedTuple):
    """A shard that is written. rows: digest of the rows that it was made of. first_skipped: place and problem."""

    name: str
    rows: str
    content: ShardContent
    skipped: int
    first_skipped: tuple[str, str] | None


class Progress(NamedTuple):
    """What is written by now, and how much of it was there before. first_skipped: place and problem."""

    shards: int = 0
    kept_shards: int = 0
    documents: int = 0
    tokens: int = 0
    skipped: int = 0
    first_skipped: str | None = None

    def add(self, shard: Shard, *, kept: bool) -> "Progress":
        """Returns it with one more shard."""
        first = None if shard.first_skipped is None else ": ".join(shard.first_skipped)
        return Progress(
            self.shards + 1,
            self.kept_shards + kept,
            self.documents + shard.content.documents,
            self.tokens + shard.content.tokens,
            self.skipped + shard.skipped,
            self.first_skipped or first,
        )


class Task(NamedTuple):
    """A shard to write. stem: its path without a suffix."""

    data: DataConfig
    vocab_size: int
    stem: Path
    rows_digest: str
    rows: list[Row | BadRow]


def tokenize(
    data: DataConfig,
    vocab_size: int,
    destination: Path,
    num_workers: int = 0,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Writes dataset_path in tokens to the folder `destination`, or what a run that was ended left of it.

    num_workers: processes that encode; 0 = this one. report: called after each shard.

    Raises:
        DataError: data that cannot be read or holds no document; a folder that cannot be written.
        ConfigError: keys that do not fit one another, or not those that the folder was begun with.
    """
    _check_kind(data)
    tokenizer = build_tokenizer(data) if data.tokenize_train_data else None
    if tokenizer is not None:
        check_vocabulary(tokenizer, vocab_size)
    build_encoder(data, tokenizer, vocab_size)
    files = source_files(data, data.dataset_path, "dataset_path")
    begun = describe(data, tokenizer, files, vocab_size)
    with begin(destination, begun):
        progress, shards = Progress(), []
        with contextlib.closing(_shards(data, vocab_size, destination, files, num_workers)) as written:
            for shard, kept in written:
                shards.append(shard)
                progress = progress.add(shard, kept=kept)
                report(progress)
        _check_end(destination, len(shards))
        if progress.documents == 0:
            skipped = f" {progress.skipped} rows were left out, the first {progress.first_skipped}."
            raise DataError(
                f"dataset_path={shown(data.dataset_path)} holds no document.{skipped if progress.skipped else ''} "
                "Give files with some in them."
            )
        _write_manifest(destination, begun, shards, progress)
    return progress


def _check_kind(data: DataConfig) -> None:
    if data.dataset_mixture is not None:
        raise ConfigError(
            "data tokenize writes one source: give each of dataset_mixture as dataset_path, and mix the folders."
        )
    if data.dataset_type in ("tokenized", "synthetic"):
        raise ConfigError(f"dataset_type={data.dataset_type} holds tokens already; there is nothing to tokenize.")


def _shards(
    data: DataConfig, vocab_size: int, folder: Path, files: Sequence[File], num_workers: int
) -> Generator[tuple[Shard, bool], None, None]:
    """Yields each shard, in order, and whether it was there before."""
    pending: collections.deque[tuple[Callable[[], Shard], bool]] = collections.deque()
    rows = source_rows(data, data.dataset_path, files, data.train_split)
    with start_workers(write_chunk, num_workers) as submit:
        for number, (digest, chunk) in enumerate(_chunks(rows)):
            stem = folder / f"{number:06d}"
            shard = _finished(stem)
            if shard is None:
                pending.append((submit(Task(data, vocab_size, stem, digest, chunk)), False))
            else:
                _check_kept(data, shard, digest, folder)
                pending.append((functools.partial(_same, shard), True))
            # One more than there are processes, so that none waits for its next.
            while len(pending) > (num_workers + 1 if num_workers else 0):
                result, kept = pending.popleft()
                yield result(), kept
        for result, kept in pending:
            yield result(), kept


def _same(shard: Shard) -> Shard:
    return shard


def write_chunk(task: Task) -> Shard:
    """Encodes rows and writes their shard.

    Raises:
        DataError: a row cannot be read and bad_rows=stop, or the shard cannot be written.
    """
    encoder = _encoder(task.data, task.vocab_size)
    encoded = iter(encoder([row for row in task.rows if isinstance(row, Row)]))
    skipped = SkippedRows(task.data)
    first: list[BadRow] = []
    documents: list[tuple[int, Example]] = []
    for row in task.rows:
        example = next(encoded) if isinstance(row, Row) else row
        if isinstance(example, BadRow):
            skipped.add(example)
            first = first or [example]
        else:
            assert isinstance(row, Row)
            documents.append((name_hash(row.name), example))
    content = write_shard(task.stem, documents, 2 if task.vocab_size <= SMALL_VOCABULARY else 4)
    first_skipped = (first[0].where, first[0].problem) if first else None
    shard = Shard(task.stem.name, task.rows_digest, content, skipped.found.count, first_skipped)
    try:
        write_whole(task.stem.with_suffix(".json"), shard._asdict() | {"content": content._asdict()})
    except OSError as error:
        raise DataError(f"{task.stem.parent} cannot be written: {error}.") from error
    return shard


@functools.lru_cache(maxsize=1)
def _encoder(data: DataConfig, vocab_size: int) -> Encoder:
    return build_encoder(data, build_tokenizer(data), vocab_size)


def _chunks(rows: Iterable[Row | BadRow]) -> Iterator[tuple[str, list[Row | BadRow]]]:
    """Yields rows in groups, each with a digest of them."""
    chunk: list[Row | BadRow] = []
    size, digest = 0, hashlib.blake2b(digest_size=16)
    for row in rows:
        for part in _parts(row):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
            size += len(part)
        chunk.append(row)
        if size >= CHUNK_BYTES or len(chunk) >= CHUNK_ROWS:
            yield digest.hexdigest(), chunk
            chunk, size, digest = [], 0, hashlib.blake2b(digest_size=16)
    if chunk:
        yield digest.hexdigest(), chunk


def _parts(row: Row | BadRow) -> Iterator[bytes]:
    """Yields what a row holds, but not the folder that it lies in."""
    if isinstance(row, BadRow):
        yield row.problem.encode("utf-8", "surrogatepass")
        return
    yield row.name.encode("utf-8", "surrogateescape")
    for column, value in row.fields.items():
        yield column.encode("utf-8", "surrogatepass")
        if isinstance(value, str):
            yield value.encode("utf-8", "surrogatepass")
        elif isinstance(value, np.ndarray):
            yield repr(value.tolist()).encode()
        else:
            yield repr(value).encode("utf-8", "surrogatepass")


def _finished(stem: Path) -> Shard | None:
    file = stem.with_suffix(".json")
    if not all(stem.with_suffix(suffix).is_file() for suffix in (".json", RECORDS, INDEX)):
        return None
    found = read_json(file, DataError)
    first = found["first_skipped"]
    return Shard(
        found["name"],
        found["rows"],
        ShardContent(**found["content"]),
        found["skipped"],
        None if first is None else (first[0], first[1]),
    )


def _check_kept(data: DataConfig, shard: Shard, rows_digest: str, folder: Path) -> None:
    if shard.rows != rows_digest:
        raise ConfigError(
            f"{folder} was begun with other data: the rows of shard {shard.name} are not those that it was made of. "
            "Name another folder, or give the same data again."
        )
    if shard.first_skipped is not None:
        # Left out before, where they may be an error now.
        SkippedRows(data).add(BadRow(*shard.first_skipped))


def _check_end(folder: Path, num_shards: int) -> None:
    if (folder / f"{num_shards:06d}.json").is_file():
        raise ConfigError(f"{folder} was begun with more data than there is now. Name another folder.")


def _write_manifest(folder: Path, begun: Mapping[str, Any], shards: Iterable[Shard], progress: Progress) -> None:
    shards = list(shards)
    manifest = {
        **begun,
        "digest": digest_of(shard.content.digest.encode() for shard in shards),
        "documents": progress.documents,
        "tokens": progress.tokens,
        "trained": sum(shard.content.trained for shard in shards),
        "largest_id": max(shard.content.largest_id for shard in shards),
        "skipped": progress.skipped,
        "first_skipped": progress.first_skipped,
        "shards": [{"name": shard.name, "documents": shard.content.documents} for shard in shards],
    }
    write_whole(folder / MANIFEST, manifest)
