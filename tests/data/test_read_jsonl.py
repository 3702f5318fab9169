"""Lines of JSON: what is read, what is reported with its file and line, and compressed files."""

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable

import fsspec
import pyarrow
import pytest

from maxlite.data.files import File
from maxlite.data.read_jsonl import read_jsonl
from maxlite.data.rows import BadRow, Row
from maxlite.errors import DataError

WriteFiles = Callable[..., str]


def rows_of(write_files: WriteFiles, content: bytes, name: str = "a.jsonl") -> list[Row | BadRow]:
    return list(read_jsonl(File(f"{write_files({name: content})}/{name}", name)))


def test_rows_are_named_by_their_lines(write_files: WriteFiles) -> None:
    """Lines of white space count but are no rows; a first mark, \\r\\n and a last line without an end are usual."""
    content = b'\xef\xbb\xbf{"text": "a"}\r\n\n  \t\r\n{"text": "b\xe2\x80\xa8c", "n": [1, null]}'
    folder = write_files({})
    assert rows_of(write_files, content) == [
        Row("a.jsonl:1", f"{folder}/a.jsonl:1", {"text": "a"}),
        Row("a.jsonl:4", f"{folder}/a.jsonl:4", {"text": "b\u2028c", "n": [1, None]}),
    ]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_nothing_but_white_space_has_no_rows(write_files: WriteFiles, content: bytes) -> None:
    assert rows_of(write_files, content) == []


@pytest.mark.parametrize(
    "line",
    [
        '{"text": ""}',
        '{"text": "   "}',
        "{}",
        '{"text": null}',
        '{"text": 5}',
        '{"text": "\\ud800"}',
        ' {"text": "a"} ',
    ],
)
def test_odd_values_are_passed_on(write_files: WriteFiles, line: str) -> None:
    """Whether a column can be used is for those to say who use it (P35)."""
    (row,) = rows_of(write_files, line.encode() + b"\n")
    assert isinstance(row, Row) and row.fields == json.loads(line)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "a', "broken JSON at column 10: Unterminated string starting at"),
        (b'{"text": "a"', "broken JSON at column 13: Expecting ',' delimiter"),
        (b'{"text": "a"} {"text": "b"}', "broken JSON at column 15: Extra data"),
        (b'{"text": "a"}\r{"text": "b"}', "broken JSON at column 15: Extra data"),
        (b"{'text': 'a'}", "broken JSON at column 2: Expecting property name"),
        (b"\0\0\0", "broken JSON at column 1: "),
        (b'\xef\xbb\xbf{"text": "a"}', "broken JSON at column 1: "),
        (b'{"text": "\xff"}', "not UTF-8 text: byte 11 is 0xff"),
        ('{"text": "a"}'.encode("utf-16"), "not UTF-8 text: byte 1 is 0xff"),
        (b'{"text": "a", "score": NaN}', "NaN, which is no JSON"),
        (b'{"text": -Infinity}', "-Infinity, which is no JSON"),
        (b'["text"]', 'JSON, but not an object like {"text": ...}: a list'),
        (b'"text"', "a string"),
        (b"null", "null"),
        (b"false", "true or false"),
        (b"1.5", "a number"),
        (b'{"a":' * 200_000, "JSON that is nested too deep"),
        (b'{"n": ' + b"1" * 5000 + b"}", "Exceeds the limit"),
    ],
)
def test_broken_lines_are_reported_and_passed(write_files: WriteFiles, line: bytes, problem: str) -> None:
    """The lines before and after are read (P35)."""
    before, broken, after = rows_of(write_files, b'{"a": 1}\n' + line + b'\n{"b": 2}\n')
    assert isinstance(before, Row) and isinstance(after, Row) and after.fields == {"b": 2}
    assert isinstance(broken, BadRow)
    assert broken.where.endswith("/a.jsonl:2") and problem in broken.problem


def pack_zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": pack_zstd}


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_files(write_files: WriteFiles, suffix: str) -> None:
    """A file of several compressed parts is read whole, one that is cut short is an error, behind a URL too."""
    parts = [b"".join(b'{"n": %d}\n' % number for number in range(start, start + 500)) for start in (0, 500)]
    packed = b"".join(PACKERS[suffix](part) for part in parts)
    name = f"a.jsonl{suffix}"
    with fsspec.open(f"memory://{name}", "wb") as file:
        file.write(packed)  # type: ignore[union-attr]
    for rows in (rows_of(write_files, packed, name), list(read_jsonl(File(f"memory://{name}", name)))):
        assert [row.fields["n"] for row in rows if isinstance(row, Row)] == list(range(1000))
    for broken in (packed[:-5], b"plain"):
        with pytest.raises(DataError, match=f"{name} cannot be read: "):
            rows_of(write_files, broken, name)


def test_files_that_are_none(write_files: WriteFiles) -> None:
    folder = write_files({"a": ""})
    os.mkfifo(f"{folder}/pipe.jsonl")
    with pytest.raises(DataError, match=r"pipe.jsonl is a pipe, a device or a folder"):
        list(read_jsonl(File(f"{folder}/pipe.jsonl", "pipe.jsonl")))
    with pytest.raises(DataError, match=r"gone.jsonl cannot be read: no such file"):
        list(read_jsonl(File(f"{folder}/gone.jsonl", "gone.jsonl")))
