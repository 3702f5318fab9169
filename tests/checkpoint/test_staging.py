import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxlite.checkpoint.manager import Checkpointer
from maxlite.checkpoint.staging import Staging


def build_arrays(states, seed):
    mesh, random = states.mesh(x=4, y=2), np.random.default_rng(seed)
    places = {"split": ("x", "y"), "partly": ("y",), "whole": ()}
    return {
        name: jax.device_put(
            jnp.asarray(random.normal(size=(64, 64)), dtype), NamedSharding(mesh, PartitionSpec(*spec))
        )
        for (name, spec), dtype in zip(places.items(), ("float32", "bfloat16", "float32"), strict=True)
    }


def places_of(arrays):
    return {
        name: sorted(part.data.unsafe_buffer_pointer() for part in array.addressable_shards)
        for name, array in arrays.items()
    }


def test_the_copy_is_the_same_and_stays_when_the_arrays_are_overwritten(states):
    arrays = build_arrays(states, 0)
    expected = {name: np.asarray(array).copy() for name, array in arrays.items()}
    copies = Staging().copy(arrays)
    overwritten = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=0)(arrays)
    assert not any(np.asarray(leaf).any() for leaf in overwritten.values())
    for name, copy in copies.items():
        assert copy.dtype == arrays[name].dtype and copy.sharding == arrays[name].sharding
        np.testing.assert_array_equal(np.asarray(copy), expected[name])


def test_the_second_copy_takes_the_memory_of_the_first(states):
    staging = Staging()
    first = places_of(staging.copy(build_arrays(states, 0)))
    arrays = build_arrays(states, 1)
    second = staging.copy(arrays)
    assert places_of(second) == first
    for name, copy in second.items():
        np.testing.assert_array_equal(np.asarray(copy), np.asarray(arrays[name]))


def test_a_step_goes_on_in_its_own_memory_while_a_save_is_written(states, tmp_path):
    """What is saved in the background is not what the step wants to write its results into."""
    checkpointer = Checkpointer(tmp_path, states.config())
    state = states.build(states.mesh(x=2))
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    for number in (1, 2):
        before = places_of(state["params"]["layers"])
        checkpointer.save(number, state, {})
        state = jax.block_until_ready(step(state))
        assert places_of(state["params"]["layers"]) == before
    checkpointer.close()
