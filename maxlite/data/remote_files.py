"""Files behind a URL: the one door to fsspec. A URL may be a chain, as `zip://part.jsonl::gs://bucket/all.zip`."""

import contextlib
import glob
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem

from maxlite.errors import DataError, MaxliteError

SEPARATOR = "://"
CHAIN = "::"


def is_url(path: str) -> bool:
    """Returns whether `path` is for fsspec, not for the operating system."""
    return SEPARATOR in path


def local_path(url: str) -> str | None:
    """Returns the path that a plain file:// URL means, None for any other."""
    is_local = url.startswith(("file://", "local://")) and CHAIN not in url
    return str(LocalFileSystem._strip_protocol(url)) if is_local else None


def url_below(url: str, name: str) -> str:
    """Returns the URL of what is called `name` in the folder `url`."""
    parts, place = _parts(url)
    parts[place] += name if parts[place].endswith("/") else f"/{name}"
    return CHAIN.join(parts)


def url_above(url: str) -> str:
    """Returns the URL of the folder that holds `url`."""
    parts, place = _parts(url)
    scheme, separator, path = parts[place].partition(SEPARATOR)
    parts[place] = scheme + separator + path.rpartition("/")[0]
    return CHAIN.join(parts)


def file_name(path: str) -> str:
    """Returns the last part of a path or URL, without what a web address asks for after it."""
    if is_url(path):
        parts, place = _parts(path)
        path = parts[place].partition("?")[0]
    return path.rstrip("/").rpartition("/")[2]


def list_url(url: str, pattern: str) -> list[tuple[str, str]] | None:
    """Returns (URL, name) of each file that `url`, a file, folder or glob, means; None if there is no such thing.

    The name is the path below the folder, or below the part of a glob before its first wildcard. Of a folder's files
    those are meant that are not hidden and whose names `pattern` finds. Raises DataError if the file system cannot be
    reached.
    """
    with faults_named(url):
        system, path = fsspec.core.url_to_fs(url)
        # First, as asking a web server for a folder's list fetches what is there.
        if system.isfile(path):
            return [(url, file_name(url))]
        if system.isdir(path):
            return [(url_below(url, name), name) for name in _names_below(system, path, path, pattern)]
        if not glob.has_magic(path):
            return None
        return _match(system, path, url, pattern)


@contextlib.contextmanager
def open_url(url: str) -> Iterator[BinaryIO]:
    """Yields the file at `url`, open for reading."""
    system, path = fsspec.core.url_to_fs(url)
    with system.open(path, "rb") as file:
        yield cast(BinaryIO, file)


@contextlib.contextmanager
def faults_named(path: str) -> Iterator[None]:
    """Turns whatever goes wrong in the body into a DataError that names `path`."""
    try:
        yield
    except (MaxliteError, AssertionError):
        raise
    except Exception as error:  # File systems, decompressors and file formats raise classes of their own.
        if isinstance(error, FileNotFoundError):
            reason = "no such file"
        else:
            reason = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
        raise DataError(
            f"{path} cannot be read: {reason.splitlines()[0].rstrip('.')}. Put it right or leave it out of the data."
        ) from error


def _parts(url: str) -> tuple[list[str], int]:
    """Returns the links of the chain, and the place of the first with a path."""
    parts = url.split(CHAIN)
    return parts, next(place for place, part in enumerate(parts) if SEPARATOR in part)


def _match(system: fsspec.AbstractFileSystem, wildcard: str, url: str, pattern: str) -> list[tuple[str, str]]:
    parts, place = _parts(url)
    scheme, separator, path = parts[place].partition(SEPARATOR)
    while glob.has_magic(path):
        path = path.rpartition("/")[0]
    parts[place] = scheme + separator + path
    root_url = CHAIN.join(parts)
    root = fsspec.core.url_to_fs(root_url)[1]
    matches = cast(dict[str, dict[str, Any]], system.glob(wildcard, detail=True))
    names: set[str] = set()
    for match, about in matches.items():
        if about["type"] == "directory":
            names.update(_names_below(system, match, root, pattern))
        elif not _is_hidden(_name_below(root, match)) or "/." in wildcard:
            names.add(_name_below(root, match))
    return [(url_below(root_url, name), name) for name in sorted(names)]


def _names_below(system: fsspec.AbstractFileSystem, folder: str, root: str, pattern: str) -> list[str]:
    """Returns the names below `root` of the files below `folder`, in order."""
    names = [_name_below(root, path) for path in system.find(folder) if not _is_hidden(_name_below(folder, path))]
    return sorted(name for name in names if re.search(pattern, name))


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))


def _name_below(root: str, path: str) -> str:
    return path.removeprefix(root.rstrip("/")).lstrip("/")
