"""Everything that a run needs before its first step, each part checked before the next one costs time."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from maxlite.config.schema import Config, LogicalAxisRules
from maxlite.data.batch import Batch
from maxlite.errors import ConfigError, OutOfMemoryError
from maxlite.metrics.flops import train_step_flops
from maxlite.metrics.peak import peak_tflops
from maxlite.metrics.rates import StepWork
from maxlite.model.build import Model, build_model
from maxlite.parallel.devices import device_memory_bytes, run_devices
from maxlite.parallel.mesh import build_mesh
from maxlite.parallel.sharding import describe_axes, fitting_rules, mesh_axes, num_parts, partition_spec
from maxlite.train.optimizer import build_optimizer, build_schedule
from maxlite.train.state import TrainState, abstract_state, state_bytes, state_shardings
from maxlite.train.step import LossSums, automatic_tiles, build_eval_step, build_loss, build_train_step

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Setup:
    """The compiled parts of a run and what they work on.

    rules: logical axis -> mesh axes, the vocabulary's only if they divide it.
    rows: rows of a global batch. abstract, abstract_batch: shapes, dtypes and shardings of the step's arguments.
    work: what a step computes, for rates and MFU.
    train_step, eval_step: jitted. place: puts a batch of numpy arrays [rows, T] on the mesh.
    """

    devices: list[jax.Device]
    mesh: Mesh
    rules: LogicalAxisRules
    model: Model
    rows: int
    abstract: TrainState
    abstract_batch: Batch
    work: StepWork
    optimizer: Any
    train_step: Any
    eval_step: Callable[[Any, Batch], LossSums]
    place: Callable[[Batch], Batch]


def build_setup(config: Config) -> Setup:
    """Builds the mesh, the model and the step functions; no large array is made.

    Raises:
        ConfigError: the mesh, a size or the batch does not fit the devices.
        OutOfMemoryError: the state alone is larger than a device's memory.
    """
    devices = run_devices(config.run)
    mesh = build_mesh(config.parallel, devices)
    model = build_model(config.model, config.compute)
    rules = fitting_rules(config.parallel.logical_axis_rules, mesh, config.model.vocab_size)
    rows = global_rows(config, len(devices), mesh)
    schedule = build_schedule(config.optimizer, config.train.steps)
    optimizer = build_optimizer(config.optimizer, schedule, model.decays)
    shardings = state_shardings(model, optimizer, mesh, rules)
    abstract = abstract_state(model, optimizer, shardings)
    _require_memory(config, abstract, devices)
    micro_batch_rows = rows // config.train.gradient_accumulation_steps
    batch_parts = num_parts(mesh_axes("batch", rules), mesh)
    tiles = config.compute.num_vocab_tiling or automatic_tiles(
        (micro_batch_rows // batch_parts, config.data.max_target_length), config.model.vocab_size
    )
    loss = build_loss(model, tiles, config.train.z_loss_multiplier)
    step = build_train_step(loss, optimizer, schedule, config.train, config.optimizer)
    batch_sharding = NamedSharding(mesh, partition_spec(("batch", None), rules))
    return Setup(
        devices=devices,
        mesh=mesh,
        rules=rules,
        model=model,
        rows=rows,
        abstract=abstract,
        abstract_batch=_abstract_batch((rows, config.data.max_target_length), batch_sharding),
        work=_step_work(config, model, devices, rows),
        optimizer=optimizer,
        train_step=jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)),
        eval_step=jax.jit(build_eval_step(loss)),
        place=functools.partial(jax.device_put, device=batch_sharding),
    )


def global_rows(config: Config, num_devices: int, mesh: Mesh) -> int:
    """Returns the rows of a global batch: per_device_batch_size times all devices, as in MaxText.

    Raises:
        ConfigError: it is no whole number, or the mesh or the micro-batches do not divide it.
    """
    per_device = config.data.per_device_batch_size
    exact = per_device * num_devices
    rows = round(exact)
    if abs(exact - rows) > 1e-6 or rows < 1:
        raise ConfigError(
            f"per_device_batch_size={per_device:g} times {num_devices} devices is {exact:g} rows; "
            "a batch is a whole number of rows."
        )
    axes = mesh_axes("batch", config.parallel.logical_axis_rules)
    micro_batches = config.train.gradient_accumulation_steps
    parts = micro_batches * num_parts(axes, mesh)
    if rows % parts:
        raise ConfigError(
            f"A batch of {rows} rows (per_device_batch_size={per_device:g} x {num_devices} devices) is not divided by "
            f"{describe_axes(axes, mesh)} x gradient_accumulation_steps={micro_batches} = {parts}; change one of these."
        )
    return rows


def _abstract_batch(shape: tuple[int, int], sharding: NamedSharding) -> Batch:
    def of(dtype: str) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return Batch(of("int32"), of("int32"), of("float32"), of("int32"), of("int32"))


def _step_work(config: Config, model: Model, devices: list[jax.Device], rows: int) -> StepWork:
    length = config.data.max_target_length
    return StepWork(
        step_flops=train_step_flops(config.model, rows, length).total,
        padded_tokens=rows * length,
        num_devices=len(devices),
        # Measures a matmul on one CPU device, so the mesh must not be in context yet.
        peak_tflops=peak_tflops(config.metrics.peak_tflops_per_device, devices[0], model.compute.dtype),
    )


def describe_mesh(mesh: Mesh) -> str:
    """One phrase for the log: the axes and their sizes."""
    return " ".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def _require_memory(config: Config, abstract: TrainState, devices: list[jax.Device]) -> None:
    available = device_memory_bytes(devices)
    # Gradients are as large as the parameters and exist beside the state at the end of the backward pass.
    needed = state_bytes(abstract) + state_bytes(abstract._replace(opt_state=()))
    if available is None or needed <= available:
        return
    given = {**config.parallel.degrees("dcn"), **config.parallel.degrees("ici")}
    degrees = ", ".join(f"{name}={degree}" for name, degree in given.items())
    raise OutOfMemoryError(
        f"Parameters, gradients and optimizer state take {needed / GIB:.1f} GiB on each of {len(devices)} "
        f"{devices[0].platform} devices ({degrees}), and one has {available / GIB:.1f} GiB. "
        "Use more devices with a higher ici_fsdp_parallelism or a smaller model, or rehearse without the hardware: "
        "smoke=true shrinks the model to seconds on a CPU, and cpu_devices=N makes N fake devices."
    )
