"""The train command: set up, restore or begin, loop, save."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from maxlite.checkpoint.manager import Checkpointer
from maxlite.checkpoint.run_directory import RunDirectory, check_same_model
from maxlite.config.inert import inert_keys
from maxlite.config.load import dump_config, load_config
from maxlite.config.schema import Config
from maxlite.data.pipeline import Dataset, build_dataset
from maxlite.errors import CheckpointError, DataError, PreemptedError
from maxlite.hf.load import load_parameters
from maxlite.hf.run_files import keep_files, keep_tokenizer, run_of
from maxlite.metrics.progress import Progress
from maxlite.metrics.writers import MetricsWriter
from maxlite.parallel.devices import prepare_jax
from maxlite.parallel.sharding import use_mesh
from maxlite.parallel.xla_flags import compiler_options
from maxlite.train.compiled_step import read_step
from maxlite.train.loop import Loop
from maxlite.train.memory_errors import memory_advice
from maxlite.train.program import dump_programs
from maxlite.train.report import Reporter, start_lines
from maxlite.train.setup import Setup, build_setup
from maxlite.train.state import TrainState, fresh_state, init_state
from maxlite.train.stop_signal import StopSignal

DATA_FINGERPRINT = "fingerprint"
DATA_POSITION = "position"


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a finished run hands on.

    steps_done: steps done in all; params: the parameters after them.
    """

    run_directory: Path
    setup: Setup
    dataset: Dataset
    params: Any
    steps_done: int


def run_train(config: Config) -> TrainResult:
    """Trains as `config` says, resuming the run directory if it holds a checkpoint.

    Raises:
        MaxliteError: its children say what went wrong; PreemptedError after a stop signal, when the run has saved.
    """
    with StopSignal() as stop:
        prepare_jax(config.run)
        with memory_advice(config):
            setup = build_setup(config)
            with use_mesh(setup.mesh, setup.rules, config.compute.matmul_precision, setup.execution):
                return _run(config, setup, stop)


def _run(config: Config, setup: Setup, stop: StopSignal) -> TrainResult:
    dataset = build_dataset(config.data, vocab_size=config.model.vocab_size, batch_size=setup.rows)
    directory = RunDirectory(config.run.base_output_directory, config.run.directory.name)
    with directory.lock(), Progress(config.train.steps, 0) as progress:
        changed = _check_saved_config(config, directory) + inert_keys(config)
        run = f"Run: {directory.path}, model {config.run.model}"
        for line in (run, *start_lines(config, setup), dataset.summary, *changed):
            progress.line(line)
        checkpointer = Checkpointer(directory.path, config.checkpoint)
        state, start = _first_state(config, setup, dataset, checkpointer, progress)
        progress.start_at(start)
        if start >= config.train.steps:
            progress.line(
                f"Nothing to do: step {start} is reached already and steps={config.train.steps}. "
                f"To go on, give more: steps={2 * start}; to begin anew, another run_name."
            )
            return TrainResult(directory.path, setup, dataset, state.params, start)
        directory.write_config(dump_config(config))
        if start == 0:
            # A resumed run has them already, and what it began from may be gone.
            _keep_files(config, directory)
        with MetricsWriter(directory.path, config.metrics, start) as writer:
            writer.describe_run(start, dump_config(config), setup.model.num_parameters)
            compiled = _compiled_step(config, setup)
            dump_programs(config.metrics, setup, directory, compiled)
            if compiled is not None:
                progress.line(f"Compiled step from {config.compile.compiled_trainstep_file}")
                setup = dataclasses.replace(setup, train_step=compiled)
            loop = Loop(config, setup, dataset, Reporter(config, setup, directory.path, progress, writer))
            save = _saving(checkpointer, dataset) if config.checkpoint.enable_checkpointing else None
            try:
                state, done = loop.run(state, start, save, stop)
            finally:
                checkpointer.close()
        if stop.received is not None and done < config.train.steps:
            saved = f"saved step {done}" if save and done > start else "nothing new to save"
            raise PreemptedError(f"{stop.received}: {saved}; run the same command again to go on.")
        return TrainResult(directory.path, setup, dataset, state.params, done)


def _compiled_step(config: Config, setup: Setup) -> jax.stages.Compiled | None:
    """The step in compiled_trainstep_file; None leaves compiling to the first step."""
    path = config.compile.compiled_trainstep_file
    if path is None:
        return None
    options = compiler_options(config.compile, setup.devices[0].platform)
    return read_step(path, setup.train_step.lower(setup.abstract, setup.abstract_batch), setup.mesh, options)


def _keep_files(config: Config, directory: RunDirectory) -> None:
    """The tokenizer, and the JSON files of the model that the run began from, so that the run stands alone."""
    path = config.checkpoint.start
    if path is not None:
        keep_files(run_of(Path(path)), directory.path)
    if config.data.tokenizer_path is not None:
        keep_tokenizer(Path(config.data.tokenizer_path).expanduser(), directory.path)


def _saving(checkpointer: Checkpointer, dataset: Dataset) -> Any:
    def save(steps_done: int, state: TrainState) -> None:
        if checkpointer.current_step != steps_done:
            position = {DATA_POSITION: dataset.train.state(), DATA_FINGERPRINT: dataset.fingerprint}
            checkpointer.save(steps_done, state, position)

    return save


def _first_state(
    config: Config, setup: Setup, dataset: Dataset, checkpointer: Checkpointer, progress: Progress
) -> tuple[TrainState, int]:
    shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract)
    for skipped in checkpointer.skipped_steps:
        progress.line(f"Skipped an incomplete checkpoint: {skipped}")
    latest = checkpointer.latest_step()
    if latest is not None and not config.checkpoint.enable_checkpointing:
        raise CheckpointError(
            f"This run has a checkpoint of step {latest}, and enable_checkpointing=false would begin again beside it; "
            "choose another run_name, or leave checkpointing on to go on."
        )
    if latest is not None:
        state, data_state = checkpointer.restore(latest, setup.abstract)
        if data_state[DATA_FINGERPRINT] != dataset.fingerprint:
            raise DataError(
                "The data, or a key that orders it, has changed since this run saved, so its position in the data "
                "means nothing now. Set it back to go on exactly, or begin anew from the run's parameters: another "
                "run_name and load_parameters_path."
            )
        dataset.train.restore(data_state[DATA_POSITION])
        progress.line(f"Resumed at step {latest}")
        return state, latest
    path = config.checkpoint.start
    if path is not None:
        params = load_parameters(path, setup.model, shardings.params)
        progress.line(f"Parameters from {path}; optimizer and data begin anew")
        fresh = jax.jit(lambda params: fresh_state(params, setup.optimizer), out_shardings=shardings, donate_argnums=0)
        return fresh(params), 0
    key = jax.random.key(config.run.init_weights_seed)
    start = jax.jit(lambda key: init_state(setup.model, setup.optimizer, key), out_shardings=shardings)
    return start(key), 0


def _check_saved_config(config: Config, directory: RunDirectory) -> list[str]:
    if not directory.config_path.is_file():
        return []
    saved = load_config(str(directory.config_path), environment={})
    differing = check_same_model(saved.flat(), config.flat(), directory.path)
    if not differing:
        return []
    shown = ", ".join(f"{key} {was} -> {now}" for key, (was, now) in sorted(differing.items()))
    return [f"Changed since this run's last start: {shown}"]
