"""What a folder of checkpoints holds, whole and broken."""

import dataclasses
import shutil

import pytest

from maxlite.checkpoint.listing import list_steps, why_kept
from maxlite.checkpoint.manager import Checkpointer


@pytest.fixture
def checkpoints(run, states):
    """The steps 2, 4, 10 with a loss each."""
    checkpointer = Checkpointer(run, states.config(keep=9))
    for step, loss in ((2, 1.5), (4, 0.5), (10, 2.5)):
        checkpointer.save(step, states.build(states.mesh(data=2, fsdp=4), seed=step), {}, {"eval/avg_loss": loss})
    checkpointer.close()
    return run / "checkpoints"


def files_below(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_steps_are_listed_in_order_with_their_records_and_no_file_is_made(checkpoints):
    before = files_below(checkpoints)
    steps = list_steps(checkpoints)
    assert files_below(checkpoints) == before
    assert [(entry.step, entry.problem) for entry in steps] == [(2, None), (4, None), (10, None)]
    for entry in steps:
        assert entry.folder == checkpoints / str(entry.step)
        assert entry.num_bytes == sum(path.stat().st_size for path in entry.folder.rglob("*") if path.is_file())
    assert [entry.record.metrics["eval/avg_loss"] for entry in steps] == [1.5, 0.5, 2.5]
    assert steps[0].record.mesh == {"data": 2, "fsdp": 4}


def test_what_is_not_complete_says_why(checkpoints):
    shutil.copytree(checkpoints / "4", checkpoints / "12.orbax-checkpoint-tmp")
    (checkpoints / "2" / "iter" / "metadata").unlink()
    record = checkpoints / "4" / "files.json"
    record.write_text(record.read_text().replace("0.5", "0.4"))
    problems = {entry.folder.name: entry.problem for entry in list_steps(checkpoints)}
    assert problems.pop("2") == "iter/metadata is missing"
    assert problems.pop("4").startswith("files.json is not as it was saved")
    assert problems == {"10": None, "12.orbax-checkpoint-tmp": "not finished"}
    assert [entry.step for entry in list_steps(checkpoints)] == [2, 4, 10, None]


def test_a_save_without_its_mark_is_listed_once(checkpoints):
    (checkpoints / "10" / "commit_success.txt").unlink()
    (checkpoints / "10" / "files.json").unlink()
    assert [(entry.folder.name, entry.step, entry.problem) for entry in list_steps(checkpoints)][2:] == [
        ("10", None, "not finished")
    ]


def test_why_steps_are_kept(checkpoints, states):
    steps = list_steps(checkpoints)
    config = dataclasses.replace(
        states.config(keep=1), checkpoint_keep_best=1, checkpoint_best_metric="eval/avg_loss", checkpoint_keep_period=5
    )
    kept = why_kept(steps, config)
    assert kept.keys() == {4, 10}
    assert "best 1" in kept[4] and "newest" in kept[10] and "multiple of 5" in kept[10]
    # What is damaged is neither kept nor counted.
    (checkpoints / "4" / "items" / "_METADATA").unlink()
    assert why_kept(list_steps(checkpoints), config).keys() == {2, 10}


def test_there_may_be_no_folder(tmp_path):
    assert list_steps(tmp_path / "nowhere") == []
