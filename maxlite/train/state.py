"""What a training run is at a step: everything that a checkpoint holds but the data position."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlite.config.schema import LogicalAxisRules
from maxlite.model.build import Model
from maxlite.parallel.devices import HOST_MEMORY
from maxlite.parallel.sharding import entry_axes, num_parts
from maxlite.train.trained import trained_part


class ShardingKeys(NamedTuple):
    """over_data: shard_optimizer_over_data. on_host: optimizer_memory_host_offload."""

    over_data: bool = False
    on_host: bool = False


class TrainState(NamedTuple):
    """step: int32, the number of steps done; params: nested dict; opt_state: optax's, of what trains.

    Also the same tree of shapes or of shardings.
    """

    step: Any
    params: Any
    opt_state: Any


def init_state(model: Model, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """Returns the state before the first step, with initial parameters."""
    return fresh_state(model.init(key), model, optimizer)


def fresh_state(params: Any, model: Model, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first step, with given parameters."""
    return TrainState(jnp.int32(0), params, optimizer.init(trained_part(params, model.trainable)))


class StateShardings(NamedTuple):
    """rest: of the state between steps. gradients: like what trains. moments: like opt_state, while a step works."""

    rest: TrainState
    gradients: Any
    moments: Any


def state_shardings(
    model: Model, optimizer: optax.GradientTransformation, mesh: Mesh, rules: LogicalAxisRules, keys: ShardingKeys
) -> StateShardings:
    """Returns the sharding of every leaf: moments lie like their parameters, or finer, or on the host.

    Raises:
        ConfigError: a size that its mesh axes do not divide.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = model.shardings(mesh, rules)
    split, shapes = (trained_part(tree, model.trainable) for tree in (params, model.abstract_params))
    if keys.over_data:
        # ZeRO-1 (arXiv:1910.02054): each device of the data axis updates a part of the weights that all of them hold.
        split = jax.tree.map(split_over_data, split, shapes)
    moments = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, shapes),
        split,
        transform_non_params=lambda _: everywhere,
    )
    resting = moments
    if keys.on_host:
        resting = jax.tree.map(lambda sharding: sharding.with_memory_kind(HOST_MEMORY), moments)
    return StateShardings(TrainState(everywhere, params, resting), split, moments)


def split_over_data(sharding: NamedSharding, shape: jax.ShapeDtypeStruct) -> NamedSharding:
    """Cuts the first dimension that the data axis divides into parts for it; a leaf without one stays as it is."""
    if any("data" in entry_axes(entry) for entry in sharding.spec):
        return sharding
    spec = list(sharding.spec) + [None] * (len(shape.shape) - len(sharding.spec))
    mesh = sharding.mesh
    assert isinstance(mesh, Mesh), "a mesh of devices"
    for dim, entry in enumerate(spec):
        axes = entry_axes(entry)
        if shape.shape[dim] % num_parts((*axes, "data"), mesh) == 0:
            spec[dim] = (*axes, "data")
            return NamedSharding(mesh, PartitionSpec(*spec))
    return sharding


def abstract_state(model: Model, optimizer: optax.GradientTransformation, shardings: TrainState) -> TrainState:
    """Returns the state as ShapeDtypeStructs with `shardings`, as a restore wants it."""
    shapes = jax.eval_shape(lambda params: fresh_state(params, model, optimizer), model.abstract_params)
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), shapes, shardings
    )


def device_bytes(tree: Any) -> int:
    """Bytes on one device of a tree of ShapeDtypeStructs with shardings; what waits on the host is left out."""
    return sum(_shard_bytes(leaf) for leaf in jax.tree.leaves(tree) if not _is_on_host(leaf))


def host_bytes(tree: Any) -> int:
    """Bytes that one device's part takes of the host's memory."""
    return sum(_shard_bytes(leaf) for leaf in jax.tree.leaves(tree) if _is_on_host(leaf))


def _shard_bytes(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _is_on_host(leaf: Any) -> bool:
    return leaf.sharding.memory_kind == HOST_MEMORY
