import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxlite.checkpoint import read_arrays
from maxlite.checkpoint.manager import Checkpointer
from maxlite.checkpoint.record import read_record
from maxlite.checkpoint.restore import parameter_reader, restore_parameters
from maxlite.errors import CheckpointError

SHAPES = {"a": (256, 64), "b": (64, 64), "c": (512, 64)}


@pytest.fixture
def saved(run, states):
    """Parameters whose chunks are files' bytes of their own, on one device: too large for OCDBT to keep in its tree."""
    random = np.random.default_rng(0)
    params = {name: jnp.asarray(random.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}
    state = {"step": jnp.int32(1), "params": params, "opt_state": {"mu": jnp.ones(3)}}
    state = jax.device_put(state, NamedSharding(states.mesh(fsdp=8), PartitionSpec()))
    checkpointer = Checkpointer(run, states.config())
    checkpointer.save(1, state, {})
    checkpointer.close()
    return state["params"]


def abstract(states, params, **dtypes):
    sharding = NamedSharding(states.mesh(fsdp=8), PartitionSpec("fsdp"))
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, dtypes.get(name, leaf.dtype), sharding=sharding)
        for name, leaf in params.items()
    }


def chunks_of(run, params, name):
    """The file that holds a parameter's bytes, and where in it they begin."""
    text = np.asarray(params[name])[:8].tobytes()
    for path in (run / "checkpoints" / "1" / "items").rglob("d/*"):
        place = path.read_bytes().find(text)
        if place >= 0:
            return path, place
    raise AssertionError(f"no file has the bytes of {name}")


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_names_the_array(run, states, saved, name, bit):
    path, place = chunks_of(run, saved, name)
    content = bytearray(path.read_bytes())
    content[place + 1001] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"step 1 can't be read: the values of params/{name} are not those"):
        restore_parameters(run, abstract(states, saved))
    read = parameter_reader(run, abstract(states, saved))
    for other in SHAPES:
        if other != name:
            assert np.array_equal(read(other), saved[other])
    with pytest.raises(CheckpointError, match=f"params/{name}"):
        read(name)


def test_the_first_and_the_number_of_others_are_named(run, states, saved):
    for name in ("b", "c"):
        path, place = chunks_of(run, saved, name)
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="values of params/b and 1 more arrays are not"):
        restore_parameters(run, abstract(states, saved))


def test_what_orbax_cannot_read_is_named_with_the_file(run, states, saved):
    (tree,) = (run / "checkpoints" / "1" / "items" / "d").iterdir()
    content = bytearray(tree.read_bytes())
    content[len(content) // 2] ^= 1
    tree.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"step 1 can't be read: params/a: orbax failed .*items/d/{tree.name}"):
        restore_parameters(run, abstract(states, saved))


def test_casts_are_read_so_many_at_a_time_as_the_largest_has_room_for(run, states, saved, monkeypatch):
    calls, read = [], read_arrays._read_by_orbax

    def count(folder, wanted):
        calls.append(sorted(wanted))
        assert all(leaf.dtype == jnp.float32 for leaf in wanted.values())
        return read(folder, wanted)

    monkeypatch.setattr(read_arrays, "_read_by_orbax", count)
    found = restore_parameters(run, abstract(states, saved, a="bfloat16", b="bfloat16", c="float16"))
    assert calls == [["params/a", "params/b"], ["params/c"]]
    for name, dtype in (("a", jnp.bfloat16), ("b", jnp.bfloat16), ("c", jnp.float16)):
        assert found[name].dtype == dtype
        assert np.asarray(found[name]).tobytes() == np.asarray(saved[name]).astype(dtype).tobytes()
        assert found[name].sharding.spec == PartitionSpec("fsdp")


def test_into_the_hosts_memory(run, states, saved):
    resting = NamedSharding(states.mesh(fsdp=8), PartitionSpec("fsdp"), memory_kind="pinned_host")
    wanted = {
        name: jax.ShapeDtypeStruct(leaf.shape, "bfloat16" if name == "a" else leaf.dtype, sharding=resting)
        for name, leaf in saved.items()
    }
    found = restore_parameters(run, wanted)
    for name, leaf in found.items():
        assert leaf.sharding.memory_kind == "pinned_host"
        assert np.array_equal(np.asarray(leaf), np.asarray(saved[name]).astype(leaf.dtype))


def test_a_report_of_parameters_alone_says_what_was_left(run, states, saved):
    reports = []
    restore_parameters(run, abstract(states, saved), reports.append)
    (report,) = reports
    assert report.restored == ("params/a", "params/b", "params/c")
    assert report.not_used == ("opt_state/mu", "step")
    assert report.line().endswith("; not read: opt_state (1 array), step (1 array)")
    assert set(read_record(run / "checkpoints" / "1").leaves) == {*report.restored, *report.not_used}
