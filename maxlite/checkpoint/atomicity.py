"""How a step becomes complete: by a rename, or by a file that is written last."""

import os
from pathlib import Path

from maxlite.checkpoint.place import is_bucket

RENAME, COMMIT_FILE = "rename", "commit_file"
_MOUNTS = Path("/proc/self/mountinfo")
# Buckets mounted as folders: a folder is renamed there by copying each file and removing it.
_BUCKETS = frozenset({"fuse.gcsfuse", "fuse.s3fs", "fuse.rclone"})


def atomicity_of(key: str, folder: Path) -> str:
    """Returns `rename` or `commit_file`: what the key says, or for auto what the folder's file system can do.

    key: checkpoint_atomicity. folder: need not exist yet.
    """
    if key != "auto":
        return key
    if is_bucket(folder):
        return COMMIT_FILE
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    return COMMIT_FILE if _file_system(existing) in _BUCKETS else RENAME


def _file_system(folder: Path) -> str | None:
    """The type of the file system that a folder lies on, as Linux names it; None where that can't be asked."""
    if not _MOUNTS.is_file():
        return None
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in _MOUNTS.read_text(encoding="utf-8").splitlines():
        # Fields up to a lone dash vary in number; the type is the first behind it.
        place, _, kind = line.partition(" - ")
        if place.split()[2] == number:
            return kind.split()[0]
    return None
