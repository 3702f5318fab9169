"""Evaluation of a finished run: every held-out row once, whatever the batch and the devices."""

import json
import sys

import numpy as np
import pytest

from maxlite.config.load import load_config
from maxlite.errors import DataError
from maxlite.train.evaluation_run import run_evaluation
from maxlite.train.run import run_train
from tests.train.conftest import config_in


@pytest.fixture
def held_out(tmp_path):
    """Ten documents of unequal lengths, some longer than a row."""
    path = tmp_path / "held_out.jsonl"
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(list("abcdef \n"), size)) for size in (3, 90, 17, 41, 8, 200, 64, 5, 33, 77)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path, texts


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus):
    keys = (
        "run_name=trained", "dataset_type=text", f"dataset_path={corpus}", "vocab_size=264", "steps=4",
        "learning_rate=0.01", "eval_interval=4", "eval_steps=-1", "cpu_devices=1", "per_device_batch_size=4",
        "max_target_length=64", "checkpoint_period=2",
    )  # fmt: skip
    return run_train(config_in(tmp_path_factory.mktemp("runs"), *keys))


def evaluate(run, *overrides: str) -> dict[str, float]:
    config = load_config(str(run), overrides, {})
    return run_evaluation(config, str(run), sys.stdout)


@pytest.mark.parametrize("packing", ["packing=true", "packing=false"])
def test_any_batch_size_and_number_of_devices_gives_the_same_loss(trained, held_out, packing):
    path, texts = held_out
    keys = ("dataset_type=jsonl", f"eval_dataset_path={path}", "dataset_path=/not/on/this/machine", packing)
    found = [
        evaluate(trained.run_directory, *keys, *mesh)
        for mesh in (
            ("cpu_devices=1", "per_device_batch_size=1"),
            ("cpu_devices=1", "per_device_batch_size=4"),
            ("cpu_devices=8", "per_device_batch_size=1", "ici_fsdp_parallelism=8"),
        )
    ]
    # With both marks a document of n bytes has n + 1 targets; the token that a cut row ends with begins the next.
    assert {one["eval/total_weights"] for one in found} == {sum(len(text) + 1 for text in texts)}
    losses = [one["eval/avg_loss"] for one in found]
    assert max(losses) - min(losses) < 1e-6, losses
    assert len({round(loss, 2) for loss in losses}) == 1 and 1 < losses[0] < 7


def test_the_run_s_own_held_out_part_gives_what_training_logged_and_leaves_no_trace(trained, logged):
    before = {path: path.stat().st_mtime_ns for path in trained.run_directory.rglob("*")}
    tags = evaluate(trained.run_directory, "cpu_devices=1")
    assert tags["eval/avg_loss"] == pytest.approx(logged(trained, "eval/avg_loss")[3], abs=1e-6)
    assert tags["eval/avg_perplexity"] == pytest.approx(np.exp(tags["eval/avg_loss"]))
    assert {path: path.stat().st_mtime_ns for path in trained.run_directory.rglob("*")} == before


def test_a_checkpoint_and_a_number_of_batches(trained):
    run, first = trained.run_directory, trained.run_directory / "checkpoints" / "2"
    config = load_config(str(run), ["cpu_devices=1"], {})
    earlier = run_evaluation(config, str(first), sys.stdout)
    last = evaluate(run, "cpu_devices=1")
    assert earlier["eval/avg_loss"] > last["eval/avg_loss"]
    cut = evaluate(run, "cpu_devices=1", "eval_steps=1", "per_device_batch_size=1")
    assert 0 < cut["eval/total_weights"] < last["eval/total_weights"]


def test_the_loss_of_a_packed_set_is_that_of_each_document_alone(trained, held_out, tmp_path):
    path, texts = held_out
    short = [text for text in texts if 10 < len(text) < 60]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in short))
    keys = ("cpu_devices=1", "dataset_type=jsonl", "per_device_batch_size=2")
    whole = evaluate(trained.run_directory, *keys, f"eval_dataset_path={path}")
    total = 0.0
    for number, text in enumerate(short):
        one = tmp_path / f"{number}.jsonl"
        one.write_text(json.dumps({"text": text}) + "\n")
        total += evaluate(trained.run_directory, *keys, f"eval_dataset_path={one}")["eval/total_loss"]
    assert whole["eval/total_loss"] == pytest.approx(total, rel=1e-6)


def test_nothing_held_out_is_an_error(trained):
    with pytest.raises(DataError, match="Nothing is held out: give eval_dataset_path="):
        evaluate(trained.run_directory, "cpu_devices=1", "eval_fraction=0")
