"""Which checkpoints a run leaves, and what a restore says."""

import pytest

from maxlite.errors import ConfigError

QUICK = ("cpu_devices=1", "eval_interval=0", "checkpoint_period=1", "log_period=100")


def left(result) -> list[int]:
    return sorted(int(folder.name) for folder in (result.run_directory / "checkpoints").iterdir())


def test_the_newest_and_multiples_are_kept(train):
    result = train(*QUICK, "steps=12", "max_num_checkpoints_to_keep=2", "checkpoint_keep_period=5")
    assert left(result) == [5, 10, 11, 12]


def test_the_best_are_kept(train, logged):
    # A rate that is far too high makes the loss rise again.
    keys = ("steps=8", "learning_rate=3", "opt_type=sgd", "warmup_steps_fraction=0", "checkpoint_keep_best=2")
    result = train(*QUICK, *keys, "max_num_checkpoints_to_keep=1", "checkpoint_best_metric=learning/loss")
    losses = logged(result)
    best = sorted(losses, key=lambda step: losses[step])[:2]
    assert left(result) == sorted({8, *(step + 1 for step in best)})


def test_a_metric_that_no_step_has_is_refused_with_those_there_are(train):
    with pytest.raises(ConfigError, match=r"learning/accuracy is no tag of this run; .*learning/loss"):
        train(*QUICK, "steps=2", "checkpoint_keep_best=1", "checkpoint_best_metric=learning/accuracy")


def test_a_resumed_run_says_what_it_restored(train, capsys):
    train(*QUICK, "steps=2")
    capsys.readouterr()
    train(*QUICK, "steps=3")
    out = capsys.readouterr().out
    assert "Restored " in out and "Resumed at step 2" in out
    assert "First step ended" in out and "restore" in out.partition("First step ended")[2].splitlines()[0]


def test_goodput_is_in_the_line_and_the_row(train, capsys, logged):
    result = train(*QUICK, "steps=3", "log_period=1")
    out = capsys.readouterr().out
    assert ", goodput: " in out and out.rstrip().splitlines()[-1].startswith("Goodput ")
    assert all(0 < share < 1 for share in logged(result, "goodput/fraction").values())
    assert (result.run_directory / "metrics" / "events.jsonl").is_file()


def test_without_recording_nothing_of_it_is_said(train, capsys, logged):
    result = train(*QUICK, "steps=2", "enable_goodput_recording=false")
    assert "oodput" not in capsys.readouterr().out
    assert logged(result, "goodput/fraction") == {}
    assert not (result.run_directory / "metrics" / "events.jsonl").exists()
