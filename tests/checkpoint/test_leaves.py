"""Arrays of a step, read without devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxlite.checkpoint.leaves import SavedSharding, open_leaves, saved_shardings
from maxlite.checkpoint.manager import Checkpointer
from maxlite.checkpoint.record import read_record
from maxlite.checkpoint.tree import leaf_paths
from maxlite.errors import CheckpointError


def save(run, states, state, step=3):
    checkpointer = Checkpointer(run, states.config())
    checkpointer.save(step, state, {})
    checkpointer.close()
    return run / "checkpoints" / str(step)


def files_below(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_every_array_comes_back_as_it_was_and_no_file_is_made(run, states):
    state = states.build(states.mesh(data=2, fsdp=4))
    folder = save(run, states, state)
    before = files_below(run)
    with open_leaves(folder, read_record(folder).leaves) as reader:
        for path, leaf in leaf_paths(state).items():
            found = reader.read(path)
            assert isinstance(found, np.ndarray) and found.dtype == leaf.dtype and found.shape == leaf.shape
            assert found.tobytes() == np.asarray(leaf).tobytes()
    saved_shardings(folder)
    assert files_below(run) == before


def test_how_an_array_lay_on_its_mesh(run, states):
    mesh = states.mesh(data=2, fsdp=2, tensor=2)
    specs = {"a": PartitionSpec(("data", "fsdp"), None), "b": PartitionSpec(None, "tensor"), "c": PartitionSpec()}
    params = {name: jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, spec)) for name, spec in specs.items()}
    alone = {"step": jax.device_put(jnp.int32(1), jax.devices()[0])}
    found = saved_shardings(save(run, states, {"params": params, **alone}))
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    assert found == {
        "params/a": SavedSharding((("data", "fsdp"), ()), sizes),
        "params/b": SavedSharding(((), ("tensor",)), sizes),
        "params/c": SavedSharding((), sizes),
        "step": None,
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "uint8", "bool", "float8_e4m3fn", "int4"])
def test_dtypes(run, states, dtype):
    everywhere = NamedSharding(states.mesh(data=8), PartitionSpec())
    value = jax.device_put(jnp.arange(8).astype(dtype), everywhere)
    folder = save(run, states, {"params": {"x": value}})
    with open_leaves(folder, read_record(folder).leaves) as reader:
        found = reader.read("params/x")
        assert found.dtype == value.dtype and found.tobytes() == np.asarray(value).tobytes()


def test_an_array_that_is_not_the_one_of_the_record_is_named(run, states):
    mesh = states.mesh(data=8)
    state = states.build(mesh, seed=1)
    folder = save(run, states, state)
    other = read_record(save(run / "other", states, states.build(mesh, seed=2))).leaves
    with open_leaves(folder, other) as reader:
        with pytest.raises(CheckpointError, match=r"^params/embedding: its values are not those that were saved"):
            reader.read("params/embedding")
        # Those that are alike in both are sound.
        assert (reader.read("params/layers/norm") == 1).all()


def test_an_array_that_is_not_there_is_named(run, states):
    mesh = states.mesh(data=8)
    state = states.build(mesh)
    folder = save(run, states, state)
    leaves = dict(read_record(folder).leaves)
    leaves["params/other"] = leaves["params/embedding"]
    with open_leaves(folder, leaves) as reader, pytest.raises(CheckpointError, match=r"^params/other: "):
        reader.read("params/other")


def test_a_step_without_a_list_of_arrays(run, states):
    folder = save(run, states, states.build(states.mesh(fsdp=8)))
    for path in (folder / "items").rglob("manifest.ocdbt"):
        path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(CheckpointError, match="step 3 can't be read: the list of its arrays is unreadable"):
        saved_shardings(folder)
