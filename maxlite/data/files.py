"""Finds the files that a path, folder, glob, URL or list of them names. Nothing of what they hold is read here."""

import collections
import glob
import os
import re
import sysconfig
from collections.abc import Iterable
from typing import NamedTuple

from maxlite.data.remote_files import file_name, is_url, list_url, local_path, url_above
from maxlite.errors import ConfigError, DataError

# The names that a folder is searched for; a file that is named itself, or by a glob, may be called anything.
PATTERNS = {
    "text": "",
    "jsonl": r"\.(jsonl|ndjson)(\.(gz|bz2|xz|zst))?$",
    "parquet": r"\.parquet$",
    "arrayrecord": r"\.array_?record(-\d+-of-\d+)?$",
    # Each marks a folder of Dataset.save_to_disk, which is then what is found.
    "hf": r"(^|/)(dataset_dict|state)\.json$",
}
SEARCHED_FOR = {
    "text": "files",
    "jsonl": "*.jsonl or *.ndjson",
    "parquet": "*.parquet",
    "arrayrecord": "*.array_record or *.arrayrecord",
    "hf": "folder that Dataset.save_to_disk wrote (for a folder of Parquet files, set dataset_type=parquet)",
}
# Folders in the standard library's that are not the standard library.
FOREIGN_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})


class File(NamedTuple):
    """A file, or for the kind hf a folder.

    path: a local path or a URL. name: the path below the folder that was given, so it is the same wherever that
    folder lies; no other file's that was found with it.
    """

    path: str
    name: str


def find_files(paths: tuple[str, ...] | None, key: str, kind: str) -> list[File]:
    """Returns the files of `kind`, a key of PATTERNS, that `paths` mean, each once; None is Python's own library.

    Raises DataError if a path means nothing or cannot be read, naming the config key that it came from, and
    ConfigError if there is no path though `kind` takes one.
    """
    if paths is None:
        if kind != "text":
            raise ConfigError(f"{key} is not set, but dataset_type={kind} reads files. Set {key} to some.")
        return _library_files(key)
    found: dict[str, File] = {}
    for given in paths:
        path = (local_path(given) or given) if is_url(given) else os.path.expanduser(given)
        files = _remote_files(path, key, kind) if is_url(path) else _local_files(path, key, kind)
        if kind == "hf":
            files = _saved_folders(files)
        if not files:
            raise DataError(f"{key}={given} holds no {SEARCHED_FOR[kind]}. Give {key} something that does.")
        for file in files:
            found.setdefault(file.path if is_url(file.path) else os.path.realpath(file.path), file)
    return _with_own_names(found.values())


def _library_files(key: str) -> list[File]:
    """Returns the sources of Python's library, less the few of its tests that are written in other encodings."""
    files = _files_below(sysconfig.get_path("stdlib"), key, r"\.py$", FOREIGN_FOLDERS)
    return [file for file in files if _is_utf8(file.path, key)]


def _remote_files(url: str, key: str, kind: str) -> list[File]:
    listed = list_url(url, PATTERNS[kind])
    if listed is None:
        raise _missing(url, key)
    return [File(path, name) for path, name in listed]


def _local_files(path: str, key: str, kind: str) -> list[File]:
    if os.path.isdir(path):
        return _files_below(path, key, PATTERNS[kind])
    if os.path.lexists(path):
        return [File(path, os.path.basename(path))]
    if not glob.has_magic(path):
        raise _missing(path, key)
    matches = sorted(glob.glob(path, recursive=True))
    if not matches:
        raise DataError(f"{key}={path} matches no file. Check the glob; ** spans folders, hidden files are left out.")
    root = path
    while glob.has_magic(root):
        root = os.path.dirname(root)
    found: list[File] = []
    for match in matches:
        if os.path.isdir(match):
            found += [
                File(file.path, _name_below(root, file.path)) for file in _files_below(match, key, PATTERNS[kind])
            ]
        else:
            found.append(File(match, _name_below(root, match)))
    return found


def _files_below(folder: str, key: str, pattern: str, left_out: frozenset[str] = frozenset()) -> list[File]:
    def refuse(error: OSError) -> None:
        raise _unreadable(error.filename, key, error) from error

    found: list[File] = []
    seen: set[str] = set()
    for root, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if os.path.realpath(root) in seen:  # A link leads back to it.
            folders.clear()
            continue
        seen.add(os.path.realpath(root))
        folders[:] = [name for name in _visible(folders) if name not in left_out]
        paths = [os.path.join(root, name) for name in _visible(names) if re.search(pattern, name)]
        found += [File(path, _name_below(folder, path)) for path in paths]
    return sorted(found, key=lambda file: file.name)


def _saved_folders(files: Iterable[File]) -> list[File]:
    """Returns the folders that files called state.json or dataset_dict.json mark, outermost only."""
    folders: dict[str, File] = {}
    for file in files:
        if re.search(PATTERNS["hf"], file.name):
            path = url_above(file.path) if is_url(file.path) else os.path.dirname(file.path) or os.curdir
            name = os.path.dirname(file.name) or file_name(path if is_url(path) else os.path.abspath(path))
            folders[path] = File(path, name)
    # A DatasetDict's folder holds one for each split.
    above = {path: url_above(path) if is_url(path) else os.path.dirname(path) for path in folders}
    return [file for path, file in folders.items() if above[path] == path or above[path] not in folders]


def _with_own_names(files: Iterable[File]) -> list[File]:
    """Returns the files with #2, #3 ... after a name that an earlier one has, as two folders may hold the same."""
    count: collections.Counter[str] = collections.Counter()
    named: list[File] = []
    for file in files:
        count[file.name] += 1
        named.append(file if count[file.name] == 1 else file._replace(name=f"{file.name}#{count[file.name]}"))
    return named


def _visible(names: Iterable[str]) -> list[str]:
    return [name for name in names if not name.startswith(".")]


def _name_below(root: str, path: str) -> str:
    return os.path.relpath(path, root or os.curdir).replace(os.sep, "/")


def _is_utf8(path: str, key: str) -> bool:
    try:
        with open(path, "rb") as file:
            file.read().decode()
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise _unreadable(path, key, error) from error
    return True


def _missing(given: str, key: str) -> DataError:
    return DataError(f"{key}={given} does not exist. Give {key} a file, folder, glob or URL that does.")


def _unreadable(path: str, key: str, error: OSError) -> DataError:
    return DataError(f"{path} (from {key}) cannot be read: {error.strerror}. Mend the file or leave it out of {key}.")
