"""What computing a loss needs: mesh, model, kernels, batches and the compiled evaluation step."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlite.config.layers import layer_groups
from maxlite.config.schema import Config, LogicalAxisRules
from maxlite.data.batch import Batch
from maxlite.data.pipeline import Dataset, build_dataset
from maxlite.errors import ConfigError
from maxlite.model.build import Model, build_model
from maxlite.ops.attention_choice import KernelChoice
from maxlite.parallel.devices import run_devices
from maxlite.parallel.execution import Execution, build_execution
from maxlite.parallel.mesh import build_mesh
from maxlite.parallel.sharding import fitting_rules, mesh_axes, num_parts
from maxlite.train.batches import BatchLayout, build_layout, pipeline_microbatches
from maxlite.train.kernels import choose_kernels
from maxlite.train.step import LossFunction, LossSums, automatic_tiles, build_eval_step, build_loss


@dataclasses.dataclass(frozen=True)
class EvalSetup:
    """The compiled parts of an evaluation and what they work on.

    rules: logical axis -> mesh axes, the vocabulary's only if they divide it.
    execution: goes into `use_mesh` with them. kernels: kind of attention -> its kernel, and why.
    loss: traced by the steps. eval_step: jitted.
    """

    devices: list[jax.Device]
    mesh: Mesh
    rules: LogicalAxisRules
    execution: Execution
    kernels: dict[str, KernelChoice]
    model: Model
    batches: BatchLayout
    loss: LossFunction
    eval_step: Callable[[Any, Batch], LossSums]

    @property
    def rows(self) -> int:
        """Rows of a global batch."""
        return self.batches.rows

    def place(self, batch: Batch) -> Batch:
        """Puts a batch of numpy arrays [own rows, T] on the mesh."""
        return self.batches.place(batch)


def build_eval_setup(config: Config, devices: Sequence[jax.Device] | None = None) -> EvalSetup:
    """Builds the mesh, the model and the evaluation step; no large array is made.

    devices: those to compile for where they are not there; None takes the run's own.

    Raises:
        ConfigError: the mesh, a size, the batch or a kernel does not fit the devices.
    """
    devices = run_devices(config.run) if devices is None else list(devices)
    mesh = build_mesh(config.parallel, devices)
    model = build_model(config.model, config.compute, devices[0].platform)
    rules = fitting_rules(config.parallel.logical_axis_rules, mesh, config.model.vocab_size)
    batches = build_layout(config, len(devices), mesh, rules)
    kernels = choose_kernels(config, model.compute.dtype, mesh)
    _check_stages(config, mesh)
    tiles = _num_tiles(config, batches.rows, mesh)
    loss = build_loss(model, tiles, config.train.z_loss_multiplier, len(batches.source_names) or None)
    return EvalSetup(
        devices=devices,
        mesh=mesh,
        rules=rules,
        execution=build_execution(config.parallel, {kind: choice.kernel for kind, choice in kernels.items()}),
        kernels=kernels,
        model=model,
        batches=batches,
        loss=loss,
        # Every process reads the sums.
        eval_step=jax.jit(
            build_eval_step(loss, config.train.gradient_accumulation_steps),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        ),
    )


def open_data(config: Config, setup: EvalSetup) -> Dataset:
    """Returns the data of a run, of which each process reads the rows that its devices hold a part of.

    Raises:
        DataError, ConfigError: as build_dataset.
    """
    vocab_size, rows = config.model.vocab_size, setup.batches.own_rows.tolist()
    return build_dataset(config.data, vocab_size=vocab_size, batch_size=setup.rows, own_rows=rows)


def _check_stages(config: Config, mesh: Mesh) -> None:
    """The keys of a pipeline fit the stages that the devices gave."""
    parallel = config.parallel
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


def _num_tiles(config: Config, rows: int, mesh: Mesh) -> int:
    """Tiles of the loss: as the key says, or by what one device has of a micro-batch."""
    rules = config.parallel.logical_axis_rules
    here = rows // config.train.gradient_accumulation_steps // num_parts(mesh_axes("batch", rules), mesh)
    # The loss cuts rows as the layers between them do.
    length = max(config.data.max_target_length // num_parts(mesh_axes("norm_length", rules), mesh), 1)
    return config.compute.num_vocab_tiling or automatic_tiles((here, length), config.model.vocab_size)
