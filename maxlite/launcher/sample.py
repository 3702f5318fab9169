"""What the train command says last: a sample of the model's text, and the commands that go on from here."""

import dataclasses
import os
import shlex
from pathlib import Path

from maxlite.config.schema import Config
from maxlite.data.tokenizer import build_tokenizer
from maxlite.decode.prompts import read_prompts
from maxlite.decode.run import sample_text
from maxlite.train.run import TrainResult

SAMPLE_TEMPERATURE = 0.7


def check_sample(config: Config) -> None:
    """Reads the prompts that the sample begins with: a bad one is better known before the run than after it.

    Raises:
        ConfigError, DataError: as read_prompts.
    """
    tokenizer = build_tokenizer(config.data)
    if tokenizer is not None:
        read_prompts(config.decode, tokenizer, add_bos=config.data.add_bos, vocab_size=config.model.vocab_size)


def print_sample(config: Config, result: TrainResult) -> None:
    """Prints a continuation of `prompt` by the trained model, if its data is text, and what to do next."""
    text = sample_text(_sampled(config), result.setup.mesh, result.setup.model, result.params)
    if text is not None:
        print(f"Sample (temperature {SAMPLE_TEMPERATURE}):\n{text}")
    run = shlex.quote(_short(result.run_directory))
    if config.checkpoint.enable_checkpointing:
        # Prompts of the config's own are in the run's saved config already.
        own = config.decode.prompt_ids is not None or config.decode.prompt_file is not None
        prompt = f" prompt={shlex.quote(config.decode.prompt)}" if text is not None and not own else ""
        ids = " prompt_ids=1,2,3" if text is None and not own else ""
        print(f"Go on: maxlite decode {run}{prompt}{ids}")
        print(f"       maxlite train {run} steps={2 * result.steps_done}")
    if config.metrics.enable_tensorboard:
        print(f"Curves: tensorboard --logdir {run}/tensorboard")


def _sampled(config: Config) -> Config:
    """A model that has seen little text repeats itself when greedy, so the sample is drawn."""
    drawn = dataclasses.replace(
        config.decode, decode_sampling_strategy="weighted", decode_sampling_temperature=SAMPLE_TEMPERATURE
    )
    return dataclasses.replace(config, decode=drawn)


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return relative if len(relative) < len(str(path)) else str(path)
