"""Parquet files and folders as Dataset.save_to_disk writes them: their rows, and what is broken or missing."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pytest
from pyarrow import ipc, parquet

from maxlite.data.files import File
from maxlite.data.read_arrow import read_parquet, read_saved_dataset
from maxlite.data.rows import BadRow, Row
from maxlite.errors import DataError

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ROWS = [{"text": f"text {number}", "ids": [number, 7], "messages": MESSAGES, "n": None} for number in range(600)]
SaveDataset = Callable[..., str]


def fields(rows: list[Row | BadRow]) -> list[dict[str, Any]]:
    assert all(isinstance(row, Row) for row in rows)
    return [dict(row.fields) for row in rows if isinstance(row, Row)]


@pytest.fixture
def save_dataset(tmp_path: Path) -> SaveDataset:
    """save_dataset(path, rows, num_files=2, split=None): writes what Dataset.save_to_disk would; returns the folder."""

    def save(name: str, rows: list[dict[str, Any]], num_files: int = 2, split: str | None = None) -> str:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        table = pyarrow.Table.from_pylist(rows)
        file_names = [f"data-{number:05}-of-{num_files:05}.arrow" for number in range(num_files)]
        size = -(-len(rows) // num_files)
        for number, file_name in enumerate(file_names):
            with ipc.new_stream(str(folder / file_name), table.schema) as stream:
                stream.write_table(table.slice(number * size, size), max_chunksize=1000)
        state = {"_data_files": [{"filename": file_name} for file_name in file_names], "_split": split}
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "dataset_info.json").write_text("{}")
        return str(folder)

    return save


def write_parquet(path: str, rows: list[dict[str, Any]] = ROWS, **options: Any) -> File:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return File(path, "a.parquet")


def test_parquet(tmp_path: Path) -> None:
    """All rows in order, of all row groups; only the columns asked for; local or not."""
    file = write_parquet(f"{tmp_path}/a.parquet", row_group_size=250, compression="zstd")
    rows = list(read_parquet(file, None))
    assert fields(rows) == ROWS
    assert rows[256][:2] == ("a.parquet:257", f"{tmp_path}/a.parquet row 257")
    assert fields(list(read_parquet(file, ["messages", "text"])))[3] == {"messages": MESSAGES, "text": "text 3"}
    with fsspec.open("memory://a.parquet", "wb") as copy:
        copy.write(Path(file.path).read_bytes())  # type: ignore[union-attr]
    assert fields(list(read_parquet(File("memory://a.parquet", "a.parquet"), ["ids"])))[5] == {"ids": [5, 7]}


def test_parquet_is_read_as_it_is_used(tmp_path: Path) -> None:
    file = write_parquet(f"{tmp_path}/a.parquet")
    rows = read_parquet(file, None)
    assert fields([next(rows)]) == ROWS[:1]
    rows.close()  # type: ignore[attr-defined]


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    """Only that row is bad."""
    raw = pyarrow.array([b"good", b"b\xffd", None, b"end"], pyarrow.binary())
    table = pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.string(), 4, raw.buffers())})
    parquet.write_table(table, f"{tmp_path}/a.parquet")
    first, bad, *rest = read_parquet(File(f"{tmp_path}/a.parquet", "a.parquet"), None)
    assert bad == BadRow(f"{tmp_path}/a.parquet row 2", "not UTF-8 text")
    assert fields([first, *rest]) == [{"text": "good"}, {"text": None}, {"text": "end"}]


def test_broken_parquet(tmp_path: Path) -> None:
    file = write_parquet(f"{tmp_path}/a.parquet")
    whole = Path(file.path).read_bytes()
    for content in (
        b"",
        b"PAR1",
        whole[: len(whole) // 2],
        whole[4:] + b"PAR0",
        whole[:100] + b"\xff" * 200 + whole[300:],
    ):
        Path(file.path).write_bytes(content)
        with pytest.raises(DataError, match=r"a.parquet cannot be read: \S"):
            list(read_parquet(file, None))


def test_missing_column(tmp_path: Path, save_dataset: SaveDataset) -> None:
    """The message says which there are."""
    message = r"has no column story; its columns are text, ids, messages, n\. Set train_data_columns"
    with pytest.raises(DataError, match=message):
        list(read_parquet(write_parquet(f"{tmp_path}/a.parquet"), ["text", "story"]))
    with pytest.raises(DataError, match=message):
        list(read_saved_dataset(File(save_dataset("saved", ROWS), "saved"), "train", ["story"]))


def test_saved_dataset(save_dataset: SaveDataset) -> None:
    """Rows are numbered through all files, so names don't change with their number."""
    two, three = (File(save_dataset(f"of_{count}", ROWS, count), "saved") for count in (2, 3))
    rows = list(read_saved_dataset(two, "train", None))
    assert fields(rows) == ROWS
    assert rows[310][:2] == ("saved:311", f"{two.path}/data-00001-of-00002.arrow row 11")
    other = list(read_saved_dataset(three, "train", ["text"]))
    assert fields(other) == [{"text": row["text"]} for row in ROWS]
    assert [row.name for row in other if isinstance(row, Row)] == [row.name for row in rows if isinstance(row, Row)]


def test_splits(tmp_path: Path, save_dataset: SaveDataset) -> None:
    """Those of a DatasetDict, by name; what was saved by itself is one split, so that none is read as another."""
    save_dataset("both/train", ROWS[:3], 1)
    save_dataset("both/test", ROWS[3:5], 1)
    (tmp_path / "both/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    both = File(f"{tmp_path}/both", "both")
    assert fields(list(read_saved_dataset(both, "train", None))) == ROWS[:3]
    assert [row[0] for row in read_saved_dataset(both, "test", None)] == ["both/test:1", "both/test:2"]
    with pytest.raises(DataError, match="both has no split dev; its splits are train, test"):
        list(read_saved_dataset(both, "dev", None))
    for own, asked, other in ((None, "train", "test"), ("test", "test", "train"), ("train[:9]", "train", "test")):
        alone = File(save_dataset(f"alone_{own}", ROWS[:2], 1, own), "alone")
        assert len(list(read_saved_dataset(alone, asked, None))) == 2
        with pytest.raises(DataError, match=f"holds the split {asked} alone, not {other}"):
            list(read_saved_dataset(alone, other, None))


def test_saved_dataset_behind_a_url(save_dataset: SaveDataset) -> None:
    folder = save_dataset("saved", ROWS[:4])
    url = "memory://sets/saved"
    for name in os.listdir(folder):
        with fsspec.open(f"{url}/{name}", "wb") as copy:
            copy.write(Path(folder, name).read_bytes())  # type: ignore[union-attr]
    assert fields(list(read_saved_dataset(File(url, "saved"), "train", None))) == ROWS[:4]


def test_saved_dataset_cut_anywhere(save_dataset: SaveDataset) -> None:
    """However many bytes are missing, it is never taken for a shorter one."""
    folder = save_dataset("saved", [{"n": number} for number in range(3)], 1)
    data = Path(folder, "data-00000-of-00001.arrow")
    whole = data.read_bytes()
    assert len(list(read_saved_dataset(File(folder, "saved"), "train", None))) == 3
    for size in range(len(whole)):
        data.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"data-00000-of-00001.arrow (cannot be read: \S|is cut short)"):
            list(read_saved_dataset(File(folder, "saved"), "train", None))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("{", "state.json cannot be read: "),
        ("[]", "state.json has no list _data_files"),
        ("{}", "state.json has no list _data_files"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "gone.arrow cannot be read: no such file"),
        ('{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}', r"flatten_indices\(\)"),
    ],
)
def test_states_that_cannot_be_used(save_dataset: SaveDataset, state: str, message: str) -> None:
    folder = save_dataset("saved", ROWS[:2])
    Path(folder, "state.json").write_text(state)
    with pytest.raises(DataError, match=message):
        list(read_saved_dataset(File(folder, "saved"), "train", None))
