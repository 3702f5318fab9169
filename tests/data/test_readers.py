"""All kinds through one door: files in order, and the rows of the same data alike whatever holds it."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import ipc, parquet

from maxlite.data.files import PATTERNS, find_files
from maxlite.data.readers import READERS, read_rows
from maxlite.data.rows import BadRow, Row
from maxlite.errors import DataError

TEXTS = ["once", "", "  ", "caf\xe9 🐍\n", "w" * 5000]


def write_jsonl(folder: Path) -> None:
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))


def write_parquet(folder: Path) -> None:
    parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "a.parquet")


def write_array_record(folder: Path) -> None:
    writer = ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1")
    for text in TEXTS:
        writer.write(json.dumps({"text": text}).encode())
    writer.close()


def write_saved(folder: Path) -> None:
    table = pyarrow.table({"text": TEXTS})
    with ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')


def write_text(folder: Path) -> None:
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)


WRITERS: dict[str, Callable[[Path], None]] = {
    "text": write_text,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "arrayrecord": write_array_record,
    "hf": write_saved,
}


def test_every_kind_has_a_reader_and_a_pattern() -> None:
    assert READERS.keys() == PATTERNS.keys() == WRITERS.keys()


@pytest.mark.parametrize("kind", WRITERS)
def test_the_same_texts(tmp_path: Path, kind: str) -> None:
    """In their order, twice the same, each with a name of its own that doesn't change where the folder moves."""
    folder = tmp_path / "old"
    folder.mkdir()
    WRITERS[kind](folder)

    def read(path: Path) -> list[Row | BadRow]:
        return list(read_rows(kind, find_files((str(path),), "dataset_path", kind), split="train", columns=["text"]))

    rows = read(folder)
    assert [row.fields["text"] for row in rows if isinstance(row, Row)] == TEXTS
    assert read(folder) == rows
    names = [row.name for row in rows if isinstance(row, Row)]
    assert len(set(names)) == len(TEXTS)
    (tmp_path / "other").mkdir()
    moved = folder.rename(tmp_path / "other" / "old")
    assert [row.name for row in read(moved) if isinstance(row, Row)] == names


def test_several_files(tmp_path: Path) -> None:
    """One after the other, none of them read before its time."""
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}1"}}\nbroken\n{{"text": "{name}2"}}\n')
    files = find_files((str(tmp_path),), "dataset_path", "jsonl")
    rows = read_rows("jsonl", files, split="train", columns=None)
    assert [getattr(next(rows), "name", None) for _ in range(3)] == ["a.jsonl:1", None, "a.jsonl:3"]
    (tmp_path / "b.jsonl").unlink()
    with pytest.raises(DataError, match=r"b.jsonl cannot be read: no such file"):
        next(rows)
