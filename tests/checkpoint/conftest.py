import dataclasses
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxlite.config.load import load_config


def mesh_of(**sizes):
    devices = np.array(jax.devices()[: int(np.prod(list(sizes.values())))]).reshape(*sizes.values())
    return jax.sharding.Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def sharded(tree, mesh):
    """Shardings for a tree: the dimensions of a matrix over the mesh axes in order, all else copied."""

    def one(leaf):
        spec = PartitionSpec(*mesh.axis_names[:2]) if leaf.ndim == 2 else PartitionSpec()
        return NamedSharding(mesh, spec)

    return jax.tree.map(one, tree)


def build_state(mesh, seed=0, step=3):
    """A state with the containers of a real one: nested dicts and optax's NamedTuples, no two leaves alike."""
    random = np.random.default_rng(seed)
    params = {
        "embedding": jnp.asarray(random.normal(size=(64, 32)), jnp.float32),
        "layers": {"mlp": jnp.asarray(random.normal(size=(32, 16)), jnp.float32), "norm": jnp.ones((32,))},
    }
    opt_state = optax.adamw(1e-3).init(params)
    opt_state = jax.tree.map(lambda x: jnp.asarray(random.integers(1, 99, size=x.shape), x.dtype), opt_state)
    state = {"step": jnp.int32(step), "params": params, "opt_state": opt_state}
    return jax.device_put(state, sharded(state, mesh))


def abstract(tree, mesh):
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        sharded(tree, mesh),
    )


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def build_config(keep=3, asynchronous=True, **others):
    """The section as base.yml has it, but for what a test gives."""
    section = load_config("base.yml", [], {}).checkpoint
    return dataclasses.replace(
        section, async_checkpointing=asynchronous, checkpoint_period=1, max_num_checkpoints_to_keep=keep, **others
    )


@pytest.fixture
def run(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def states():
    """What the tests of this folder build and compare states with."""
    return types.SimpleNamespace(
        mesh=mesh_of, build=build_state, abstract=abstract, assert_same=assert_same, config=build_config
    )
