"""Local copies of what lies behind URLs, and what is not opened."""

import os
from pathlib import Path

import fsspec
import pytest

from maxlite.data.open_files import local_copy, open_file
from maxlite.errors import ConfigError, DataError


def test_a_copy_lasts_as_long_as_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"here")
    with local_copy(f"{tmp_path}/a") as path:
        assert path == f"{tmp_path}/a"
    assert (tmp_path / "a").exists()
    with fsspec.open("memory://copied/a", "wb") as file:
        file.write(b"there" * 1000)  # type: ignore[union-attr]
    with local_copy("memory://copied/a") as path:
        assert Path(path).read_bytes() == b"there" * 1000
    assert not os.path.exists(path)


@pytest.mark.parametrize("path", ["/dev/zero", "/"])
def test_what_is_no_file(path: str) -> None:
    with pytest.raises(DataError, match=f"{path} is a pipe, a device or a folder"), open_file(path):
        pass


def test_faults_while_reading_name_the_file(tmp_path: Path) -> None:
    """But not those that were raised for the user already, nor our own broken assumptions."""
    (tmp_path / "a").write_bytes(b"")
    for error in (ConfigError("mine"), AssertionError("mine"), KeyboardInterrupt()):
        with pytest.raises(type(error)), open_file(f"{tmp_path}/a"):
            raise error
    for error, reason in ((OSError(5, "Input/output error"), "Input/output error"), (EOFError(), "EOFError")):
        with pytest.raises(DataError, match=f"{tmp_path}/a cannot be read: {reason}"), open_file(f"{tmp_path}/a"):
            raise error
