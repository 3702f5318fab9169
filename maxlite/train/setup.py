"""Everything that a run needs before its first step, each part checked before the next one costs time."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlite.config.schema import Config
from maxlite.data.batch import Batch
from maxlite.errors import ConfigError, OutOfMemoryError
from maxlite.metrics.flops import train_step_flops
from maxlite.metrics.peak import peak_tflops
from maxlite.metrics.rates import StepWork
from maxlite.parallel.devices import device_memory_bytes
from maxlite.parallel.xla_flags import check_options, compiler_options
from maxlite.train.eval_setup import EvalSetup, build_eval_setup
from maxlite.train.optimizer import build_optimizer, build_schedule
from maxlite.train.state import ShardingKeys, TrainState, abstract_state, device_bytes, state_shardings
from maxlite.train.step import Placement, build_train_step
from maxlite.train.trained import active_adapters, trained_part

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Setup(EvalSetup):
    """The compiled parts of a run and what they work on.

    abstract, abstract_batch: shapes, dtypes and shardings of the step's arguments.
    works: length of a row -> what a step of such rows computes, for rates and MFU.
    train_step: jitted.
    """

    abstract: TrainState
    abstract_batch: Batch
    works: dict[int, StepWork]
    optimizer: Any
    train_step: Any

    @property
    def work(self) -> StepWork:
        """What a step of the longest rows computes."""
        return self.works[self.batches.lengths[-1]]

    @property
    def abstract_gradients(self) -> Any:
        """Shapes, dtypes and shardings of the gradients: those of what trains."""
        return trained_part(self.abstract.params, self.model.trainable)


def build_setup(config: Config, devices: Sequence[jax.Device] | None = None) -> Setup:
    """Builds the mesh, the model and the step functions; no large array is made.

    devices: those to compile for where they are not there (estimate, compile); None takes the run's own.

    Raises:
        ConfigError: the mesh, a size, the batch or a kernel does not fit the devices.
        OutOfMemoryError: the state alone is larger than a device's memory.
    """
    present = devices is None
    base = build_eval_setup(config, devices)
    model, platform = base.model, base.devices[0].platform
    options = compiler_options(config.compile, platform)
    check_options(options, base.devices[0])
    schedule = build_schedule(config.optimizer, config.train.steps)
    optimizer = build_optimizer(config.optimizer, schedule, trained_part(model.decays, model.trainable))
    _check_keys(config, base.mesh)
    keys = ShardingKeys(config.parallel.shard_optimizer_over_data, config.optimizer.optimizer_memory_host_offload)
    shardings = state_shardings(model, optimizer, base.mesh, base.rules, keys)
    abstract = abstract_state(model, optimizer, shardings.rest)
    if present:
        _require_memory(config, abstract, trained_part(abstract.params, model.trainable), base.devices)
    moments = shardings.moments if keys.on_host else None
    placement = Placement(shardings.gradients, moments, model.trainable)
    step = build_train_step(base.loss, optimizer, schedule, config.train, config.optimizer, placement)
    return Setup(
        **vars(base),
        abstract=abstract,
        abstract_batch=base.batches.abstract(),
        works=_step_works(config, base, measure_peak=present),
        optimizer=optimizer,
        train_step=jax.jit(
            step,
            donate_argnums=0,
            out_shardings=(shardings.rest, NamedSharding(base.mesh, PartitionSpec())),
            compiler_options=options or None,
        ),
    )


def _check_keys(config: Config, mesh: Mesh) -> None:
    """Keys whose sense depends on the degrees that the devices gave, and on the lengths of rows."""
    if config.parallel.shard_optimizer_over_data and mesh.shape["data"] == 1:
        raise ConfigError(
            "shard_optimizer_over_data=true splits moments over the data axis, which has one device here; give "
            "ici_data_parallelism (or dcn_), or set it to false."
        )
    buckets, file = config.data.padding_buckets, config.compile.compiled_trainstep_file
    if buckets is not None and file is not None:
        raise ConfigError(
            f"compiled_trainstep_file={file} holds the step for rows of one length, and padding_buckets="
            f"{','.join(map(str, buckets))} gives several; set one of them to null."
        )


def _step_works(config: Config, base: EvalSetup, *, measure_peak: bool) -> dict[int, StepWork]:
    # Measures a matmul on one CPU device, so the mesh must not be in context yet.
    given, dtype = config.metrics.peak_tflops_per_device, base.model.compute.dtype
    peak = peak_tflops(given, base.mesh.local_devices[0], dtype) if measure_peak else None
    return {
        length: StepWork(
            step_flops=train_step_flops(config.model, base.rows, length, active_adapters(base.model)).total,
            padded_tokens=base.rows * length,
            num_devices=len(base.devices),
            peak_tflops=peak,
        )
        for length in base.batches.lengths
    }


def describe_mesh(mesh: Mesh) -> str:
    """One phrase for the log: the axes of more than one device."""
    return " ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "one device"


def _require_memory(config: Config, abstract: TrainState, gradients: Any, devices: list[jax.Device]) -> None:
    available = device_memory_bytes(devices)
    # Gradients exist beside the state at the end of the backward pass.
    needed = device_bytes(abstract) + device_bytes(gradients)
    if available is None or needed <= available:
        return
    given = {**config.parallel.degrees("dcn"), **config.parallel.degrees("ici")}
    degrees = ", ".join(f"{name}={degree}" for name, degree in given.items() if degree != 1)
    raise OutOfMemoryError(
        f"Parameters, gradients and optimizer state take {needed / GIB:.1f} GiB on each of {len(devices)} "
        f"{devices[0].platform} devices ({degrees}), and one has {available / GIB:.1f} GiB. "
        "Use more devices with a higher ici_fsdp_parallelism or a smaller model, or rehearse without the hardware: "
        "smoke=true shrinks the model to seconds on a CPU, and cpu_devices=N makes N fake devices."
    )
