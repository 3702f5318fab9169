"""Finds the documents that a path, folder, glob or list of them names, and holds some out for evaluation.

A file is a document. Nothing but the first bytes of each file is read here.
"""

import codecs
import dataclasses
import glob
import hashlib
import itertools
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from maxlite.errors import DataError

PROBE_BYTES = 4096
# Folders in the standard library's that are not the standard library.
FOREIGN_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})
HASH_RANGE = 2**64
MAX_CHARACTER_BYTES = 4


class Document(NamedTuple):
    """Some bytes of a file: all of it, or its front or back where one file is both trained on and held out.

    `name` is the path below the folder that was given, so it is the same wherever that folder lies.
    """

    path: str
    name: str
    start: int
    num_bytes: int
    file_bytes: int


@dataclasses.dataclass(frozen=True)
class Documents:
    """What was found, in file order, and how many files were passed over."""

    found: tuple[Document, ...]
    where: str
    num_empty: int
    num_not_text: int


def find_documents(paths: tuple[str, ...] | None, key: str) -> Documents:
    """Returns the documents under `paths`, each file once; None is Python's own standard library.

    `key` is the config key that the paths came from, for messages.
    Raises DataError if a path or glob names nothing, a file cannot be read, or nothing holds text.
    """
    where = ", ".join(paths) if paths is not None else sysconfig.get_path("stdlib")
    found: list[Document] = []
    seen: set[str] = set()
    num_empty = num_not_text = 0
    for path, name in _named_files(paths, key):
        real_path = os.path.realpath(path)
        if real_path in seen:
            continue
        seen.add(real_path)
        num_bytes, is_text = _probe(path, key)
        if num_bytes == 0:
            num_empty += 1
        elif is_text:
            found.append(Document(path, name, 0, num_bytes, num_bytes))
        else:
            num_not_text += 1
    if not found:
        raise DataError(
            f"{key}={where} holds no text: {num_empty} empty files, {num_not_text} files that are not UTF-8 text. "
            f"Give {key} a file, folder or glob with text in it."
        )
    return Documents(tuple(found), where, num_empty, num_not_text)


def hold_out(documents: tuple[Document, ...], fraction: float) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Splits documents into those trained on and those held out.

    A document's name decides, so adding files moves none of the others. At least one document stays on each
    side. A lone document gives its last `fraction` of bytes instead.
    """
    if fraction == 0:
        return documents, ()
    if len(documents) == 1:
        return _cut_document(documents[0], fraction)
    ranks = [_name_hash(document.name) for document in documents]
    is_held_out = [rank < fraction * HASH_RANGE for rank in ranks]
    if not any(is_held_out):
        is_held_out[ranks.index(min(ranks))] = True
    if all(is_held_out):
        is_held_out[ranks.index(max(ranks))] = False
    train = tuple(document for document, held in zip(documents, is_held_out, strict=True) if not held)
    return train, tuple(itertools.compress(documents, is_held_out))


def read_bytes(document: Document, first: int, num_bytes: int) -> bytes:
    """Returns bytes first to first+num_bytes of the document.

    Raises DataError if its file is gone or no longer has the size that it had.
    """
    try:
        with open(document.path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            text = os.pread(file.fileno(), num_bytes, document.start + first)
    except OSError as error:
        raise DataError(
            f"{document.path} was there when the data was indexed and cannot be read now: {error.strerror}. "
            "Put it back, or start again without it."
        ) from error
    if size != document.file_bytes or len(text) != num_bytes:
        raise DataError(
            f"{document.path} had {document.file_bytes} bytes when the data was indexed and has {size} now. "
            "Leave the data alone while a run reads it, and start again."
        )
    return text


def _name_hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest())


def _cut_document(document: Document, fraction: float) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    cut = document.num_bytes - max(1, round(document.num_bytes * fraction))
    first = max(cut - MAX_CHARACTER_BYTES + 1, 0)
    around = read_bytes(document, first, cut - first + 1)
    # A character is not cut in two: a byte 10xxxxxx goes on what an earlier byte began.
    while cut > first and around[cut - first] & 0xC0 == 0x80:
        cut -= 1
    if cut == 0:
        return (document,), ()
    front = document._replace(num_bytes=cut)
    return (front,), (document._replace(start=cut, num_bytes=document.num_bytes - cut),)


def _named_files(paths: tuple[str, ...] | None, key: str) -> Iterator[tuple[str, str]]:
    """Yields (path, name) of every file that is meant, in order."""
    if paths is None:
        yield from _folder_files(sysconfig.get_path("stdlib"), key, suffix=".py", left_out=FOREIGN_FOLDERS)
        return
    for given in paths:
        path = os.path.expanduser(given)
        if os.path.isdir(path):
            yield from _folder_files(path, key)
        elif os.path.exists(path):
            yield path, os.path.basename(path)
        elif glob.has_magic(path):
            yield from _glob_files(path, key)
        else:
            raise DataError(f"{key}={given} does not exist. Give {key} a file, folder or glob that does.")


def _glob_files(pattern: str, key: str) -> Iterator[tuple[str, str]]:
    matches = sorted(glob.glob(pattern, recursive=True))
    if not matches:
        raise DataError(
            f"{key}={pattern} matches no file. Check the glob; ** spans folders, hidden files are left out."
        )
    root = pattern
    while glob.has_magic(root):
        root = os.path.dirname(root)
    for match in matches:
        if os.path.isdir(match):
            yield from ((path, _name_below(root, path)) for path, _ in _folder_files(match, key))
        else:
            yield match, _name_below(root, match)


def _folder_files(
    folder: str, key: str, suffix: str = "", left_out: frozenset[str] = frozenset()
) -> Iterator[tuple[str, str]]:
    def refuse(error: OSError) -> None:
        raise _unreadable(error.filename, key, error) from error

    paths: list[str] = []
    seen: set[str] = set()
    for root, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        if os.path.realpath(root) in seen:  # A link leads back to it.
            folders.clear()
            continue
        seen.add(os.path.realpath(root))
        folders[:] = [name for name in _visible(folders) if name not in left_out]
        paths.extend(os.path.join(root, name) for name in _visible(files) if name.endswith(suffix))
    yield from sorted(((path, _name_below(folder, path)) for path in paths), key=lambda pair: pair[1])


def _visible(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith(".")]


def _name_below(root: str, path: str) -> str:
    return os.path.relpath(path, root or os.curdir).replace(os.sep, "/")


def _probe(path: str, key: str) -> tuple[int, bool]:
    """Returns the file's size and whether its beginning is text."""
    try:
        # A pipe or device would block or never end, so it is not opened.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return -1, False
        with open(path, "rb", buffering=0) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            return num_bytes, _is_text(file.read(PROBE_BYTES), is_whole=num_bytes <= PROBE_BYTES)
    except OSError as error:
        raise _unreadable(path, key, error) from error


def _is_text(head: bytes, is_whole: bool) -> bool:
    if b"\0" in head:
        return False
    try:
        # Where the file goes on, the last character of the head may be cut; only final=True minds that.
        codecs.getincrementaldecoder("utf-8")().decode(head, final=is_whole)
    except UnicodeDecodeError:
        return False
    return True


def _unreadable(path: str, key: str, error: OSError) -> DataError:
    return DataError(f"{path} (from {key}) cannot be read: {error.strerror}. Mend the file or leave it out of {key}.")
