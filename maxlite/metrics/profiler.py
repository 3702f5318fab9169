"""Traces a few steps of a run, for TensorBoard's profile page and for Perfetto."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.profiler

from maxlite.config.schema import MetricsConfig


class StepProfiler:
    """Traces `profiler_steps` steps after `skip_first_n_steps_for_profiler`, if `profiler` is set.

    Steps are counted from the first one of this process, so a resumed run is traced too. The trace is written below
    `run/tensorboard/plugins/profile`.
    """

    def __init__(self, run_directory: Path, metrics: MetricsConfig) -> None:
        """Starts nothing yet."""
        self._directory = run_directory / "tensorboard"
        self._first = metrics.skip_first_n_steps_for_profiler if metrics.profiler == "xplane" else None
        self._num_steps = metrics.profiler_steps
        self._steps_begun = 0
        self._steps_traced = 0
        self._annotation: jax.profiler.StepTraceAnnotation | None = None
        self._is_tracing = False

    def before_step(self, step: int) -> None:
        """Starts the trace when its first step begins, and marks the step in it."""
        if self._steps_begun == self._first:
            jax.profiler.start_trace(str(self._directory))
            self._is_tracing = True
        self._steps_begun += 1
        if self._is_tracing:
            self._annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
            self._annotation.__enter__()

    def after_step(self, outputs: Any) -> Path | None:
        """Ends the trace after its last step, once the devices have computed `outputs`, any pytree of it.

        Returns: where the trace was written, when this call ended it.
        """
        if not self._is_tracing:
            return None
        self._leave_step()
        self._steps_traced += 1
        if self._steps_traced < self._num_steps:
            return None
        jax.block_until_ready(outputs)
        self._stop()
        return self._directory / "plugins" / "profile"

    def close(self) -> None:
        """Ends a trace that the run's end cut short; what was traced is kept."""
        if self._is_tracing:
            self._leave_step()
            self._stop()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _leave_step(self) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None

    def _stop(self) -> None:
        self._is_tracing = False
        jax.profiler.stop_trace()
