"""Files of JSON objects, one a line, that a process which is killed leaves whole."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maxlite.errors import CheckpointError


class JsonLines:
    """Appends JSON objects to a file, each line brought to the file at once. NaN and infinity keep these names."""

    def __init__(self, path: Path) -> None:
        """Opens the file, which must end with a whole line. Raises CheckpointError if it can't be written."""
        self._path = path
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "ab", buffering=0)

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one line. Raises CheckpointError if it can't be written, as on a full disk."""
        line = memoryview((json.dumps(row) + "\n").encode())
        with writing(self._path):
            while line:
                line = line[self._file.write(line) :]

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        with writing(self._path):
            self._file.close()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the system says of a file being written into a CheckpointError that names it."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{path} can't be written: {error.strerror or error}. Make room or make it writable, or choose another "
            "base_output_directory; the same command then goes on from the last checkpoint."
        ) from error
