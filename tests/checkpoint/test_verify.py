"""Every byte of a step answers for itself: flipped ones are found, and the arrays that they change are named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxlite.checkpoint.leaves import open_leaves
from maxlite.checkpoint.manager import Checkpointer
from maxlite.checkpoint.record import read_record
from maxlite.checkpoint.tree import leaf_paths
from maxlite.checkpoint.verify import verify_step
from maxlite.errors import CheckpointError


@pytest.fixture
def saved(run, states):
    """A state, and the folder of the step that holds it; large enough that values lie outside of OCDBT's own nodes."""
    random = np.random.default_rng(0)
    params = {name: jnp.asarray(random.normal(size=(128, 96)), jnp.float32) for name in ("one", "two", "three")}
    state = {"step": jnp.int32(1), "params": params}
    state = jax.device_put(state, NamedSharding(states.mesh(data=2, fsdp=4), PartitionSpec()))
    checkpointer = Checkpointer(run, states.config())
    checkpointer.save(1, state, {"position": 7})
    checkpointer.close()
    return state, run / "checkpoints" / "1"


def changed_arrays(folder, state):
    """The arrays that can't be read or have other bytes than those of `state`, which nothing was noted of."""
    changed = set()
    with open_leaves(folder, read_record(folder).leaves) as reader:
        for path, leaf in leaf_paths(state).items():
            try:
                same = reader.read(path).tobytes() == np.asarray(leaf).tobytes()
            except CheckpointError:
                same = False
            if not same:
                changed.add(path)
    return changed


def test_a_step_as_it_was_saved_is_sound(saved):
    state, folder = saved
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    found = verify_step(folder)
    assert found.problems == () and found.folder == folder
    assert found.num_arrays == len(jax.tree.leaves(state)) and found.seconds > 0
    assert found.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_flipped_bits_of_arrays_are_found_and_the_arrays_named(saved):
    state, folder = saved
    random, named = np.random.default_rng(0), set()
    files = [path for path in folder.rglob("d/*") if path.is_file()]
    for _ in range(20):
        path = files[random.integers(len(files))]
        original = path.read_bytes()
        path.write_bytes(flipped(original, random.integers(len(original)), random.integers(8)))
        changed = changed_arrays(folder, state)
        problems = verify_step(folder).problems
        path.write_bytes(original)
        # Bytes that no array needs may change: what is left of files that were merged.
        assert {line.partition(":")[0] for line in problems} == changed
        named |= changed
    assert len(named) >= 3
    assert verify_step(folder).problems == ()


def flipped(content, place, bit):
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    return bytes(changed)


def test_a_flipped_bit_of_a_value_names_its_array_and_no_other(saved):
    state, folder = saved
    for name in ("params/one", "params/three"):
        raw = np.ascontiguousarray(leaf_paths(state)[name])[64].tobytes()[:8]
        (path,) = [path for path in folder.rglob("d/*") if raw in path.read_bytes()]
        original = path.read_bytes()
        path.write_bytes(flipped(original, original.index(raw) + 5, 2))
        (problem,) = verify_step(folder).problems
        path.write_bytes(original)
        assert problem.startswith(f"{name}: its values are not those that were saved (checksums ")


@pytest.mark.parametrize("name", ["files.json", "iter/metadata", "items/_METADATA", "items/manifest.ocdbt"])
def test_other_files_are_named(saved, name):
    _, folder = saved
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)
    problems = verify_step(folder).problems
    assert problems and name in problems[0]


def test_a_file_that_is_gone_or_short(saved):
    _, folder = saved
    path = max((path for path in folder.rglob("d/*")), key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    (problem, *_) = verify_step(folder).problems
    assert path.name in problem and f"has {len(content) - 1} bytes where {len(content)} were saved" in problem
    path.unlink()
    assert f"{path.name} is missing" in verify_step(folder).problems[0]
