import json

import pytest

from maxlite.checkpoint.step_folder import (
    clear_incomplete,
    complete_steps,
    missing_file,
    step_numbers,
    temporary_folders,
    verify_files,
    write_files,
)
from maxlite.errors import CheckpointError


@pytest.fixture
def checkpoints(tmp_path):
    """The steps 2, 9 and 10, complete, each with one file in items/ and one in iter/."""
    for step in (2, 9, 10):
        folder = tmp_path / str(step)
        for part in ("items", "iter"):
            (folder / part).mkdir(parents=True)
            (folder / part / "data").write_text(f"{part} of {step}")
        (folder / "_CHECKPOINT_METADATA").write_text("{}")
        write_files(folder)
    return tmp_path


def test_steps_are_numbers_in_order(checkpoints):
    for name in ("007", "x", "11.orbax-checkpoint-tmp", "12.incomplete"):
        (checkpoints / name).mkdir()
    (checkpoints / "13").write_text("a file")
    assert step_numbers(checkpoints) == complete_steps(checkpoints) == [2, 9, 10]
    assert (
        temporary_folders(checkpoints)
        == temporary_folders(checkpoints, 11)
        == [checkpoints / "11.orbax-checkpoint-tmp"]
    )
    assert temporary_folders(checkpoints, 1) == []


def test_a_folder_that_is_not_there_has_no_steps(tmp_path):
    assert step_numbers(tmp_path / "none") == temporary_folders(tmp_path / "none") == []


@pytest.mark.parametrize("name", ["items/data", "iter/data", "_CHECKPOINT_METADATA", "files.json"])
def test_a_missing_file_makes_a_step_incomplete(checkpoints, name):
    (checkpoints / "10" / name).unlink()
    assert missing_file(checkpoints / "10") == name
    assert complete_steps(checkpoints) == [2, 9]
    with pytest.raises(CheckpointError, match=f"step 10 can't be read: {name} is missing"):
        verify_files(checkpoints / "10")


def test_the_last_commit_mark_is_required_where_the_parts_have_theirs(checkpoints):
    (checkpoints / "10" / "iter" / "commit_success.txt").write_text("")
    write_files(checkpoints / "10")
    assert missing_file(checkpoints / "10") == "commit_success.txt"
    (checkpoints / "10" / "commit_success.txt").write_text("")
    assert missing_file(checkpoints / "10") is None


def test_verify_reads_every_byte(checkpoints):
    verify_files(checkpoints / "2")
    (checkpoints / "2" / "items" / "data").write_text("items of 3")
    with pytest.raises(CheckpointError, match="bytes of items/data") as caught:
        verify_files(checkpoints / "2")
    assert "Remove that folder to begin anew" in str(caught.value)
    (checkpoints / "10" / "items" / "data").write_text("items of 10, and more")
    with pytest.raises(CheckpointError, match="items/data has 21 bytes where 11 were saved"):
        verify_files(checkpoints / "10")


@pytest.mark.parametrize("content", ["", "[]", "{}", "\xff", '{"checksum": 1, "files": {}}'])
def test_a_damaged_list_is_damage(checkpoints, content):
    (checkpoints / "10" / "files.json").write_text(content, encoding="latin-1")
    assert complete_steps(checkpoints) == [2, 9, 10]
    with pytest.raises(CheckpointError, match="files.json is not as it was saved"):
        verify_files(checkpoints / "10")


def test_the_list_names_sizes(checkpoints):
    files = json.loads((checkpoints / "2" / "files.json").read_text())["files"]
    assert {name: size for name, (size, _) in files.items()} == {"items/data": 10, "iter/data": 9}


def test_clear_keeps_what_may_matter(checkpoints):
    (checkpoints / "11.orbax-checkpoint-tmp" / "items").mkdir(parents=True)
    (checkpoints / "10.incomplete").mkdir()
    (checkpoints / "10" / "iter" / "data").unlink()
    clear_incomplete(checkpoints)
    assert sorted(entry.name for entry in checkpoints.iterdir()) == ["10.incomplete", "2", "9"]
    assert (checkpoints / "10.incomplete" / "items" / "data").read_text() == "items of 10"
