"""Tables: Parquet files, and folders that `Dataset.save_to_disk` of the datasets package wrote."""

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from maxlite.data.files import File
from maxlite.data.open_files import open_file
from maxlite.data.packages import load_package
from maxlite.data.remote_files import is_url, list_url, url_below
from maxlite.data.rows import BadRow, Row
from maxlite.errors import DataError

# Rows that are in memory at once; a row may be long.
BATCH_ROWS = 256
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def read_parquet(file: File, columns: Sequence[str] | None) -> Iterator[Row | BadRow]:
    """Yields the rows of a Parquet file. Raises DataError if it is broken or lacks one of `columns`."""
    parquet = load_package("pyarrow.parquet", "parquet", "pyarrow")
    with open_file(file.path) as opened:
        table = parquet.ParquetFile(opened)
        _check_columns(file.path, table.schema_arrow.names, columns)
        number = 0
        for batch in table.iter_batches(BATCH_ROWS, columns=None if columns is None else list(columns)):
            for fields in _plain_rows(batch):
                number += 1
                yield _row(fields, f"{file.name}:{number}", f"{file.path} row {number}")


def read_saved_dataset(folder: File, split: str, columns: Sequence[str] | None) -> Iterator[Row | BadRow]:
    """Yields the rows of a Dataset, or of one split of a DatasetDict, that save_to_disk wrote to `folder`.

    A row's number, which names it, goes on from file to file, so that it does not matter how many there are.
    Raises DataError for a split or column that is not there, and for broken files.
    """
    arrow = load_package("pyarrow", "hf", "pyarrow")
    path, name = _split_folder(folder, split)
    state = _read_state(_below(path, "state.json"), "_data_files")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise DataError(
            f"{path} holds a selection of rows beside its rows, as old versions of datasets wrote it. Load it with "
            "datasets, call flatten_indices() and save it again."
        )
    number = 0
    for stored in state["_data_files"]:
        file_path = _below(path, stored["filename"])
        number_in_file = 0
        with open_file(file_path) as opened:
            for batch in _stream_batches(arrow, opened, file_path, columns):
                for fields in _plain_rows(batch):
                    number, number_in_file = number + 1, number_in_file + 1
                    yield _row(fields, f"{name}:{number}", f"{file_path} row {number_in_file}")


def _stream_batches(arrow: Any, opened: BinaryIO, path: str, columns: Sequence[str] | None) -> Iterator[Any]:
    with arrow.ipc.open_stream(opened) as stream:
        _check_columns(path, stream.schema.names, columns)
        for batch in stream:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                part = batch.slice(start, BATCH_ROWS)
                yield part if columns is None else part.select(list(columns))
    # Where a file was cut between two batches, only this tells.
    opened.seek(-len(END_OF_STREAM), os.SEEK_END)
    if opened.read() != END_OF_STREAM:
        raise DataError(f"{path} is cut short: its end is missing. Write or fetch it anew.")


def _plain_rows(batch: Any) -> list[dict[str, Any] | None]:
    """Returns each row as Python's own values, None for one with a text that is not UTF-8."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
        return [row for number in range(batch.num_rows) for row in _plain_rows(batch.slice(number, 1))]


def _row(fields: dict[str, Any] | None, name: str, where: str) -> Row | BadRow:
    return BadRow(where, "not UTF-8 text") if fields is None else Row(name, where, fields)


def _check_columns(path: str, found: Sequence[str], columns: Sequence[str] | None) -> None:
    missing = [column for column in columns or () if column not in found]
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]}; its columns are {', '.join(found)}. Set train_data_columns to what is "
            "there."
        )


def _split_folder(folder: File, split: str) -> tuple[str, str]:
    """Returns path and name of the folder that holds the split."""
    if not _exists(_below(folder.path, "dataset_dict.json")):
        # What is saved by itself has the split's name that it was loaded with, as train or train[:100], or none.
        own = str(_read_state(_below(folder.path, "state.json"), "_data_files").get("_split") or "train").partition(
            "["
        )[0]
        if split != own:
            raise DataError(
                f"{folder.path} holds the split {own} alone, not {split}. Name that one, or another folder."
            )
        return folder.path, folder.name
    splits = _read_state(_below(folder.path, "dataset_dict.json"), "splits")["splits"]
    if split not in splits:
        raise DataError(f"{folder.path} has no split {split}; its splits are {', '.join(splits)}. Name one of those.")
    return _below(folder.path, split), f"{folder.name}/{split}"


def _read_state(path: str, key: str) -> dict[str, Any]:
    """Returns the JSON object, which must have a list as `key`."""
    with open_file(path) as opened:
        found = json.load(opened)
    if not isinstance(found, dict) or not isinstance(found.get(key), list):
        raise DataError(
            f"{path} has no list {key}: it is not what save_to_disk writes. Write or fetch the folder anew."
        )
    return found


def _below(folder: str, name: str) -> str:
    return url_below(folder, name) if is_url(folder) else os.path.join(folder, name)


def _exists(path: str) -> bool:
    return list_url(path, "") is not None if is_url(path) else os.path.exists(path)
