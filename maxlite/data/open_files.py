"""Opens files, wherever they lie, such that whatever goes wrong names the file."""

import bz2
import contextlib
import gzip
import io
import lzma
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from maxlite.data.packages import load_package
from maxlite.data.remote_files import faults_named, file_name, is_url, open_url
from maxlite.errors import DataError


@contextlib.contextmanager
def open_file(path: str, *, unpack: bool = False) -> Iterator[BinaryIO]:
    """Yields the file or URL `path`, open for reading; with `unpack`, what it holds if it is compressed.

    Raises DataError that names `path` for whatever goes wrong, in the body of the `with` too.
    """
    with faults_named(path):
        if not is_regular(path):
            raise DataError(f"{path} is a pipe, a device or a folder, not a file. Give a file.")
        with open_url(path) if is_url(path) else open(path, "rb") as file:
            yield _unpacked(file, path) if unpack else file


@contextlib.contextmanager
def local_copy(path: str) -> Iterator[str]:
    """Yields a path that the operating system knows: `path` itself, or for a URL a copy that is deleted afterwards."""
    if not is_url(path):
        yield path
        return
    with tempfile.NamedTemporaryFile() as copy:
        with open_file(path) as file:
            shutil.copyfileobj(file, copy)
        copy.flush()
        yield copy.name


def is_regular(path: str) -> bool:
    """Returns whether `path` is a file with an end: opening a pipe or a device could wait for ever.

    Raises OSError if there is no such file.
    """
    return is_url(path) or stat.S_ISREG(os.stat(path).st_mode)


def _unpacked(file: BinaryIO, path: str) -> BinaryIO:
    _, suffix = os.path.splitext(file_name(path).lower())
    return _UNPACKERS[suffix](file) if suffix in _UNPACKERS else file


def _unpack_zstd(file: BinaryIO) -> io.BufferedReader:
    # Unlike the zstandard package's, it goes on after the first frame and minds a file that is cut short.
    arrow = load_package("pyarrow", "jsonl and files called *.zst", "pyarrow")
    return io.BufferedReader(arrow.CompressedInputStream(arrow.PythonFile(file, mode="r"), "zstd"))


_UNPACKERS: dict[str, Callable[[BinaryIO], BinaryIO]] = {
    ".gz": lambda file: cast(BinaryIO, gzip.GzipFile(fileobj=file)),
    ".bz2": lambda file: cast(BinaryIO, bz2.BZ2File(file)),
    ".xz": lambda file: cast(BinaryIO, lzma.LZMAFile(file)),
    ".zst": lambda file: cast(BinaryIO, _unpack_zstd(file)),
}
