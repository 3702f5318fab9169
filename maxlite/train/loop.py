"""The loop: batch, step, log, maybe evaluate, maybe save.

A step is reported when the next one has been handed to the devices, so that they never wait for the host to
format a line. Evaluating, saving and stopping report first.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import jax

from maxlite.config.schema import Config
from maxlite.data.pipeline import Dataset
from maxlite.errors import NonFiniteLossError
from maxlite.metrics.log_line import compile_line, eval_line, step_line
from maxlite.metrics.profiler import StepProfiler
from maxlite.metrics.progress import Progress
from maxlite.metrics.rates import StepTiming, StepWork, device_memory_gib, step_tags
from maxlite.metrics.recompile import RecompileWatch
from maxlite.metrics.writers import MetricsWriter
from maxlite.train.evaluate import evaluate
from maxlite.train.setup import Setup
from maxlite.train.state import TrainState
from maxlite.train.stop_signal import StopSignal

Save = Callable[[int, TrainState], None]


@dataclasses.dataclass(frozen=True)
class _Dispatched:
    """A step that the devices are at: its metrics are still being computed."""

    step: int
    metrics: dict[str, jax.Array]
    data_wait_seconds: float
    compile_seconds: float


class Loop:
    """One process's part of a run, from a state to the state after the last step."""

    def __init__(
        self,
        config: Config,
        setup: Setup,
        dataset: Dataset,
        *,
        progress: Progress,
        writer: MetricsWriter,
        work: StepWork,
        run: Path,
    ):
        """Runs nothing yet."""
        self.config, self.setup, self.dataset, self.work = config, setup, dataset, work
        self.progress, self.writer = progress, writer
        self.profiler = StepProfiler(run, config.metrics)
        self.dispatched: _Dispatched | None = None
        self.reported_at = time.perf_counter()
        self.evaluated_at: int | None = None

    def run(self, state: TrainState, start: int, save: Save | None) -> tuple[TrainState, int, str | None]:
        """Trains from step `start`. Returns the state, the steps done, and the signal that ended it early, if any.

        Raises:
            NonFiniteLossError: the loss is NaN or infinite, and the config says to stop then.
        """
        done = start
        with (
            StopSignal() as stop,
            self.profiler,
            RecompileWatch("train_step") as train_watch,
            RecompileWatch("eval_step") as eval_watch,
        ):
            while done < self.config.train.steps and stop.received is None:
                began = time.perf_counter()
                batch = next(self.dataset.train, None)
                if batch is None:
                    self.progress.line(f"The data ended after {self.config.data.num_epoch} passes, at step {done}.")
                    break
                waited = time.perf_counter() - began
                state = self._step(state, done, self.setup.place(batch), waited, train_watch)
                done += 1
                if self._is_due(self.config.train.eval_interval, done):
                    self._evaluate(state, done, eval_watch)
                if save is not None and self._is_due(self.config.checkpoint.checkpoint_period, done):
                    self._report()
                    save(done, state)
                    self.reported_at = time.perf_counter()
            self._report()
            if stop.received is None and self.config.train.eval_interval and self.evaluated_at != done:
                self._evaluate(state, done, eval_watch)
            wanted = stop.received is not None or self.config.checkpoint.save_checkpoint_on_completion
            if save is not None and wanted and done > start:
                save(done, state)
        return state, done, stop.received

    @staticmethod
    def _is_due(period: int, done: int) -> bool:
        return period > 0 and done % period == 0

    def _step(self, state: TrainState, step: int, batch: object, waited: float, watch: RecompileWatch) -> TrainState:
        arguments = {"state": state, "batch": batch}
        self.profiler.before_step(step)
        state, metrics = self.setup.train_step(state, batch)
        traced = self.profiler.after_step(metrics)
        compilation = watch.check(arguments)
        self._report()
        if traced is not None:
            self.progress.line(f"Wrote a trace of {self.config.metrics.profiler_steps} steps to {traced}")
        if compilation is not None:
            self.progress.line(compilation.warning or compile_line("train_step", compilation.seconds))
        self.dispatched = _Dispatched(step, metrics, waited, compilation.seconds if compilation else 0.0)
        return state

    def _report(self) -> None:
        """Waits for the step in flight, if any, and writes its numbers."""
        if self.dispatched is None:
            return
        sent, self.dispatched = self.dispatched, None
        scalars = {name: float(value) for name, value in sent.metrics.items()}
        now = time.perf_counter()
        memory = device_memory_gib(self.setup.devices[0])
        timing = StepTiming(
            seconds=now - self.reported_at,
            data_wait_seconds=sent.data_wait_seconds,
            compile_seconds=sent.compile_seconds,
            hbm_peak_gib=memory[0] if memory else None,
        )
        self.reported_at = now
        tags = step_tags(scalars, timing, self.work)
        self.writer.write(sent.step, tags)
        rate = tags.get("perf/per_device_tokens_per_sec")
        self.progress.update(
            sent.step, tags["learning/loss"], rate and rate * self.work.num_devices, tags.get("perf/mfu")
        )
        last = sent.step + 1 == self.config.train.steps
        if sent.step % self.config.metrics.log_period == 0 or last:
            self.progress.line(step_line(sent.step, tags, memory[1] if memory else None))
        self._require_finite(sent.step, tags["learning/loss"])

    def _require_finite(self, step: int, loss: float) -> None:
        train = self.config.train
        if (math.isnan(loss) and train.abort_on_nan_loss) or (math.isinf(loss) and train.abort_on_inf_loss):
            raise NonFiniteLossError(
                f"The loss of step {step} is {loss}. Nothing was saved after it; the checkpoints before it are intact. "
                "Lower learning_rate, lengthen warmup_steps_fraction, or look at the data of that step; "
                "abort_on_nan_loss=false and abort_on_inf_loss=false go on regardless."
            )

    def _evaluate(self, state: TrainState, done: int, watch: RecompileWatch) -> None:
        self._report()
        if self.dataset.eval_batches is None:
            return
        tags = evaluate(
            self.setup.eval_step,
            state.params,
            self.dataset.eval_batches(),
            self.config.train.eval_steps,
            self.setup.place,
        )
        compilation = watch.check({"params": state.params})
        if compilation is not None and compilation.warning is not None:
            self.progress.line(compilation.warning)
        self.writer.write(done - 1, tags)
        self.progress.line(eval_line(done - 1, tags))
        self.evaluated_at = done
        self.reported_at = time.perf_counter()
