import os

import pytest

from maxlite.checkpoint import atomicity
from maxlite.checkpoint.atomicity import atomicity_of


@pytest.fixture
def mounted(tmp_path, monkeypatch):
    """mounted(kind): the file system of tmp_path is said to be of that kind."""

    def mount(kind):
        device = os.stat(tmp_path).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        lines = [
            "22 1 999:9 / / rw,relatime shared:1 - ext4 /dev/root rw",
            f"36 22 {number} / {tmp_path} rw,nosuid shared:3 master:2 - {kind} bucket rw,user_id=0",
        ]
        table = tmp_path / "mountinfo"
        table.write_text("\n".join(lines) + "\n")
        monkeypatch.setattr(atomicity, "_MOUNTS", table)

    return mount


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("ext4", "rename"), ("nfs4", "rename"), ("fuse.gcsfuse", "commit_file"), ("fuse.s3fs", "commit_file")],
)
def test_auto_goes_by_the_file_system(tmp_path, mounted, kind, expected):
    mounted(kind)
    assert atomicity_of("auto", tmp_path / "not" / "there") == expected


def test_where_nothing_is_known_of_mounts(tmp_path, monkeypatch):
    monkeypatch.setattr(atomicity, "_MOUNTS", tmp_path / "none")
    assert atomicity_of("auto", tmp_path) == "rename"


@pytest.mark.parametrize("key", ["rename", "commit_file"])
def test_a_key_that_says_it_is_obeyed(tmp_path, mounted, key):
    mounted("fuse.gcsfuse")
    assert atomicity_of(key, tmp_path) == key
