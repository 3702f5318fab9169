import dataclasses
import shutil

import pytest

from maxlite.checkpoint import step_folder
from maxlite.checkpoint.record import StepRecord, read_record, write_record
from maxlite.checkpoint.step_folder import (
    clear_incomplete,
    complete_steps,
    list_files,
    missing_file,
    read_data_state,
    remove_step,
    step_numbers,
    temporary_folder,
    temporary_folders,
    verify_files,
)
from maxlite.errors import CheckpointError

WRITTEN = ["items/_METADATA", "items/ocdbt.process_0/d/0a", "iter/metadata"]


def make_step(folder, atomicity="rename"):
    for name in WRITTEN:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f'"{name} of {folder.name}"')
    (folder / "_CHECKPOINT_METADATA").write_text("{}")
    record = StepRecord(0.0, {}, atomicity, 1, {}, {}, list_files(folder), {})
    write_record(folder, record)
    (folder / "commit_success.txt").write_text("")


@pytest.fixture
def checkpoints(tmp_path):
    """The steps 2, 9 and 10, complete."""
    for step in (2, 9, 10):
        make_step(tmp_path / str(step))
    return tmp_path


def test_steps_are_numbers_in_order(checkpoints):
    for name in ("007", "x", "11.orbax-checkpoint-tmp", "12.incomplete"):
        (checkpoints / name).mkdir()
    (checkpoints / "13").write_text("a file")
    assert step_numbers(checkpoints) == complete_steps(checkpoints) == [2, 9, 10]
    assert temporary_folders(checkpoints) == [checkpoints / "11.orbax-checkpoint-tmp"]


def test_a_folder_that_is_not_there_has_no_steps(tmp_path):
    assert step_numbers(tmp_path / "none") == temporary_folders(tmp_path / "none") == []


def test_the_folder_of_a_save_under_way(checkpoints):
    (checkpoints / "11.orbax-checkpoint-tmp").mkdir()
    assert temporary_folder(checkpoints, 11).name == "11.orbax-checkpoint-tmp"
    assert temporary_folder(checkpoints, 9).name == "9"


@pytest.mark.parametrize("name", [*WRITTEN, "_CHECKPOINT_METADATA", "files.json", "commit_success.txt"])
def test_a_missing_file_makes_a_step_incomplete(checkpoints, name):
    (checkpoints / "10" / name).unlink()
    assert missing_file(checkpoints / "10") == name
    assert complete_steps(checkpoints) == [2, 9]
    with pytest.raises(CheckpointError, match=f"step 10 can't be read: {name} is missing"):
        verify_files(checkpoints / "10")


def test_verify_reads_what_holds_no_chunks(checkpoints):
    record = verify_files(checkpoints / "2")
    assert record == read_record(checkpoints / "2")
    assert {name: size for name, (size, _) in record.files.items()} == {name: len(name) + 7 for name in WRITTEN}
    assert [name for name, (_, checksum) in record.files.items() if checksum is None] == ["items/ocdbt.process_0/d/0a"]
    (checkpoints / "2" / "items" / "_METADATA").write_text('"items/_METADATA of 3"')
    with pytest.raises(CheckpointError, match="bytes of items/_METADATA") as caught:
        verify_files(checkpoints / "2")
    assert "Remove that folder to begin anew" in str(caught.value)
    (checkpoints / "10" / WRITTEN[1]).write_text("short")
    with pytest.raises(CheckpointError, match="d/0a has 5 bytes where 34 were saved"):
        verify_files(checkpoints / "10")


@pytest.mark.parametrize("content", ["", "[]", "{}", "\xff", '{"checksum": 1, "step": {}}'])
def test_a_damaged_list_is_damage(checkpoints, content):
    (checkpoints / "10" / "files.json").write_text(content, encoding="latin-1")
    assert complete_steps(checkpoints) == [2, 9, 10]
    with pytest.raises(CheckpointError, match="files.json is not as it was saved"):
        verify_files(checkpoints / "10")


def test_the_data_position(checkpoints):
    assert read_data_state(checkpoints / "9") == "iter/metadata of 9"
    (checkpoints / "9" / "iter" / "metadata").write_text("{")
    with pytest.raises(CheckpointError, match="step 9 can't be read: the data position is unreadable"):
        read_data_state(checkpoints / "9")


def test_clear_keeps_what_may_matter(checkpoints):
    (checkpoints / "11.orbax-checkpoint-tmp" / "items").mkdir(parents=True)
    (checkpoints / "10.incomplete").mkdir()
    (checkpoints / "10" / "iter" / "metadata").unlink()
    clear_incomplete(checkpoints)
    assert sorted(entry.name for entry in checkpoints.iterdir()) == ["10.incomplete", "2", "9"]
    assert (checkpoints / "10.incomplete" / "items" / "_METADATA").is_file()


@pytest.mark.parametrize("lost", [["commit_success.txt"], ["commit_success.txt", "files.json"]])
def test_a_step_without_its_mark_was_never_complete_where_marks_make_it(checkpoints, lost):
    make_step(checkpoints / "12", "commit_file")
    assert complete_steps(checkpoints) == [2, 9, 10, 12]
    for name in lost:
        (checkpoints / "12" / name).unlink()
    assert complete_steps(checkpoints) == [2, 9, 10]
    assert temporary_folders(checkpoints) == [checkpoints / "12"]
    clear_incomplete(checkpoints)
    assert sorted(entry.name for entry in checkpoints.iterdir()) == ["10", "2", "9"]


@pytest.mark.parametrize("name", ["commit_success.txt", "files.json"])
def test_a_step_that_a_rename_made_complete_lost_what_it_lacks(checkpoints, name):
    (checkpoints / "10" / name).unlink()
    assert temporary_folders(checkpoints) == []
    clear_incomplete(checkpoints)
    assert (checkpoints / "10.incomplete").is_dir()


def test_a_removal_that_is_cut_short_leaves_nothing_that_counts(checkpoints, monkeypatch):
    def killed(folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(step_folder, "remove_folder", killed)
        remove_step(checkpoints / "9")
    assert complete_steps(checkpoints) == [2, 10]
    clear_incomplete(checkpoints)
    assert sorted(entry.name for entry in checkpoints.iterdir()) == ["10", "2"]
    remove_step(checkpoints / "2")
    assert step_numbers(checkpoints) == [10]


def test_a_copy_of_a_step_is_a_step(checkpoints, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(checkpoints / "9", other / "4")
    assert dataclasses.asdict(verify_files(other / "4")) == dataclasses.asdict(verify_files(checkpoints / "9"))
