"""What a training run is at a step: everything that a checkpoint holds but the data position."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlite.config.schema import LogicalAxisRules
from maxlite.model.build import Model


class TrainState(NamedTuple):
    """step: int32, the number of steps done; params: nested dict; opt_state: optax's.

    Also the same tree of shapes or of shardings.
    """

    step: Any
    params: Any
    opt_state: Any


def init_state(model: Model, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """Returns the state before the first step, with initial parameters."""
    return fresh_state(model.init(key), optimizer)


def fresh_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first step, with given parameters."""
    return TrainState(jnp.int32(0), params, optimizer.init(params))


def state_shardings(
    model: Model, optimizer: optax.GradientTransformation, mesh: Mesh, rules: LogicalAxisRules
) -> TrainState:
    """Returns the sharding of every leaf: moments lie like their parameters, counters everywhere."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    params = model.shardings(mesh, rules)
    abstract = jax.eval_shape(optimizer.init, model.abstract_params)
    opt_state = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        abstract,
        params,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(everywhere, params, opt_state)


def abstract_state(model: Model, optimizer: optax.GradientTransformation, shardings: TrainState) -> TrainState:
    """Returns the state as ShapeDtypeStructs with `shardings`, as a restore wants it."""
    shapes = jax.eval_shape(lambda params: fresh_state(params, optimizer), model.abstract_params)
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), shapes, shardings
    )


def state_bytes(abstract: TrainState) -> int:
    """Returns the bytes of one device's share of the state."""
    return sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(abstract)
    )
