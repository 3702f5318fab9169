"""Everything that a run needs before its first step, each part checked before the next one costs time."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxlite.config.layers import layer_groups
from maxlite.config.schema import Config, LogicalAxisRules, ParallelConfig
from maxlite.data.batch import Batch
from maxlite.errors import ConfigError, OutOfMemoryError
from maxlite.metrics.flops import train_step_flops
from maxlite.metrics.peak import peak_tflops
from maxlite.metrics.rates import StepWork
from maxlite.model.build import Model, build_model
from maxlite.ops.attention_choice import KernelChoice
from maxlite.ops.context_parallel import balanced_order
from maxlite.parallel.devices import device_memory_bytes, run_devices
from maxlite.parallel.execution import Execution, build_execution
from maxlite.parallel.mesh import build_mesh
from maxlite.parallel.sharding import describe_axes, fitting_rules, mesh_axes, num_parts, partition_spec
from maxlite.parallel.xla_flags import check_options, compiler_options
from maxlite.train.kernels import choose_kernels
from maxlite.train.optimizer import build_optimizer, build_schedule
from maxlite.train.state import ShardingKeys, TrainState, abstract_state, device_bytes, state_shardings
from maxlite.train.step import LossSums, Placement, automatic_tiles, build_eval_step, build_loss, build_train_step

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Setup:
    """The compiled parts of a run and what they work on.

    rules: logical axis -> mesh axes, the vocabulary's only if they divide it.
    execution: goes into `use_mesh` with them. kernels: kind of attention -> its kernel, and why.
    rows: rows of a global batch. abstract, abstract_batch: shapes, dtypes and shardings of the step's arguments.
    work: what a step computes, for rates and MFU.
    train_step, eval_step: jitted. place: puts a batch of numpy arrays [rows, T] on the mesh.
    """

    devices: list[jax.Device]
    mesh: Mesh
    rules: LogicalAxisRules
    execution: Execution
    kernels: dict[str, KernelChoice]
    model: Model
    rows: int
    abstract: TrainState
    abstract_batch: Batch
    work: StepWork
    optimizer: Any
    train_step: Any
    eval_step: Callable[[Any, Batch], LossSums]
    place: Callable[[Batch], Batch]


def build_setup(config: Config, devices: Sequence[jax.Device] | None = None) -> Setup:
    """Builds the mesh, the model and the step functions; no large array is made.

    devices: those to compile for where they are not there (estimate, compile); None takes the run's own.

    Raises:
        ConfigError: the mesh, a size, the batch or a kernel does not fit the devices.
        OutOfMemoryError: the state alone is larger than a device's memory.
    """
    present = devices is None
    devices = run_devices(config.run) if devices is None else list(devices)
    mesh = build_mesh(config.parallel, devices)
    model = build_model(config.model, config.compute, devices[0].platform)
    rules = fitting_rules(config.parallel.logical_axis_rules, mesh, config.model.vocab_size)
    rows = global_rows(config, len(devices), mesh)
    kernels = choose_kernels(config, model.compute.dtype, mesh)
    options = compiler_options(config.compile, devices[0].platform)
    check_options(options, devices[0])
    schedule = build_schedule(config.optimizer, config.train.steps)
    optimizer = build_optimizer(config.optimizer, schedule, model.decays)
    _check_keys(config, mesh)
    keys = ShardingKeys(config.parallel.shard_optimizer_over_data, config.optimizer.optimizer_memory_host_offload)
    shardings = state_shardings(model, optimizer, mesh, rules, keys)
    abstract = abstract_state(model, optimizer, shardings.rest)
    if present:
        _require_memory(config, abstract, devices)
    loss = build_loss(model, _num_tiles(config, rows, mesh), config.train.z_loss_multiplier)
    placement = Placement(shardings.gradients, shardings.moments if keys.on_host else None)
    step = build_train_step(loss, optimizer, schedule, config.train, config.optimizer, placement)
    batch_sharding = NamedSharding(mesh, partition_spec(("batch", "length"), rules))
    shape = (rows, config.data.max_target_length)
    return Setup(
        devices=devices,
        mesh=mesh,
        rules=rules,
        execution=build_execution(config.parallel, {kind: choice.kernel for kind, choice in kernels.items()}),
        kernels=kernels,
        model=model,
        rows=rows,
        abstract=abstract,
        abstract_batch=_abstract_batch(shape, batch_sharding),
        work=_step_work(config, model, devices, rows, measure_peak=present),
        optimizer=optimizer,
        train_step=jax.jit(
            step, donate_argnums=0, out_shardings=(shardings.rest, None), compiler_options=options or None
        ),
        eval_step=jax.jit(build_eval_step(loss, config.train.gradient_accumulation_steps)),
        place=functools.partial(_place, row_order(config.parallel, mesh, shape[1]), batch_sharding),
    )


def _check_keys(config: Config, mesh: Mesh) -> None:
    """Keys whose sense depends on the degrees that the devices gave."""
    parallel = config.parallel
    if parallel.shard_optimizer_over_data and mesh.shape["data"] == 1:
        raise ConfigError(
            "shard_optimizer_over_data=true splits moments over the data axis, which has one device here; give "
            "ici_data_parallelism (or dcn_), or set it to false."
        )
    stages = num_parts(mesh_axes("layers", parallel.logical_axis_rules), mesh)
    each = parallel.num_layers_per_pipeline_stage
    for group in layer_groups(config.model) if stages > 1 else ():
        rounds, rest = divmod(group.repeats, stages * (each or group.repeats // stages or 1))
        if rest == 0 and rounds > 1 and pipeline_microbatches(parallel, mesh) < stages:
            raise ConfigError(
                f"num_pipeline_microbatches={parallel.num_pipeline_microbatches} is below the {stages} stages, but "
                f"{rounds} rounds of num_layers_per_pipeline_stage={each} layers need one for each; give at least "
                f"{stages}, or num_layers_per_pipeline_stage=null for one round."
            )
        if rest and group.repeats % stages == 0:
            raise ConfigError(
                f"num_layers_per_pipeline_stage={each} times {stages} stages does not divide the {group.repeats} "
                f"repeats of a layer pattern of {len(group.pattern)}; a stage has {group.repeats // stages} of them."
            )


def pipeline_microbatches(parallel: ParallelConfig, mesh: Mesh) -> int:
    """Returns into how many parts a batch is cut for the stages of a pipeline; 1 without one."""
    stages = num_parts(mesh_axes("layers", parallel.logical_axis_rules), mesh)
    return (parallel.num_pipeline_microbatches or stages) if stages > 1 else 1


def row_order(parallel: ParallelConfig, mesh: Mesh, length: int) -> np.ndarray | None:
    """Returns the order in which a row's tokens lie on the mesh; None is their own."""
    shards = num_parts(mesh_axes("length", parallel.logical_axis_rules), mesh)
    return balanced_order(length, shards) if shards > 1 and parallel.context_parallel_load_balance else None


def _place(order: np.ndarray | None, sharding: NamedSharding, batch: Batch) -> Batch:
    """Puts a batch of numpy arrays [rows, T] on the mesh."""
    return jax.device_put(batch if order is None else jax.tree.map(lambda part: part[:, order], batch), sharding)


def _num_tiles(config: Config, rows: int, mesh: Mesh) -> int:
    """Tiles of the loss: as the key says, or by what one device has of a micro-batch."""
    rules = config.parallel.logical_axis_rules
    here = rows // config.train.gradient_accumulation_steps // num_parts(mesh_axes("batch", rules), mesh)
    # The loss cuts rows as the layers between them do.
    length = max(config.data.max_target_length // num_parts(mesh_axes("norm_length", rules), mesh), 1)
    return config.compute.num_vocab_tiling or automatic_tiles((here, length), config.model.vocab_size)


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
    rules = config.parallel.logical_axis_rules
    axes, micro_batches = mesh_axes("batch", rules), config.train.gradient_accumulation_steps
    pipelined = pipeline_microbatches(config.parallel, mesh)
    parts = micro_batches * pipelined * num_parts(axes, mesh)
    if rows % parts:
        pipeline = f" x num_pipeline_microbatches={pipelined}" if pipelined > 1 else ""
        raise ConfigError(
            f"A batch of {rows} rows (per_device_batch_size={per_device:g} x {num_devices} devices) is not divided by "
            f"{describe_axes(axes, mesh)} x gradient_accumulation_steps={micro_batches}{pipeline} = {parts}; change "
            "one of these."
        )
    length, shards = config.data.max_target_length, num_parts(mesh_axes("length", rules), mesh)
    pieces = 2 * shards if config.parallel.context_parallel_load_balance else shards
    if shards > 1 and length % pieces:
        balanced = " (two parts a shard, by context_parallel_load_balance)" if pieces > shards else ""
        raise ConfigError(
            f"max_target_length={length} is not divided by {describe_axes(mesh_axes('length', rules), mesh)}: rows are "
            f"cut into {pieces} equal parts{balanced}; change one of these."
        )
    return rows


def _abstract_batch(shape: tuple[int, int], sharding: NamedSharding) -> Batch:
    def of(dtype: str) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return Batch(of("int32"), of("int32"), of("float32"), of("int32"), of("int32"))


def _step_work(config: Config, model: Model, devices: list[jax.Device], rows: int, *, measure_peak: bool) -> StepWork:
    length = config.data.max_target_length
    return StepWork(
        step_flops=train_step_flops(config.model, rows, length).total,
        padded_tokens=rows * length,
        num_devices=len(devices),
        # Measures a matmul on one CPU device, so the mesh must not be in context yet.
        peak_tflops=peak_tflops(config.metrics.peak_tflops_per_device, devices[0], model.compute.dtype)
        if measure_peak
        else None,
    )


def describe_mesh(mesh: Mesh) -> str:
    """One phrase for the log: the axes of more than one device."""
    return " ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "one device"


def _require_memory(config: Config, abstract: TrainState, devices: list[jax.Device]) -> None:
    available = device_memory_bytes(devices)
    # Gradients are as large as the parameters and exist beside the state at the end of the backward pass.
    needed = device_bytes(abstract) + device_bytes(abstract._replace(opt_state=()))
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
