"""Where checkpoints lie: a folder, or a folder of a bucket, whose paths have pathlib's methods too.

In a bucket nothing is renamed (each object would be copied), and reads and writes of arrays go around the library
that lists it.
"""

import importlib.util
import logging
import os
import shutil
from pathlib import Path
from typing import cast

import fsspec
import fsspec.config
from etils import epath

from maxlite.errors import CheckpointError

_SCHEME = "gs://"


def place_of(path: str | Path) -> Path:
    """Returns the absolute path of a folder or of a gs:// URL, which need not exist.

    Raises:
        CheckpointError: the bucket can't be reached, or it is another kind of URL.
    """
    text = str(path)
    if is_bucket(path):
        return _bucket(text)
    if "://" in text:
        raise CheckpointError(
            f"checkpoints can't lie at {text}: it takes a folder (perhaps a mounted bucket) or gs://."
        )
    return Path(path).expanduser().absolute()


def is_bucket(path: str | Path) -> bool:
    """Says whether a place is in a bucket."""
    return str(path).startswith(_SCHEME)


def file_sizes(folder: Path) -> dict[str, int]:
    """Returns path below `folder` -> bytes of every file there; none if the folder is not there."""
    if not is_bucket(folder):
        files = (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
        return {file.relative_to(folder).as_posix(): size for file in files if (size := _size(file)) is not None}
    system, root = fsspec.core.url_to_fs(str(folder))
    found = system.find(root, detail=True)
    return {name.removeprefix(f"{root}/"): entry["size"] for name, entry in found.items()}


def remove_folder(folder: Path) -> None:
    """Removes a folder and all that is in it."""
    if is_bucket(folder):
        cast(epath.Path, folder).rmtree()
    else:
        shutil.rmtree(folder)


def _bucket(url: str) -> Path:
    if importlib.util.find_spec("gcsfs") is None:
        raise CheckpointError(f"{url} needs a package that is not installed: pip install 'maxlite[gcs]'.")
    # Lists that are kept would not have what was written around this library.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    # The same library everywhere, whatever else is installed.
    os.environ["EPATH_USE_TF"] = "false"
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    place = epath.Path(url)
    try:
        place.exists()
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise CheckpointError(
            f"{url} can't be reached: {reason}. See that the bucket exists and that this machine may use it "
            "(gcloud auth application-default login, or the machine's service account)."
        ) from error
    return cast(Path, place)


def _size(file: Path) -> int | None:
    """None where a run that goes on has just removed the file."""
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return None
