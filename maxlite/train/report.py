"""What a run says of itself: to the terminal, the metrics files and the profiler; and when its loss ends it."""

import math
import time
from pathlib import Path
from typing import NamedTuple, Self

import jax

from maxlite.config.layers import layer_groups
from maxlite.config.schema import Config
from maxlite.errors import NonFiniteLossError
from maxlite.metrics.flops import train_step_flops
from maxlite.metrics.goodput import Goodput
from maxlite.metrics.log_line import eval_line, step_line
from maxlite.metrics.profiler import StepProfiler
from maxlite.metrics.progress import Progress
from maxlite.metrics.rates import StepTiming, device_memory_gib, step_tags
from maxlite.metrics.watchdog import Watchdog
from maxlite.metrics.writers import MetricsWriter
from maxlite.model.equip import describe_equipment
from maxlite.model.pipeline import build_pipeline_schedule
from maxlite.parallel.sharding import describe_axes, mesh_axes, num_parts
from maxlite.train.kernels import kernel_lines
from maxlite.train.setup import GIB, Setup, describe_mesh
from maxlite.train.state import device_bytes
from maxlite.train.trained import active_adapters


class Recorders(NamedTuple):
    """What is kept of a run as it goes. writer: None in a process that is not the primary."""

    writer: MetricsWriter | None
    goodput: Goodput
    watchdog: Watchdog


class Reporter:
    """Turns raw numbers into lines, rows and events.

    A step's row waits for the evaluation that may follow the step, so that metrics.jsonl has one object a step;
    `flush`, the next step and the end of the `with` block write it.
    """

    def __init__(self, config: Config, setup: Setup, run: Path, progress: Progress, recorders: Recorders):
        """Says nothing yet."""
        self._config, self._setup, self._progress = config, setup, progress
        self._writer, self.goodput, self.watchdog = recorders
        self._clock = time.perf_counter()
        self._row: tuple[int, dict[str, float]] | None = None
        self.last_tags: dict[str, float] = {}
        self.profiler = StepProfiler(run, config.metrics)

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Writes what waits, also when the run fails: the last row is the one that says why."""
        self.flush()
        self.profiler.close()

    def flush(self) -> None:
        """Writes the row that waits."""
        if self._row is not None:
            if self._writer is not None:
                self._writer.write(*self._row)
            self._row = None

    def line(self, text: str) -> None:
        """Prints a line, above the progress bar if there is one."""
        self._progress.line(text)

    def restart_clock(self) -> None:
        """Keeps what was done since the last step, such as an evaluation, out of the next one's time."""
        self._clock = time.perf_counter()

    def step(
        self, step: int, length: int, scalars: dict[str, float], data_wait_seconds: float, compile_seconds: float
    ) -> None:
        """Reports a training step that has just ended; length: of the rows of its batch.

        Raises:
            NonFiniteLossError: its loss, gradients or parameters are NaN or infinite, and the config says to stop then.
        """
        first_step = self.goodput.step(step)
        now, before = time.perf_counter(), self._clock
        self._clock = now
        memory = device_memory_gib(self._setup.mesh.local_devices[0])
        timing = StepTiming(now - before, data_wait_seconds, compile_seconds, memory[0] if memory else None)
        work = self._setup.works[length]
        tags = step_tags(scalars, timing, work)
        if self._config.metrics.enable_goodput_recording:
            tags |= self.goodput.tags()
        self.watchdog.beat(tags["perf/step_time_seconds"])
        self.flush()
        self._row, self.last_tags = (step, tags), tags
        rate = tags.get("perf/per_device_tokens_per_sec")
        tokens_per_second = None if rate is None else rate * work.num_devices
        self._progress.update(step, tags["learning/loss"], tokens_per_second, tags.get("perf/mfu"))
        if step % self._config.metrics.log_period == 0 or step + 1 == self._config.train.steps:
            self.line(step_line(step, tags, memory[1] if memory else None))
        if first_step is not None:
            self.line(first_step)
        self._require_finite(step, tags)

    def evaluation(self, step: int, tags: dict[str, float]) -> None:
        """Reports the evaluation that followed training step `step`."""
        if self._row is None:
            # The step's row is on disk: the data ended after a step that saved, and only the next read showed it.
            self._row = (step, {})
            self.last_tags = self._row[1]
        assert self._row[0] == step, "an evaluation follows the step that it is of"
        self._row[1].update(tags)
        self.line(eval_line(step, tags))

    def _require_finite(self, step: int, tags: dict[str, float]) -> None:
        train = self._config.train
        # A loss that is finite still may have gradients that are not, and then the parameters are lost already.
        for name in ("loss", "raw_grad_norm", "param_norm"):
            value = tags[f"learning/{name}"]
            if (math.isnan(value) and train.abort_on_nan_loss) or (math.isinf(value) and train.abort_on_inf_loss):
                raise NonFiniteLossError(
                    f"The {name} of step {step} is {value}. Nothing was saved after it; the checkpoints before it are "
                    "intact. Lower learning_rate, lengthen warmup_steps_fraction, or look at the data of that step; "
                    "abort_on_nan_loss=false and abort_on_inf_loss=false go on regardless."
                )


def start_lines(config: Config, setup: Setup) -> list[str]:
    """Returns the lines that say what is about to run."""
    compute, model, data = setup.model.compute, setup.model, config.data
    flops = train_step_flops(config.model, setup.rows, data.max_target_length, active_adapters(model))
    attention = flops.attention_flops / flops.total
    automatic = " (auto)" if config.compute.dtype == "auto" else ""
    return [
        f"{config.train.steps} steps of {setup.rows} rows of {data.max_target_length} tokens",
        f"Num_devices: {len(setup.devices)}, shape {tuple(setup.mesh.shape.values())}: {describe_mesh(setup.mesh)} "
        f"on {setup.devices[0].device_kind}",
        f"number parameters: {model.num_parameters / 1e9:.3f} billion ({model.num_parameters:,}), "
        f"dtype {compute.dtype}{automatic}, weights {compute.weight_dtype}, remat_policy {compute.remat_policy}",
        f"Total estimated memory size: {device_bytes(setup.abstract) / GIB:.3f} GiB a device (state)",
        f"Per train step: Total TFLOPs {flops.total / 1e12:.3f} split as {1 - attention:.1%} learnable weight flops "
        f"and {attention:.1%} attention flops",
        *_adapter_lines(setup),
        *describe_equipment(model.products),
        *kernel_lines(setup.kernels),
        *_pipeline_lines(config, setup),
        *_undivided_lines(config, setup),
    ]


def _adapter_lines(setup: Setup) -> list[str]:
    trained = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(setup.abstract_gradients))
    count = setup.model.num_parameters
    if not setup.model.compute.lora_rank:
        return []
    return [f"Trained: adapters, {trained:,} parameters ({trained / count:.2%}); the others stay as they are"]


def _pipeline_lines(config: Config, setup: Setup) -> list[str]:
    stages = num_parts(mesh_axes("layers", setup.rules), setup.mesh)
    if stages == 1:
        return []
    lines = []
    for group in layer_groups(config.model):
        keys = config.parallel
        schedule = build_pipeline_schedule(
            stages, group.repeats, keys.num_pipeline_microbatches, keys.num_layers_per_pipeline_stage
        )
        rounds = schedule.rounds(group.repeats)
        ways = "1 round" if rounds == 1 else f"{rounds} rounds"
        lines.append(
            f"Pipeline of {group.repeats} x {len(group.pattern)} layers: {stages} stages, {ways}, "
            f"{schedule.microbatches} micro-batches, bubble {schedule.bubble(group.repeats):.1%}"
        )
    return lines


def _undivided_lines(config: Config, setup: Setup) -> list[str]:
    """What is not cut although the mesh could, because the size does not divide."""
    lines = []
    if setup.rules != config.parallel.logical_axis_rules:
        lines.append(f"vocab_size={config.model.vocab_size} is not divided by its mesh axes: each device has all of it")
    axes, length = mesh_axes("norm_length", setup.rules), config.data.max_target_length
    if length % num_parts(axes, setup.mesh):
        given = describe_axes([axis for axis in axes if setup.mesh.shape[axis] > 1], setup.mesh)
        lines.append(f"max_target_length={length} is not divided by {given}: norms are not split over the sequence")
    return lines
