"""The eval command: the loss of given parameters over all that is held out."""

import dataclasses
from typing import TextIO

from maxlite.config.schema import Config
from maxlite.data.pipeline import Dataset
from maxlite.errors import DataError
from maxlite.hf.load import load_parameters
from maxlite.metrics.recompile import RecompileWatch
from maxlite.model.equip import describe_equipment
from maxlite.parallel.devices import prepare_jax
from maxlite.parallel.sharding import use_mesh
from maxlite.train.eval_setup import EvalSetup, build_eval_setup, open_data
from maxlite.train.evaluate import evaluate
from maxlite.train.memory_errors import memory_advice


def run_evaluation(config: Config, parameters: str, notes: TextIO) -> dict[str, float]:
    """Returns the eval/* tags of the parameters at a path over all held-out rows, each counted once.

    eval_steps cuts the data short only where it was given to this command: a run keeps it for a glance while it trains.

    parameters: a run directory, RUN/checkpoints/<n>, or a Hugging Face folder. notes: where what was read is told.

    Raises:
        DataError: nothing is held out, or what is has no target.
        ConfigError, CheckpointError, ConversionError, OutOfMemoryError: as in training.
    """
    config = with_held_out_alone(config)
    prepare_jax(config)
    with memory_advice(config):
        setup = build_eval_setup(config)
        with use_mesh(setup.mesh, setup.rules, config.compute.matmul_precision, setup.execution):
            dataset = open_data(config, setup)
            return _evaluate(config, setup, dataset, parameters, notes)


def _evaluate(config: Config, setup: EvalSetup, dataset: Dataset, parameters: str, notes: TextIO) -> dict[str, float]:
    if dataset.eval_batches is None:
        raise DataError(
            "Nothing is held out: give eval_dataset_path= (files that were not trained on), or the run's own "
            "eval_fraction above 0."
        )
    for line in (dataset.summary, *describe_equipment(setup.model.products)):
        print(line, file=notes)
    params = load_parameters(parameters, setup.model, setup.model.shardings(setup.mesh, setup.rules), notes)
    eval_steps = config.train.eval_steps if config.was_given("eval_steps") else -1
    with RecompileWatch("eval_step") as watch:
        tags = evaluate(setup, params, dataset.eval_batches(), eval_steps)
        compilation = watch.check({"params": params})
    if compilation is not None:
        tags["eval/step_time_seconds"] -= compilation.seconds
    if tags["eval/total_weights"] == 0:
        raise DataError(f"What is held out has no target to predict: {dataset.summary}.")
    return tags


def with_held_out_alone(config: Config) -> Config:
    """Returns the config without the documents trained on, where others are held out: they may be far away."""
    data = config.data
    if data.eval_dataset_path is None and data.eval_split is None:
        return config
    path, split = data.eval_dataset_path or data.dataset_path, data.eval_split or data.train_split
    return dataclasses.replace(config, data=dataclasses.replace(data, dataset_path=path, train_split=split))
