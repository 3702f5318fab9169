"""The loop: batch, step, report, maybe evaluate, maybe save.

A step is reported when the next one has been handed to the devices, so that they never wait for the host to
format a line. Evaluating, saving and stopping report first.
"""

import dataclasses
import time
from collections.abc import Iterator

import jax
import numpy as np

from maxlite.config.schema import Config
from maxlite.data.batch import Batch
from maxlite.data.pipeline import Dataset
from maxlite.metrics.log_line import compile_line
from maxlite.metrics.rates import TRAIN_SOURCE, source_tags
from maxlite.metrics.recompile import RecompileWatch
from maxlite.train.decisions import Decisions, is_due
from maxlite.train.evaluate import evaluate
from maxlite.train.report import Reporter
from maxlite.train.saving import Saving
from maxlite.train.setup import Setup
from maxlite.train.state import TrainState
from maxlite.train.step import SOURCE_LOSSES, SOURCE_TARGETS


@dataclasses.dataclass(frozen=True)
class _Dispatched:
    """A step that the devices are at: its metrics are still being computed.

    length: of the rows of its batch. tokens: in it, without padding.
    """

    step: int
    length: int
    tokens: int
    metrics: dict[str, jax.Array]
    data_wait_seconds: float
    compile_seconds: float


class Loop:
    """One process's part of a run, from a state to the state after the last step."""

    def __init__(self, config: Config, setup: Setup, dataset: Dataset, reporter: Reporter):
        """Runs nothing yet."""
        self.config, self.setup, self.dataset, self.reporter = config, setup, dataset, reporter
        self.goodput = reporter.goodput
        self.train_watch, self.eval_watch = RecompileWatch("train_step"), RecompileWatch("eval_step")
        self.dispatched: _Dispatched | None = None
        self.evaluated_at: int | None = None

    def run(self, state: TrainState, start: int, saving: Saving | None, decisions: Decisions) -> tuple[TrainState, int]:
        """Trains from step `start` until the last one, the end of the data, or the step at which it was asked to stop.

        Returns: the state and the steps done.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite, and the config says to stop then.
        """
        done = start
        with self.reporter, self.train_watch, self.eval_watch:
            self.reporter.restart_clock()
            self.goodput.begin(start)
            while done < self.config.train.steps and not decisions.stop_due(done):
                began = time.perf_counter()
                with self.goodput.measure("data_wait"):
                    batch = next(self.dataset.train, None)
                if batch is None:
                    passes = self.config.data.num_epoch
                    after = "all sources" if passes is None else f"{passes} passes"
                    self.reporter.line(f"The data ended after {after}, at step {done}.")
                    break
                waited = time.perf_counter() - began
                state = self._step(state, done, batch, waited)
                done += 1
                # Before the save: the row of a step is written with the checkpoint after it, evaluation and all.
                last = done == self.config.train.steps and self.config.train.eval_interval > 0
                if last or is_due(self.config.train.eval_interval, done):
                    self._evaluate(state, done)
                if saving is not None:
                    saving.check()
                    if decisions.save_due(done):
                        self._save(saving, state, done)
            self._report()
            if done > start:
                stopped = decisions.stop_due(done)
                if not stopped and self.config.train.eval_interval and self.evaluated_at != done:
                    self._evaluate(state, done)
                if saving is not None and (stopped or self.config.checkpoint.save_checkpoint_on_completion):
                    self._save(saving, state, done)
        return state, done

    def _save(self, saving: Saving, state: TrainState, done: int) -> None:
        # First the rows of the steps that the checkpoint holds: a run resumed from it will not write them again.
        self._report()
        self.reporter.flush()
        with self.goodput.measure("save"), self.reporter.watchdog.patience():
            saving.save(done, state, self.reporter.last_tags)
        self.reporter.restart_clock()

    def _step(self, state: TrainState, step: int, batch: Batch, waited: float) -> TrainState:
        length, tokens = batch.inputs.shape[1], self.dataset.train.num_tokens()
        batch = self.setup.place(batch)
        arguments = {"state": state, "batch": batch}
        self.reporter.profiler.before_step(step)
        state, metrics = self.setup.train_step(state, batch)
        self.goodput.dispatched(metrics["loss"].block_until_ready)
        traced = self.reporter.profiler.after_step(metrics)
        compilation = self.train_watch.check(arguments, length)
        if compilation is not None and self.dispatched is not None:
            # The step before was still in flight while this one compiled, and its time holds that.
            self.dispatched = dataclasses.replace(self.dispatched, compile_seconds=compilation.seconds)
        if compilation is not None:
            self.goodput.add("compile", compilation.seconds)
        in_flight = self.dispatched is not None
        self._report()
        if traced is not None:
            self.reporter.line(f"Wrote a trace of {self.config.metrics.profiler_steps} steps to {traced}")
        if compilation is not None:
            self.reporter.line(compilation.warning or compile_line(self._program(length), compilation.seconds))
        compile_seconds = 0.0 if compilation is None or in_flight else compilation.seconds
        self.dispatched = _Dispatched(step, length, tokens, metrics, waited, compile_seconds)
        return state

    def _report(self) -> None:
        """Waits for the step in flight, if any, and hands its numbers on."""
        if self.dispatched is not None:
            sent, self.dispatched = self.dispatched, None
            metrics, sources = dict(sent.metrics), self.setup.batches.source_names
            by_source = {}
            if sources:
                losses, targets = (np.asarray(metrics.pop(name)) for name in (SOURCE_LOSSES, SOURCE_TARGETS))
                by_source = source_tags(TRAIN_SOURCE, sources, losses, targets)
            scalars = {name: float(value) for name, value in metrics.items()} | by_source
            scalars["total_tokens"] = sent.tokens
            self.reporter.step(sent.step, sent.length, scalars, sent.data_wait_seconds, sent.compile_seconds)

    def _program(self, length: int) -> str:
        return f"train_step of rows of {length}" if len(self.setup.batches.lengths) > 1 else "train_step"

    def _evaluate(self, state: TrainState, done: int) -> None:
        self._report()
        if self.dataset.eval_batches is not None:
            batches, steps = self._watched(self.dataset.eval_batches()), self.config.train.eval_steps
            with self.goodput.measure("evaluation"), self.reporter.watchdog.patience():
                tags = evaluate(self.setup, state.params, batches, steps)
                compilation = self.eval_watch.check({"params": state.params})
                if compilation is not None:
                    self.goodput.add("compile", compilation.seconds)
                    tags["eval/step_time_seconds"] -= compilation.seconds
                    self.reporter.line(compilation.warning or compile_line("eval_step", compilation.seconds))
            self.reporter.evaluation(done - 1, tags)
        self.evaluated_at = done
        self.reporter.restart_clock()

    def _watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.reporter.watchdog.alive()
            yield batch
