"""Fine-tuning a real model: what it is tuned on gets likelier where it has not seen it."""

import itertools
import json
from pathlib import Path

import pytest

from maxlite.launcher.resolve import resolve_config
from maxlite.train.run import run_train

STORIES = Path(__file__).resolve().parents[1] / "assets" / "stories260K"
NAMES = ("Lily", "Tom", "Sara", "Ben", "Mia", "Max")
ANIMALS = ("a little cat", "a big dog", "a red bird", "a small bear")
PLACES = ("in the park", "by the river", "at the farm", "in the garden", "near the old tree")


def write_stories(path: Path) -> None:
    """120 short stories as prompt and completion."""
    rows = []
    for name, animal, place in itertools.product(NAMES, ANIMALS, PLACES):
        prompt = f"Once upon a time, there was {animal} named {name}."
        completion = (
            f" {name} liked to play {place} all day. One day {name} saw a shiny stone {place} and "
            f'said, "What is it?" A friend came and they looked at it together. {name} was very happy and went home.'
        )  # fmt: skip
        rows.append(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    path.write_text("".join(rows))


@pytest.mark.slow
def test_tuning_a_story_model_on_stories_lowers_its_held_out_loss(tmp_path, logged):
    write_stories(tmp_path / "stories.jsonl")
    keys = [
        f"load_hf={STORIES}", "objective=sft", "dataset_type=jsonl", f"dataset_path={tmp_path / 'stories.jsonl'}",
        "eval_fraction=0.2", "max_target_length=128", "per_device_batch_size=4", "cpu_devices=1", "dtype=float32",
        "learning_rate=1e-3", "steps=30", "eval_interval=5", "eval_steps=-1", f"base_output_directory={tmp_path}",
        "run_name=tuned", "enable_tensorboard=false", "peak_tflops_per_device=1",
    ]  # fmt: skip
    result = run_train(resolve_config("base.yml", keys))
    losses = list(logged(result, "eval/avg_loss").values())
    # Of real English at the first look, and far better known after thirty steps.
    assert losses[0] < 3.5 and losses[-1] < 0.5 * losses[0]
    statistics = result.dataset.statistics
    assert statistics is not None and 0.6 < statistics.trained_share < 0.9
    counted, placed = logged(result, "learning/total_weights"), 4 * 128
    assert all(0 < weight < placed for weight in counted.values())
