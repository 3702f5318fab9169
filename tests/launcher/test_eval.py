"""The eval command as a user meets it."""

import json

import pytest


@pytest.fixture(scope="module")
def trained(fork_maxlite, tmp_path_factory):
    """A folder that holds a finished small run, runs/default."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "words.txt").write_text("one two three four five six seven eight nine ten\n" * 60)
    keys = ("smoke=true", "steps=2", "dataset_path=words.txt", "max_new_tokens=2", "eval_interval=0")
    finished = fork_maxlite(["train", "base.yml", *keys], cwd=folder)
    assert finished.code == 0, finished.stderr
    return folder


def test_json_is_one_object_alone_and_a_checkpoint_is_the_run(trained, fork_maxlite):
    finished = fork_maxlite(["eval", "runs/default", "--json"], cwd=trained)
    assert finished.code == 0, finished.stderr
    tags = json.loads(finished.stdout)
    assert tags["parameters"] == "runs/default" and tags["eval/total_weights"] > 100
    assert tags["eval/avg_loss"] == pytest.approx(tags["eval/total_loss"] / tags["eval/total_weights"])
    assert "held out" in finished.stderr
    finished = fork_maxlite(["eval", "runs/default/checkpoints/2", "per_device_batch_size=1"], cwd=trained)
    assert finished.code == 0 and finished.stderr == ""
    last = finished.stdout.splitlines()[-1]
    assert last.startswith(f"Evaluated runs/default/checkpoints/2: loss={tags['eval/avg_loss']:.3f}, perplexity=")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["base.yml", "smoke=true"], 2, ["base.yml is a config without parameters", "load_parameters_path=RUN"]),
        (["runs/default", "eval_fraction=0"], 3, ["Nothing is held out", "eval_dataset_path="]),
        (["runs/default", "eval_dataset_path=nowhere"], 3, ["nowhere"]),
        (["runs/default", "emb_dim=32"], 6, ["emb_dim"]),
    ],
)
def test_mistakes_are_named(trained, fork_maxlite, arguments, code, words):
    finished = fork_maxlite(["eval", *arguments], cwd=trained)
    assert finished.code == code and "Traceback" not in finished.stderr, finished.stderr
    assert all(word in finished.stderr for word in words), finished.stderr
