"""What a run says of itself: to the terminal, the metrics files and the profiler; and when its loss ends it."""

import math
import time
from pathlib import Path

from maxlite.config.schema import Config
from maxlite.errors import NonFiniteLossError
from maxlite.metrics.flops import train_step_flops
from maxlite.metrics.log_line import eval_line, step_line
from maxlite.metrics.profiler import StepProfiler
from maxlite.metrics.progress import Progress
from maxlite.metrics.rates import StepTiming, device_memory_gib, step_tags
from maxlite.metrics.writers import MetricsWriter
from maxlite.train.setup import Setup, describe_mesh


class Reporter:
    """Turns raw numbers into lines, rows and events."""

    def __init__(self, config: Config, setup: Setup, run: Path, progress: Progress, writer: MetricsWriter):
        """Says nothing yet."""
        self._config, self._setup, self._progress, self._writer = config, setup, progress, writer
        self._clock = time.perf_counter()
        self.profiler = StepProfiler(run, config.metrics)

    def line(self, text: str) -> None:
        """Prints a line, above the progress bar if there is one."""
        self._progress.line(text)

    def restart_clock(self) -> None:
        """Keeps what was done since the last step, such as an evaluation, out of the next one's time."""
        self._clock = time.perf_counter()

    def step(self, step: int, scalars: dict[str, float], data_wait_seconds: float, compile_seconds: float) -> None:
        """Reports a training step that has just ended.

        Raises:
            NonFiniteLossError: its loss is NaN or infinite, and the config says to stop then.
        """
        now, before = time.perf_counter(), self._clock
        self._clock = now
        memory = device_memory_gib(self._setup.devices[0])
        timing = StepTiming(now - before, data_wait_seconds, compile_seconds, memory[0] if memory else None)
        tags = step_tags(scalars, timing, self._setup.work)
        self._writer.write(step, tags)
        rate = tags.get("perf/per_device_tokens_per_sec")
        tokens_per_second = None if rate is None else rate * self._setup.work.num_devices
        self._progress.update(step, tags["learning/loss"], tokens_per_second, tags.get("perf/mfu"))
        if step % self._config.metrics.log_period == 0 or step + 1 == self._config.train.steps:
            self.line(step_line(step, tags, memory[1] if memory else None))
        self._require_finite(step, tags["learning/loss"])

    def evaluation(self, step: int, tags: dict[str, float]) -> None:
        """Reports the evaluation that followed training step `step`."""
        self._writer.write(step, tags)
        self.line(eval_line(step, tags))

    def _require_finite(self, step: int, loss: float) -> None:
        train = self._config.train
        if (math.isnan(loss) and train.abort_on_nan_loss) or (math.isinf(loss) and train.abort_on_inf_loss):
            raise NonFiniteLossError(
                f"The loss of step {step} is {loss}. Nothing was saved after it; the checkpoints before it are intact. "
                "Lower learning_rate, lengthen warmup_steps_fraction, or look at the data of that step; "
                "abort_on_nan_loss=false and abort_on_inf_loss=false go on regardless."
            )


def start_lines(config: Config, setup: Setup) -> list[str]:
    """Returns the lines that say what is about to run."""
    compute, model, data = setup.model.compute, setup.model, config.data
    flops = train_step_flops(config.model, setup.rows, data.max_target_length)
    attention = flops.attention_flops / flops.total
    automatic = " (auto)" if config.compute.dtype == "auto" else ""
    return [
        f"{config.train.steps} steps of {setup.rows} rows of {data.max_target_length} tokens",
        f"Num_devices: {len(setup.devices)}, shape {tuple(setup.mesh.shape.values())}: {describe_mesh(setup.mesh)} "
        f"on {setup.devices[0].device_kind}",
        f"number parameters: {model.num_parameters / 1e9:.3f} billion ({model.num_parameters:,}), "
        f"dtype {compute.dtype}{automatic}, weights {compute.weight_dtype}, remat_policy {compute.remat_policy}",
        f"Per train step: Total TFLOPs {flops.total / 1e12:.3f} split as {1 - attention:.1%} learnable weight flops "
        f"and {attention:.1%} attention flops",
    ]
