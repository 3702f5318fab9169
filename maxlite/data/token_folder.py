"""A folder of documents in tokens: written once, then read at random without looking at all of it.

The documents lie in shards (token_shards.py); a manifest, which is written last, says what the folder holds.
"""

import collections
import hashlib
import itertools
import shlex
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from maxlite.data.json_files import read_json
from maxlite.data.rows import Example
from maxlite.data.token_shards import INDEX, INDEX_ROW, RECORD_TOKENS, RECORDS, flags_of
from maxlite.data.token_store import Span
from maxlite.errors import DataError

FORMAT = 1
MANIFEST, BEGUN = "manifest.json", "begun.json"
# Each open shard holds a file open, of which a process may often have no more than 1024.
MAX_OPEN_SHARDS = 256


class TokenFolder:
    """The documents of a folder that `maxlite data tokenize` wrote; threads may share it.

    num_tokens: int64 [N]. num_trained: int64 [N], the tokens of each that count as targets; None = all do.
    name_hashes: uint64 [N], of the name of the row that each document was. digest: differs where a document, a token or
    a mask does. largest_id: of all tokens. tokenizer_digest: of the tokenizer; None = the rows held ids. num_skipped,
    first_skipped: the rows that were left out, and the place and problem of the first.
    """

    def __init__(self, path: str) -> None:
        """Reads the index and no record.

        Raises:
            DataError: the folder is not there, not finished or damaged.
        """
        self._folder = Path(path).expanduser()
        manifest = _read_manifest(self._folder)
        self.digest: str = manifest["digest"]
        self.tokenizer_digest: str | None = manifest["tokenizer"]
        self.largest_id: int = manifest["largest_id"]
        self.num_skipped: int = manifest["skipped"]
        self.first_skipped: str | None = manifest["first_skipped"]
        self._dtype = np.dtype(f"<u{manifest['token_bytes']}")
        self._shards: list[str] = [shard["name"] for shard in manifest["shards"]]
        indexes = [self._read_index(shard) for shard in manifest["shards"]]
        index = np.concatenate(indexes)
        self.num_tokens = np.ascontiguousarray(index["tokens"])
        trained = np.ascontiguousarray(index["trained"])
        self.num_trained = None if np.array_equal(trained, self.num_tokens) else trained
        self.name_hashes = np.ascontiguousarray(index["name"])
        # Record r of the folder is the one after all records of the documents before its own.
        self._first_records = np.concatenate(([0], np.cumsum(-(-self.num_tokens // RECORD_TOKENS))))
        shard_ends = np.cumsum([len(index) for index in indexes])
        self._shard_firsts = self._first_records[np.concatenate(([0], shard_ends))]
        self._readers: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def read(self, document: int, start: int, stop: int) -> Example:
        """Returns tokens start..stop of a document, and which of them count; raises as `read_many`."""
        return self.read_many([Span(document, start, stop)])[0]

    def read_many(self, spans: Sequence[Span]) -> list[Example]:
        """Returns the tokens of each span, and which of them count.

        Raises:
            DataError: a shard cannot be read.
        """
        needed = [self._records_of(*span) for span in spans]
        firsts = np.array([records.start for records in needed], np.int64)
        shards = np.searchsorted(self._shard_firsts, firsts, side="right") - 1
        wanted: dict[int, set[int]] = collections.defaultdict(set)
        for shard, records in zip(shards.tolist(), needed, strict=True):
            wanted[shard].update(records)
        found: dict[int, bytes] = {}
        for shard, numbers in sorted(wanted.items()):
            if numbers:
                found.update(self._read_records(shard, sorted(numbers)))
        return [
            self._assemble(span, [found[number] for number in records])
            for span, records in zip(spans, needed, strict=True)
        ]

    def _records_of(self, document: int, start: int, stop: int) -> range:
        assert 0 <= start <= stop <= self.num_tokens[document]
        first = int(self._first_records[document])
        return range(first + start // RECORD_TOKENS, first + -(-stop // RECORD_TOKENS)) if start < stop else range(0)

    def _assemble(self, span: Span, records: Sequence[bytes]) -> Example:
        document, start, stop = span
        if not records:
            return Example(np.zeros(0, np.int32), None)
        first = start - start % RECORD_TOKENS
        lengths = [
            min(RECORD_TOKENS, int(self.num_tokens[document]) - first - place * RECORD_TOKENS)
            for place in range(len(records))
        ]
        sizes = [length * self._dtype.itemsize for length in lengths]
        parts = [np.frombuffer(record, self._dtype, count) for record, count in zip(records, lengths, strict=True)]
        tokens = np.concatenate(parts)[start - first : stop - first].astype(np.int32)
        if all(len(record) == size for record, size in zip(records, sizes, strict=True)):
            return Example(tokens, None)
        flags = [flags_of(record[size:], length) for record, size, length in zip(records, sizes, lengths, strict=True)]
        return Example(tokens, np.concatenate(flags)[start - first : stop - first])

    def _read_records(self, shard: int, numbers: Sequence[int]) -> Iterable[tuple[int, bytes]]:
        before = int(self._shard_firsts[shard])
        try:
            return zip(numbers, self._reader(shard).read([number - before for number in numbers]), strict=True)
        except RuntimeError as error:
            raise self._damaged(self._shards[shard], str(error)) from error

    def _reader(self, shard: int) -> Any:
        with self._lock:
            reader = self._readers.pop(shard, None)
            if reader is None:
                reader = self._open(shard)
            self._readers[shard] = reader
            if len(self._readers) > MAX_OPEN_SHARDS:
                # Another thread that reads in it still holds it, and it is closed after that.
                self._readers.popitem(last=False)
        return reader

    def _open(self, shard: int) -> Any:
        reader = ArrayRecordReader(str(self._folder / (self._shards[shard] + RECORDS)), "readahead_buffer_size:0")
        expected = int(self._shard_firsts[shard + 1] - self._shard_firsts[shard])
        # A file that is missing, cut or no ArrayRecord at all counts as an empty one.
        if reader.num_records() != expected:
            raise self._damaged(self._shards[shard], f"{reader.num_records()} records instead of {expected}")
        return reader

    def _read_index(self, shard: Mapping[str, Any]) -> np.ndarray:
        try:
            index = np.load(self._folder / (shard["name"] + INDEX))
        except (OSError, ValueError, EOFError) as error:
            raise self._damaged(shard["name"], str(error)) from error
        if index.dtype != INDEX_ROW or len(index) != shard["documents"]:
            raise self._damaged(shard["name"], f"its index has not one row for each of {shard['documents']} documents")
        return index

    def _damaged(self, shard: str, problem: str) -> DataError:
        return DataError(
            f"Shard {shard} of {self._folder} cannot be read: {problem}. Delete {shard}.json and {MANIFEST} in it, and "
            "run `maxlite data tokenize` as before: it writes this shard anew and keeps the others."
        )


def name_hash(name: str) -> int:
    """Returns 64 bits of a digest of a row's name."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest())


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST).is_file():
        if (folder / BEGUN).is_file():
            keys = read_json(folder / BEGUN, DataError)["keys"]
            given = itertools.chain([str(folder)], (f"{key}={shown(value)}" for key, value in keys.items()))
            command = shlex.join(["maxlite", "data", "tokenize", "base.yml", *given])
            raise DataError(f"{folder} was begun and not finished. The same command again goes on: {command}")
        found = "has no " + MANIFEST if folder.is_dir() else "is no folder"
        raise DataError(
            f"{folder} {found}: dataset_type=tokenized reads a local folder that `maxlite data tokenize CONFIG FOLDER` "
            "wrote. Write one, or set dataset_type to what is there."
        )
    manifest = read_json(folder / MANIFEST, DataError)
    if manifest.get("format") != FORMAT:
        raise DataError(
            f"{folder} is of format {manifest.get('format')}, and this version reads {FORMAT}. Write it anew: "
            "`maxlite data tokenize CONFIG OTHER_FOLDER`."
        )
    return manifest


def shown(value: Any) -> str:
    """Returns a key's value as the command line takes it."""
    if isinstance(value, list | tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
