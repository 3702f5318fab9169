"""Two real processes of four fake devices do what one process of eight does: train, evaluate, save, resume, decode."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from maxlite.config.load import load_config
from maxlite.train.run import run_train
from tests.conftest import ENTRY_POINT, TINY

TWO = ("launch", "local", "processes=2", "--")
KEYS = (
    *(text for text in TINY if not text.startswith(("dataset_type", "vocab_size", "num_kv_heads"))),
    "num_kv_heads=4",
    "vocab_size=264",
    "dataset_type=text",
    "eval_interval=2",
    "eval_steps=2",
    "log_period=1",
    "learning_rate=0.01",
    "learning_rate_schedule_steps=8",
    "checkpoint_period=2",
    "enable_tensorboard=false",
    "peak_tflops_per_device=1",
    "prompt=ab",
    "max_new_tokens=8",
    "base_output_directory=runs",
)
MESHES = {
    "fsdp": ("ici_fsdp_parallelism=8",),
    "fsdp_tensor": ("ici_fsdp_parallelism=2", "ici_tensor_parallelism=4"),
    # The outer axis lies within the row order of both processes, so that each has every other row.
    "tensor_across": ("ici_tensor_parallelism=4", "ici_data_parallelism=2", "gradient_accumulation_steps=2"),
    "context": ("ici_context_parallelism=8", "per_device_batch_size=0.25"),
    "pipeline": ("ici_pipeline_parallelism=2", "ici_fsdp_parallelism=4"),
}


@pytest.fixture
def two_and_one(run_maxlite, tmp_path, corpus):
    """run(processes, *overrides): one command of `train` in so many processes, eight devices in all."""

    def run(processes: int, *overrides: str, command: str = "train", config: str = "base.yml"):
        given = {text.partition("=")[0]: text for text in (*KEYS, f"dataset_path={corpus}", *overrides)}
        keys = list(given.values()) if config == "base.yml" else list(overrides)
        launch = TWO if processes == 2 else ()
        return run_maxlite([*launch, command, config, *keys, f"cpu_devices={8 // processes}"], tmp_path)

    return run


def exact_rows(path) -> dict[int, dict[str, float]]:
    """Every number of a run that does not tell the time."""
    rows = [json.loads(line) for line in (path / "metrics" / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {tag: value for tag, value in row.items() if tag.startswith(("learning/", "eval/")) and "seconds" not in tag}
        for row in rows
    ]
    return {row["step"]: numbers for row, numbers in zip(rows, kept, strict=True)}


def assert_same(found: dict[int, dict[str, float]], wanted: dict[int, dict[str, float]]) -> None:
    """Sums over processes may be taken in another order than sums over the devices of one."""
    assert found.keys() == wanted.keys()
    for step, numbers in wanted.items():
        assert found[step] == pytest.approx(numbers, rel=2e-5, abs=1e-6), step


@pytest.fixture
def in_process(tmp_path, corpus):
    """run(*overrides): the same in this process, on its eight devices."""

    def run(*overrides: str) -> None:
        given = (*KEYS, f"dataset_path={corpus}", f"base_output_directory={tmp_path}/runs", "cpu_devices=8", *overrides)
        run_train(load_config("base.yml", list({text.partition("=")[0]: text for text in given}.values()), {}))

    return run


@pytest.mark.slow
def test_two_processes_save_what_one_goes_on_from(two_and_one, in_process, tmp_path):
    """The run of two, resumed by one, is the run of one that was never stopped (P24, P50)."""
    first = two_and_one(2, *MESHES["fsdp"], "run_name=two", "steps=4")
    assert first.code == 0, first.stderr
    assert first.stderr.count("4 of 8 cpu devices") == 2
    # Process 0 alone tells of the run.
    assert first.stdout.count("completed step: 0,") == 1
    for name in ("one", "two"):
        in_process(*MESHES["fsdp"], f"run_name={name}", "steps=6")
    assert_same(exact_rows(tmp_path / "runs" / "two"), exact_rows(tmp_path / "runs" / "one"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh != "fsdp"])
def test_one_process_saves_what_two_go_on_from(two_and_one, in_process, tmp_path, mesh):
    """On meshes whose axes cross the border between the processes in every way."""
    in_process(*MESHES[mesh], "run_name=two", "steps=2")
    resumed = two_and_one(2, *MESHES[mesh], "run_name=two", "steps=6")
    assert "Resumed at step 2" in resumed.stdout, resumed.stderr
    in_process(*MESHES[mesh], "run_name=one", "steps=6")
    assert_same(exact_rows(tmp_path / "runs" / "two"), exact_rows(tmp_path / "runs" / "one"))


@pytest.mark.slow
def test_two_processes_decode_and_evaluate_as_one(two_and_one, tmp_path):
    trained = two_and_one(2, "ici_fsdp_parallelism=8", "run_name=r", "steps=2")
    assert trained.code == 0, trained.stderr
    asked = ("prompt_ids=65,66;67,68,69", "--json")
    tokens, losses = [], []
    for processes in (1, 2):
        decoded = two_and_one(processes, *asked, command="decode", config="runs/r")
        assert decoded.code == 0, decoded.stderr
        tokens.append([json.loads(line)["ids"] for line in decoded.stdout.splitlines() if line.startswith("{")])
        evaluated = two_and_one(processes, "--json", command="eval", config="runs/r")
        assert evaluated.code == 0, evaluated.stderr
        losses.append(json.loads(evaluated.stdout.splitlines()[-1])["eval/avg_loss"])
    assert tokens[0] == tokens[1] and len(tokens[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_a_stop_signal_to_one_process_stops_both_at_one_step(tmp_path, corpus, process_environment):
    """One save, exit 75, and the same command goes on from it."""
    keys = [*KEYS, f"dataset_path={corpus}", "ici_fsdp_parallelism=8", "cpu_devices=4", "steps=100000", "run_name=r"]
    keys = [key for key in keys if not key.startswith("checkpoint_period")] + ["checkpoint_period=100000"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", ENTRY_POINT, *TWO, "train", "base.yml", *keys],
        cwd=tmp_path, env=process_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics = tmp_path / "runs" / "r" / "metrics" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and metrics.read_text().count("\n") > 3):
        assert time.monotonic() < deadline and process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    steps = [int(folder.name) for folder in (tmp_path / "runs" / "r" / "checkpoints").iterdir()]
    assert len(steps) == 1 and f"saved step {steps[0]}" in err, (out, err)
