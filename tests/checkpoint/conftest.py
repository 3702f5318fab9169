import dataclasses
import functools
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
        "embedding": random.normal(size=(64, 32)).astype(np.float32),
        "layers": {"mlp": random.normal(size=(32, 16)).astype(np.float32), "norm": np.ones(32, np.float32)},
    }
    opt_state = jax.eval_shape(optax.adamw(1e-3).init, params)
    opt_state = jax.tree.map(lambda x: np.asarray(random.integers(1, 99, size=x.shape), x.dtype), opt_state)
    state = {"step": np.int32(step), "params": params, "opt_state": opt_state}
    return own_memory(jax.device_put(state, sharded(state, mesh)))


@jax.jit
def own_memory(tree):
    """As of a program: what is put there may lie in numpy's own memory, which is never given away."""
    return jax.tree.map(jnp.copy, tree)


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


@functools.cache
def section_of_base():
    return load_config("base.yml", [], {}).checkpoint


def build_config(keep=3, asynchronous=True, **others):
    """The section as base.yml has it, but for what a test gives."""
    return dataclasses.replace(
        section_of_base(),
        async_checkpointing=asynchronous,
        checkpoint_period=1,
        max_num_checkpoints_to_keep=keep,
        **others,
    )


@pytest.fixture
def run(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture(scope="session")
def states():
    """What the tests of this folder build and compare states with."""
    return types.SimpleNamespace(
        mesh=mesh_of, build=build_state, abstract=abstract, assert_same=assert_same, config=build_config
    )
