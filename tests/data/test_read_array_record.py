"""ArrayRecord files of JSON objects and of tf.train.Examples, and those that are broken."""

import os
import struct
from collections.abc import Iterable
from pathlib import Path

import fsspec
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from maxlite.data.files import File
from maxlite.data.read_array_record import read_array_record
from maxlite.data.rows import BadRow, Row
from maxlite.errors import DataError

NAME = "a.array_record"


def write_records(folder: Path, records: Iterable[bytes]) -> File:
    writer = ArrayRecordWriter(f"{folder}/{NAME}", "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return File(f"{folder}/{NAME}", NAME)


def counted(number: int, content: bytes) -> bytes:
    """A protocol buffer's field of fewer than 128 bytes."""
    return struct.pack("BB", number << 3 | 2, len(content)) + content


def example(**features: bytes) -> bytes:
    """A tf.train.Example with one value of bytes a feature."""
    entries = (counted(1, name.encode()) + counted(2, counted(1, counted(1, v))) for name, v in features.items())
    return counted(1, b"".join(counted(1, entry) for entry in entries))


def test_json_records(tmp_path: Path) -> None:
    """In order, more than are read at once; behind a URL too."""
    file = write_records(tmp_path, (b'{"n": %d}' % number for number in range(600)))
    rows = list(read_array_record(file, None))
    assert [row.fields["n"] for row in rows if isinstance(row, Row)] == list(range(600))
    assert rows[299][:2] == (f"{NAME}:300", f"{tmp_path}/{NAME} row 300")
    with fsspec.open(f"memory://{NAME}", "wb") as copy:
        copy.write(Path(file.path).read_bytes())  # type: ignore[union-attr]
    remote = list(read_array_record(File(f"memory://{NAME}", NAME), None))
    assert [row[::2] for row in remote] == [row[::2] for row in rows]
    assert remote[0].where == f"memory://{NAME} row 1"


def test_example_records(tmp_path: Path) -> None:
    """Bytes are text in the columns that are asked for; in others they may be anything."""
    file = write_records(tmp_path, [example(text="caf\xe9".encode(), image=b"\xff\xd8")])
    ((_, _, fields),) = read_array_record(file, ["text"])  # type: ignore[misc]
    assert fields == {"text": "caf\xe9", "image": b"\xff\xd8"}
    (bad,) = read_array_record(file, None)
    assert bad == BadRow(f"{file.path} row 1", "image is not UTF-8 text: byte 0 is 0xff")


def test_bad_records(tmp_path: Path) -> None:
    """Each is reported with its number; the others are read."""
    records = [example(text=b"a"), b"", b"text", b"[1]", b'{"a": 1', b"\x0a\x05\x0a\x03", b'{"a": 1}']
    rows = list(read_array_record(write_records(tmp_path, records), None))
    assert [isinstance(row, Row) for row in rows] == [True, False, False, False, False, False, True]
    problems = [row.problem for row in rows if isinstance(row, BadRow)]
    assert problems[3].startswith("broken JSON at column 8")
    others = problems[:3] + problems[4:]
    assert all(problem.startswith("neither a JSON object nor a tf.train.Example: ") for problem in others)


def test_an_empty_file_of_records(tmp_path: Path) -> None:
    assert list(read_array_record(write_records(tmp_path, []), None)) == []


def test_broken_files(tmp_path: Path) -> None:
    """Whatever is wrong, the error names the file."""
    file = write_records(tmp_path, (b'{"n": %d}' % number for number in range(20)))
    whole = Path(file.path).read_bytes()
    for content in (b"", b"no records", b"x" * 2**17, whole[: len(whole) // 2], whole[:200] + b"x" * 30 + whole[230:]):
        Path(file.path).write_bytes(content)
        with pytest.raises(DataError, match=f"{NAME} (is no ArrayRecord file, or cut short|cannot be read: Corrupt)"):
            list(read_array_record(file, None))
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("gone", "gone cannot be read: no such file"), ("pipe", "pipe is a pipe")):
        with pytest.raises(DataError, match=message):
            list(read_array_record(File(f"{tmp_path}/{name}", name), None))
