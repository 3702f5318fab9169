import subprocess
import sys

import pytest

from maxlite.checkpoint.run_directory import RunDirectory, check_same_model
from maxlite.errors import CheckpointError, ConfigError

HOLD = """
import sys
from maxlite.checkpoint.run_directory import RunDirectory
with RunDirectory(sys.argv[1], "run").lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_makes_the_folder_and_names_its_places(tmp_path):
    run = RunDirectory(tmp_path / "runs", "first")
    assert run.path == tmp_path / "runs" / "first" and run.path.is_dir()
    assert run.config_path == run.path / "config.yml"
    assert [run.checkpoints, run.metrics, run.tensorboard, run.hlo, run.jaxpr] == [
        run.path / name for name in ("checkpoints", "metrics", "tensorboard", "hlo", "jaxpr")
    ]
    assert list(run.path.iterdir()) == []


def test_a_relative_base_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert RunDirectory("runs", "first").path == tmp_path / "runs" / "first"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a", "a\\b", "a\0b"])
def test_a_bad_run_name_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="run_name"):
        RunDirectory(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="can't be written: Not a directory.*base_output_directory"):
        RunDirectory(tmp_path / "file", "run")


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path):
    run = RunDirectory(tmp_path, "run")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"process {holder.pid} is training in {run.path}"), run.lock():
            pass
        holder.kill()
        holder.wait()
        with run.lock():
            assert (run.path / ".lock").exists()


def test_the_lock_can_be_taken_again(tmp_path):
    run = RunDirectory(tmp_path, "run")
    with run.lock(), pytest.raises(CheckpointError, match="another run_name"), run.lock():
        pass
    with run.lock():
        pass


def test_config_is_written_whole(tmp_path):
    run = RunDirectory(tmp_path, "run")
    run.write_config("steps: 1\n")
    run.write_config("steps: 2\nname: é\n")
    assert run.config_path.read_text(encoding="utf-8") == "steps: 2\nname: é\n"
    assert [entry.name for entry in run.path.iterdir()] == ["config.yml"]


def test_config_that_cannot_be_written(tmp_path):
    run = RunDirectory(tmp_path, "run")
    run.path.rmdir()
    with pytest.raises(CheckpointError, match="can't be written: No such file"):
        run.write_config("steps: 1\n")


SAVED = {"emb_dim": 64, "attention_pattern": ["full"], "weight_dtype": "float32", "learning_rate": 0.1, "model": "a"}


def test_harmless_differences_are_returned(tmp_path):
    present = SAVED | {"attention_pattern": ("full",), "learning_rate": 0.2, "model": "b", "new_key": 1}
    assert check_same_model(SAVED, present, tmp_path) == {"learning_rate": (0.1, 0.2), "model": ("a", "b")}


def test_another_model_is_refused_with_every_key(tmp_path):
    present = SAVED | {"emb_dim": 32, "weight_dtype": "bfloat16", "learning_rate": 0.2}
    with pytest.raises(CheckpointError) as caught:
        check_same_model(SAVED, present, tmp_path)
    message = str(caught.value)
    assert str(tmp_path) in message and "another run_name" in message and "set these keys back" in message
    assert "emb_dim: 64 in the run, 32 now" in message
    assert "weight_dtype: float32 in the run, bfloat16 now" in message
    assert "learning_rate" not in message
