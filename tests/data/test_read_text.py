"""Text files are taken whole; what is no text is a bad row, and nothing waits on a pipe."""

import os
from collections.abc import Callable

import fsspec
import pytest

from maxlite.data.files import File
from maxlite.data.read_text import read_text
from maxlite.data.rows import BadRow, Row
from maxlite.errors import DataError

WriteFiles = Callable[..., str]


@pytest.mark.parametrize("text", ["word\r\n", "", " \n\t ", "\ufeffmark", "caf\xe9 🐍"])
def test_text_is_kept_as_it_is(write_files: WriteFiles, text: str) -> None:
    path = write_files({"a/b.txt": text}) + "/a/b.txt"
    assert list(read_text(File(path, "a/b.txt"))) == [Row("a/b.txt", path, {"text": text})]
    with fsspec.open("memory://text/b.txt", "wb") as file:
        file.write(text.encode())  # type: ignore[union-attr]
    (row,) = read_text(File("memory://text/b.txt", "b.txt"))
    assert isinstance(row, Row) and row.fields["text"] == text


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\x7fELF\x00\x01", "not UTF-8 text: byte 4 is 0"),
        ("caf\xe9".encode("latin-1"), "not UTF-8 text: byte 3 is 0xe9"),
        ("€".encode()[:2], "not UTF-8 text: byte 0 is 0xe2"),
        ("text".encode("utf-16"), "not UTF-8 text: byte 3 is 0"),
        (b"a" * 10_000 + b"\xff", "not UTF-8 text: byte 10000 is 0xff"),
    ],
)
def test_no_text(write_files: WriteFiles, content: bytes, problem: str) -> None:
    path = write_files({"a": content}) + "/a"
    assert list(read_text(File(path, "a"))) == [BadRow(path, problem)]


def test_a_pipe_does_not_block(write_files: WriteFiles) -> None:
    """Nor does a device, which has no end."""
    pipe = write_files({"a": ""}) + "/pipe"
    os.mkfifo(pipe)
    for path in (pipe, "/dev/zero"):
        assert list(read_text(File(path, "x"))) == [BadRow(path, "a pipe, a device or a folder, not a file")]


def test_a_file_that_is_gone(tmp_path: os.PathLike[str]) -> None:
    os.symlink("nowhere", f"{tmp_path}/link")
    for path in (f"{tmp_path}/gone", f"{tmp_path}/link", "memory://gone"):
        with pytest.raises(DataError, match=f"{path} cannot be read: no such file"):
            list(read_text(File(path, "x")))
