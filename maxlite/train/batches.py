"""Global batches: how many rows, of which lengths, and how they lie on the mesh."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxlite.config.schema import Config, DataConfig, LogicalAxisRules, ParallelConfig
from maxlite.data.batch import Batch
from maxlite.data.pipeline import row_lengths
from maxlite.errors import ConfigError
from maxlite.ops.context_parallel import balanced_order
from maxlite.parallel.sharding import describe_axes, mesh_axes, num_parts, partition_spec


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """What all batches of a run have in common.

    rows: of a global batch.
    orders: length of a row -> the order in which its tokens lie on the mesh; None is their own. Shortest first.
    source_names: of dataset_mixture, where batches say which source a token came from.
    """

    rows: int
    orders: dict[int, np.ndarray | None]
    source_names: tuple[str, ...]
    sharding: NamedSharding

    @functools.cached_property
    def own_rows(self) -> np.ndarray:
        """Numbers, ascending, of the rows of which this process's devices hold a part."""
        held = self.sharding.addressable_devices_indices_map((self.rows, self.lengths[-1])).values()
        return np.unique(np.concatenate([np.arange(self.rows)[index[0]] for index in held if index is not None]))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens in a row, one for each program that a step is compiled to; the last is max_target_length."""
        return tuple(self.orders)

    def place(self, batch: Batch) -> Batch:
        """Puts a batch of numpy arrays on the mesh: [own rows, T] in each process, [rows, T] in all."""
        order = self.orders[batch.inputs.shape[1]]

        def on_mesh(part: np.ndarray) -> jax.Array:
            ordered, shape = part if order is None else part[:, order], (self.rows, part.shape[1])

            def held(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None, "a device of this process holds a part"
                start, stop, _ = index[0].indices(self.rows)
                # A device's rows follow one another, so those between them are this process's too.
                place = int(np.searchsorted(self.own_rows, start))
                return ordered[place : place + stop - start, index[1]]

            return jax.make_array_from_callback(shape, self.sharding, held)

        return jax.tree.map(on_mesh, batch)

    def abstract(self) -> Batch:
        """Returns the shapes, dtypes and shardings of the longest batch."""

        def of(dtype: str) -> Any:
            return jax.ShapeDtypeStruct((self.rows, self.lengths[-1]), dtype, sharding=self.sharding)

        source_ids = of("int32") if self.source_names else None
        return Batch(of("int32"), of("int32"), of("float32"), of("int32"), of("int32"), source_ids)


def build_layout(config: Config, num_devices: int, mesh: Mesh, rules: LogicalAxisRules) -> BatchLayout:
    """Returns the layout of per_device_batch_size times all devices rows, as in MaxText.

    Raises:
        ConfigError: that is no whole number, or the mesh or the micro-batches do not divide rows or their length.
    """
    lengths = row_lengths(config.data)
    for length in lengths:
        _check_length(config, mesh, length)
    return BatchLayout(
        rows=_global_rows(config, num_devices, mesh),
        orders={length: _row_order(config.parallel, mesh, length) for length in lengths},
        source_names=source_names(config.data),
        sharding=NamedSharding(mesh, partition_spec(("batch", "length"), rules)),
    )


def source_names(data: DataConfig) -> tuple[str, ...]:
    """Returns the names of a mixture's sources; none where there is nothing to tell apart."""
    names = tuple(source.name for source in data.dataset_mixture or ())
    return names if len(names) > 1 else ()


def pipeline_microbatches(parallel: ParallelConfig, mesh: Mesh) -> int:
    """Returns into how many parts a batch is cut for the stages of a pipeline; 1 without one."""
    stages = num_parts(mesh_axes("layers", parallel.logical_axis_rules), mesh)
    return (parallel.num_pipeline_microbatches or stages) if stages > 1 else 1


def _row_order(parallel: ParallelConfig, mesh: Mesh, length: int) -> np.ndarray | None:
    shards = num_parts(mesh_axes("length", parallel.logical_axis_rules), mesh)
    return balanced_order(length, shards) if shards > 1 and parallel.context_parallel_load_balance else None


def _global_rows(config: Config, num_devices: int, mesh: Mesh) -> int:
    per_device = config.data.per_device_batch_size
    exact = per_device * num_devices
    rows = round(exact)
    if abs(exact - rows) > 1e-6 or rows < 1:
        raise ConfigError(
            f"per_device_batch_size={per_device:g} times {num_devices} devices is {exact:g} rows; "
            "a batch is a whole number of rows."
        )
    axes, micro_batches = (
        mesh_axes("batch", config.parallel.logical_axis_rules),
        config.train.gradient_accumulation_steps,
    )
    pipelined = pipeline_microbatches(config.parallel, mesh)
    parts = micro_batches * pipelined * num_parts(axes, mesh)
    if rows % parts:
        pipeline = f" x num_pipeline_microbatches={pipelined}" if pipelined > 1 else ""
        raise ConfigError(
            f"A batch of {rows} rows (per_device_batch_size={per_device:g} x {num_devices} devices) is not divided by "
            f"{describe_axes(axes, mesh)} x gradient_accumulation_steps={micro_batches}{pipeline} = {parts}; change "
            "one of these."
        )
    return rows


def _check_length(config: Config, mesh: Mesh, length: int) -> None:
    axes = mesh_axes("length", config.parallel.logical_axis_rules)
    shards = num_parts(axes, mesh)
    pieces = 2 * shards if config.parallel.context_parallel_load_balance else shards
    if shards > 1 and length % pieces:
        whole = length == config.data.max_target_length
        given = f"max_target_length={length}" if whole else f"The length {length} of padding_buckets"
        balanced = " (two parts a shard, by context_parallel_load_balance)" if pieces > shards else ""
        raise ConfigError(
            f"{given} is not divided by {describe_axes(axes, mesh)}: rows are cut into {pieces} equal parts{balanced}; "
            "change one of these."
        )
