"""The train command: set up, restore or begin, loop, save."""

import dataclasses
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax

from maxlite.checkpoint.manager import Checkpointer
from maxlite.checkpoint.run_directory import RunDirectory, check_same_model
from maxlite.config.check_quant import require_trainable
from maxlite.config.inert import inert_keys
from maxlite.config.load import dump_config, load_config, saved_values
from maxlite.config.schema import Config
from maxlite.data.pipeline import Dataset
from maxlite.errors import HangError, PreemptedError
from maxlite.hf.run_files import keep_files, keep_tokenizer, run_of
from maxlite.metrics.goodput import Goodput
from maxlite.metrics.progress import Progress
from maxlite.metrics.watchdog import Watchdog, end_process
from maxlite.metrics.writers import MetricsWriter
from maxlite.parallel.devices import prepare_jax
from maxlite.parallel.sharding import use_mesh
from maxlite.parallel.xla_flags import compiler_options
from maxlite.processes.bell import leave
from maxlite.processes.group import is_primary, num_processes, on_primary, process_index, together
from maxlite.train.compiled_step import read_step
from maxlite.train.decisions import Decisions
from maxlite.train.eval_setup import open_data
from maxlite.train.loop import Loop
from maxlite.train.memory_errors import memory_advice
from maxlite.train.program import dump_programs
from maxlite.train.report import Recorders, Reporter, start_lines
from maxlite.train.saving import Saving, first_state
from maxlite.train.setup import Setup, build_setup
from maxlite.train.stop_signal import StopSignal

_SECONDS_FOR_STACKS = 3.0


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
    require_trainable(config)
    prepare_jax(config)
    # However they were found.
    config = dataclasses.replace(
        config, distributed=dataclasses.replace(config.distributed, num_processes=num_processes())
    )
    stacks = config.run.directory / "metrics" / f"stacks_process_{process_index()}.txt"
    # The handlers of signals come after jax's own.
    with StopSignal() as stop, Watchdog(config.metrics, stacks, _end_hung) as watchdog:
        with memory_advice(config):
            setup = build_setup(config)
            with use_mesh(setup.mesh, setup.rules, config.compute.matmul_precision, setup.execution):
                return _run(config, setup, stop, watchdog)


def _run(config: Config, setup: Setup, stop: StopSignal, watchdog: Watchdog) -> TrainResult:
    dataset = together("reading the data", lambda: open_data(config, setup))
    directory = RunDirectory(config.run.base_output_directory, config.run.directory.name)
    with directory.lock(), Progress(config.train.steps, 0) as progress, _goodput(config, directory) as goodput:
        changed = _check_saved_config(config, directory) + inert_keys(config)
        run = f"Run: {directory.path}, model {config.run.model}"
        for line in (run, *start_lines(config, setup), dataset.summary, *changed):
            progress.line(line)
        checkpointer = Checkpointer(directory.path, config.checkpoint)
        state, start = first_state(config, setup, dataset, checkpointer, progress, goodput)
        watchdog.alive()
        progress.start_at(start)
        if start >= config.train.steps:
            progress.line(
                f"Nothing to do: step {start} is reached already and steps={config.train.steps}. "
                f"To go on, give more: steps={2 * start}; to begin anew, another run_name."
            )
            goodput.end(finished=True)
            return TrainResult(directory.path, setup, dataset, state.params, start)
        directory.write_config(dump_config(config))
        if start == 0:
            # A resumed run has them already, and what it began from may be gone.
            on_primary("keeping files", lambda: _keep_files(config, directory))
        with _writer(config, directory, start) as writer:
            if writer is not None:
                writer.describe_run(start, dump_config(config), setup.model.num_parameters)
            with goodput.measure("compile"):
                setup = _compiled(config, setup, directory, progress)
            recorders = Recorders(writer, goodput, watchdog)
            loop = Loop(config, setup, dataset, Reporter(config, setup, directory.path, progress, recorders))
            saving = Saving(config, checkpointer, dataset) if config.checkpoint.enable_checkpointing else None
            decisions = Decisions(config.checkpoint, stop)
            try:
                state, done = loop.run(state, start, saving, decisions)
            finally:
                with goodput.measure("save"), watchdog.patience():
                    checkpointer.close()
        stopped = decisions.stop_due(done) and done < config.train.steps
        summary = goodput.end(finished=not stopped)
        if config.metrics.enable_goodput_recording:
            progress.line(summary)
        if stopped:
            saved = f"saved step {done}" if saving and done > start else "nothing new to save"
            raise PreemptedError(
                f"{stop.received or 'another process was stopped'}: {saved}; run the same command again to go on."
            )
        return TrainResult(directory.path, setup, dataset, state.params, done)


def _end_hung(error: HangError) -> None:
    if num_processes() == 1:
        end_process(error)
    # The others hang too, and shall write down what at before they are ended.
    time.sleep(_SECONDS_FOR_STACKS)
    leave(error.exit_code, str(error))


def _goodput(config: Config, directory: RunDirectory) -> Goodput:
    recorded = is_primary() and config.metrics.enable_goodput_recording
    return Goodput(directory.metrics / "events.jsonl" if recorded else None)


def _writer(config: Config, directory: RunDirectory, start: int) -> AbstractContextManager[MetricsWriter | None]:
    return MetricsWriter(directory.path, config.metrics, start) if is_primary() else nullcontext()


def _compiled(config: Config, setup: Setup, directory: RunDirectory, progress: Progress) -> Setup:
    """The setup, with the step of compiled_trainstep_file where there is one; writes its programs where asked for."""
    compiled = _compiled_step(config, setup)
    dump_programs(config.metrics, setup, directory, compiled)
    if compiled is None:
        return setup
    progress.line(f"Compiled step from {config.compile.compiled_trainstep_file}")
    return dataclasses.replace(setup, train_step=compiled)


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


def _check_saved_config(config: Config, directory: RunDirectory) -> list[str]:
    if not directory.config_path.is_file():
        return []
    saved = load_config(str(directory.config_path), environment={}).flat()
    differing = check_same_model(saved, saved_values(config), directory.path)
    if not differing:
        return []
    shown = ", ".join(f"{key} {was} -> {now}" for key, (was, now) in sorted(differing.items()))
    return [f"Changed since this run's last start: {shown}"]
