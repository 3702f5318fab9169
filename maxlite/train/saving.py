"""What a run begins with, and what it saves: its state and its position in the data."""

from collections.abc import Mapping

import jax

from maxlite.checkpoint.manager import Checkpointer
from maxlite.config.schema import Config
from maxlite.data.pipeline import Dataset
from maxlite.errors import CheckpointError, ConfigError, DataError
from maxlite.hf.load import load_parameters
from maxlite.metrics.goodput import Goodput
from maxlite.metrics.progress import Progress
from maxlite.train.setup import Setup
from maxlite.train.state import TrainState, fresh_state, init_state

DATA_FINGERPRINT = "fingerprint"
DATA_POSITION = "position"


class Saving:
    """Saves the state after a step, once."""

    def __init__(self, config: Config, checkpointer: Checkpointer, dataset: Dataset) -> None:
        """Saves nothing yet."""
        self._config, self._checkpointer, self._dataset = config.checkpoint, checkpointer, dataset

    def save(self, steps_done: int, state: TrainState, tags: Mapping[str, float]) -> None:
        """Saves the state after `steps_done` steps, unless that is saved; tags: of the last of them.

        Raises:
            CheckpointError: as Checkpointer.save.
            ConfigError: checkpoint_best_metric is no tag of this run.
        """
        if self._checkpointer.current_step != steps_done:
            position = {DATA_POSITION: self._dataset.train.state(), DATA_FINGERPRINT: self._dataset.fingerprint}
            self._checkpointer.save(steps_done, state, position, self._compared(tags))

    def check(self) -> None:
        """Raises CheckpointError if the save in the background has failed."""
        error = self._checkpointer.failed()
        if error is not None:
            raise error

    def _compared(self, tags: Mapping[str, float]) -> dict[str, float]:
        """The tag by which checkpoints are the best; a step without an evaluation has none of eval/."""
        tag = self._config.checkpoint_best_metric
        kind = tag.partition("/")[0] + "/"
        there = sorted(name for name in tags if name.startswith(kind))
        if self._config.checkpoint_keep_best and there and tag not in tags:
            raise ConfigError(f"checkpoint_best_metric={tag} is no tag of this run; there are {', '.join(there)}.")
        return {tag: tags[tag]} if tag in tags else {}


def first_state(
    config: Config, setup: Setup, dataset: Dataset, checkpointer: Checkpointer, progress: Progress, goodput: Goodput
) -> tuple[TrainState, int]:
    """Returns the state to go on from and the steps done: the run's newest, or what it is to begin with.

    Raises:
        CheckpointError: the newest step cannot be read, or checkpointing is off beside it.
        DataError: the data has changed since.
        ConversionError: the parameters to begin with cannot be read.
    """
    for skipped in checkpointer.skipped_steps:
        progress.line(f"Skipped an incomplete checkpoint: {skipped}")
    latest = checkpointer.latest_step()
    if latest is not None and not config.checkpoint.enable_checkpointing:
        raise CheckpointError(
            f"This run has a checkpoint of step {latest}, and enable_checkpointing=false would begin again beside it; "
            "choose another run_name, or leave checkpointing on to go on."
        )
    if latest is not None:
        with goodput.measure("restore"):
            state = _resumed(latest, setup, dataset, checkpointer, progress)
        return state, latest
    shardings, path = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract), config.checkpoint.start
    if path is not None:
        with goodput.measure("restore"):
            # Of adapters that begin anew.
            seed = config.run.init_weights_seed
            params = load_parameters(path, setup.model, shardings.params, seed=seed)
        progress.line(f"Parameters from {path}; optimizer and data begin anew")
        fresh = jax.jit(
            lambda params: fresh_state(params, setup.model, setup.optimizer), out_shardings=shardings, donate_argnums=0
        )
        return fresh(params), 0
    key = jax.random.key(config.run.init_weights_seed)
    start = jax.jit(lambda key: init_state(setup.model, setup.optimizer, key), out_shardings=shardings)
    return start(key), 0


def _resumed(step: int, setup: Setup, dataset: Dataset, checkpointer: Checkpointer, progress: Progress) -> TrainState:
    state, data_state = checkpointer.restore(step, setup.abstract, lambda report: progress.line(report.line()))
    if data_state[DATA_FINGERPRINT] != dataset.fingerprint:
        raise DataError(
            "The data, or a key that orders it, has changed since this run saved, so its position in the data "
            "means nothing now. Set it back to go on exactly, or begin anew from the run's parameters: another "
            "run_name and load_parameters_path."
        )
    dataset.train.restore(data_state[DATA_POSITION])
    progress.line(f"Resumed at step {step}")
    return state
