"""Rows of files, by kind of data. A new kind is one reader, one line here and one in files.PATTERNS."""

from collections.abc import Callable, Iterator, Sequence

from maxlite.config.schema import DataConfig
from maxlite.data.files import File, find_files
from maxlite.data.read_array_record import read_array_record
from maxlite.data.read_arrow import read_parquet, read_saved_dataset
from maxlite.data.read_jsonl import read_jsonl
from maxlite.data.read_text import read_text
from maxlite.data.read_tfds import read_tfds
from maxlite.data.rows import BadRow, Row

TEXT = "text"
# What a reader is given: a file, the split that is meant, and the columns that are (None = all).
Reader = Callable[[File, str, Sequence[str] | None], Iterator[Row | BadRow]]
READERS: dict[str, Reader] = {
    "text": lambda file, split, columns: read_text(file),
    "jsonl": lambda file, split, columns: read_jsonl(file),
    "parquet": lambda file, split, columns: read_parquet(file, columns),
    "arrayrecord": lambda file, split, columns: read_array_record(file, columns),
    "hf": read_saved_dataset,
}


def wanted_columns(data: DataConfig) -> tuple[str, ...] | None:
    """Returns the columns that are read; None = all, where the row decides which."""
    if data.train_data_columns is not None:
        return data.train_data_columns
    return (TEXT,) if data.objective == "pretrain" and data.tokenize_train_data else None


def source_files(data: DataConfig, paths: tuple[str, ...] | None, key: str) -> list[File]:
    """Returns the files of dataset_type that `paths`, of the config key `key`, mean; tfds has none of its own."""
    return [] if data.dataset_type == "tfds" else find_files(paths, key, data.dataset_type)


def source_rows(
    data: DataConfig, paths: tuple[str, ...] | None, files: Sequence[File], split: str
) -> Iterator[Row | BadRow]:
    """Yields the rows of dataset_type in `files`, which source_files found; raises as the readers."""
    if data.dataset_type == "tfds":
        return read_tfds(data, split, paths)
    return read_rows(data.dataset_type, files, split=split, columns=wanted_columns(data))


def read_rows(kind: str, files: Sequence[File], *, split: str, columns: Sequence[str] | None) -> Iterator[Row | BadRow]:
    """Yields the rows of `files`, a key of READERS as found by find_files, in order and as they are read.

    split: read by the kind hf alone. columns: None = all; a row may have more than these, and the kinds without a
    table of columns may lack some.
    Raises DataError for a file that is broken or gone, and for a column or split that is not there; ConfigError for
    a package that is not installed.
    """
    for file in files:
        yield from READERS[kind](file, split, columns)
