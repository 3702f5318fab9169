import contextlib
import gc
import os
import resource
import shutil
import time
from collections import namedtuple
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from maxlite.checkpoint.bit_sums import leaf_checksum
from maxlite.checkpoint.manager import Checkpointer
from maxlite.checkpoint.record import read_record
from maxlite.checkpoint.tree import leaf_paths
from maxlite.errors import CheckpointError

DATA_STATE = {"epoch": 2, "next": 123456789012345, "buffers": [[1, 2], []], "share": 0.1, "name": "é"}


@pytest.fixture(scope="module")
def saved_once(states, tmp_path_factory):
    """A run with the complete steps 2, 4 and 6, and its state."""
    run = tmp_path_factory.mktemp("saved") / "run"
    state = states.build(states.mesh(fsdp=8))
    checkpointer = Checkpointer(run, states.config())
    for step in (2, 4, 6):
        checkpointer.save(step, state, DATA_STATE | {"step": step})
    checkpointer.close()
    return run, state


@pytest.fixture
def saved(saved_once, run):
    """A copy of that run for the test alone; its state."""
    shutil.copytree(saved_once[0], run)
    return saved_once[1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_save_and_restore_are_bitwise(run, states, asynchronous, capfd):
    mesh = states.mesh(fsdp=8)
    state = states.build(mesh)
    checkpointer = Checkpointer(run, states.config(asynchronous=asynchronous))
    assert checkpointer.latest_step() is None
    checkpointer.save(3, state, DATA_STATE)
    assert checkpointer.current_step == 3
    if not asynchronous:
        assert checkpointer.latest_step() == 3
    checkpointer.close()
    assert {entry.name for entry in (run / "checkpoints" / "3").iterdir() if entry.is_dir()} == {"items", "iter"}

    again = Checkpointer(run, states.config())
    assert again.latest_step() == 3
    assert again.skipped_steps == []
    found, data_state = again.restore(3, states.abstract(state, mesh))
    again.close()
    states.assert_same(found, state)
    assert data_state == DATA_STATE
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("sizes", [{"one": 1}, {"fsdp": 2, "tensor": 4}, {"data": 4}])
def test_restores_into_the_present_mesh(saved, run, states, sizes):
    wanted = states.abstract(saved, states.mesh(**sizes))
    found, _ = Checkpointer(run, states.config()).restore(6, wanted)
    states.assert_same(found, saved)
    for array, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert array.sharding == leaf.sharding


def test_restores_onto_one_plain_device(saved, run, states):
    sharding = SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), saved)
    found, _ = Checkpointer(run, states.config()).restore(6, wanted)
    states.assert_same(found, saved)
    assert all(array.devices() == {jax.devices()[0]} for array in jax.tree.leaves(found))


def test_restore_casts_to_the_wanted_dtype(saved, run, states):
    wanted = states.abstract(saved, states.mesh(fsdp=8))
    embedding = wanted["params"]["embedding"]
    wanted["params"]["embedding"] = jax.ShapeDtypeStruct(embedding.shape, jnp.bfloat16, sharding=embedding.sharding)
    found, _ = Checkpointer(run, states.config()).restore(6, wanted)
    expected = np.asarray(saved["params"]["embedding"]).astype(jnp.bfloat16)
    assert found["params"]["embedding"].dtype == jnp.bfloat16
    assert np.asarray(found["params"]["embedding"]).tobytes() == expected.tobytes()
    assert found["params"]["layers"]["mlp"].dtype == jnp.float32


def test_a_background_save_holds_the_state_of_its_call(run, states):
    state = {"step": jnp.int32(0), "params": {"w": jnp.arange(1 << 20, dtype=jnp.float32)}, "opt_state": {}}
    expected = np.array(state["params"]["w"], copy=True)
    advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    checkpointer = Checkpointer(run, states.config())
    checkpointer.save(0, state, {})
    for _ in range(20):
        state = advance(state)
    checkpointer.close()
    found, _ = Checkpointer(run, states.config()).restore(0, wanted)
    assert np.array_equal(found["params"]["w"], expected)


def test_keeps_the_newest(run, states):
    state = states.build(states.mesh(fsdp=8))
    checkpointer = Checkpointer(run, states.config(keep=2))
    for step in (1, 2, 3):
        checkpointer.save(step, state, {})
    checkpointer.close()
    again = Checkpointer(run, states.config(keep=2))
    again.save(4, state, {})
    again.close()
    assert sorted(entry.name for entry in (run / "checkpoints").iterdir()) == ["3", "4"]


def test_keeps_what_the_keys_ask_for(run, states):
    state = states.build(states.mesh(fsdp=8))
    config = states.config(keep=1, checkpoint_keep_period=4, checkpoint_keep_best=1)
    checkpointer = Checkpointer(run, config)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 4.0), (5, 5.0)):
        checkpointer.save(step, state, {}, {"eval/avg_loss": loss})
    checkpointer.close()
    assert sorted(entry.name for entry in (run / "checkpoints").iterdir()) == ["2", "4", "5"]


def test_a_step_says_what_it_is(run, states):
    began = time.time()
    state = states.build(states.mesh(fsdp=4, tensor=2))
    checkpointer = Checkpointer(run, states.config())
    checkpointer.save(3, state, DATA_STATE, {"eval/avg_loss": 0.5})
    checkpointer.close()
    record = read_record(run / "checkpoints" / "3")
    assert began <= record.time <= time.time()
    assert (record.metrics, record.atomicity, record.num_processes) == ({"eval/avg_loss": 0.5}, "rename", 1)
    assert record.mesh == {"fsdp": 4, "tensor": 2} and record.versions["jax"] == jax.__version__
    expected = {path: (leaf.shape, str(leaf.dtype)) for path, leaf in leaf_paths(state).items()}
    assert record.shapes() == expected
    for path, leaf in leaf_paths(state).items():
        assert record.leaves[path].checksum == leaf_checksum(np.asarray(leaf)), path


def test_commit_files_make_a_step_complete(run, states):
    mesh = states.mesh(fsdp=8)
    state = states.build(mesh)
    config = states.config(checkpoint_atomicity="commit_file")
    checkpointer = Checkpointer(run, config)
    for step in (2, 4):
        checkpointer.save(step, state, {"step": step})
    checkpointer.close()
    assert read_record(run / "checkpoints" / "4").atomicity == "commit_file"
    states.assert_same(Checkpointer(run, config).restore(4, states.abstract(state, mesh))[0], state)

    # What a kill just before the mark leaves; no rename is needed to begin again.
    (run / "checkpoints" / "4" / "commit_success.txt").unlink()
    checkpointer = Checkpointer(run, config)
    assert checkpointer.latest_step() == 2 and checkpointer.skipped_steps == ["4 (never finished)"]
    checkpointer.save(4, state, {"step": "again"})
    checkpointer.close()
    assert sorted(entry.name for entry in (run / "checkpoints").iterdir()) == ["2", "4"]
    assert checkpointer.restore(4, states.abstract(state, mesh))[1] == {"step": "again"}


def test_no_name_changes_where_commit_files_are_asked_for(run, states, monkeypatch):
    def refuse(*arguments, **others):
        raise AssertionError("a folder was renamed")

    state = states.build(states.mesh(fsdp=8))
    for name in ("rename", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda old, new, original=original: refuse() if os.path.isdir(old) else original(old, new)
        )
    checkpointer = Checkpointer(run, states.config(checkpoint_atomicity="commit_file"))
    checkpointer.save(1, state, {})
    checkpointer.close()
    checkpointer = Checkpointer(run, states.config(checkpoint_atomicity="rename"))
    checkpointer.save(2, state, {})
    with pytest.raises(CheckpointError, match="a folder was renamed"):
        checkpointer.close()
    assert checkpointer.latest_step() == 1


def test_a_restore_reports(saved, run, states):
    wanted, reports = states.abstract(saved, states.mesh(fsdp=8)), []
    embedding = wanted["params"]["embedding"]
    wanted["params"]["embedding"] = jax.ShapeDtypeStruct(embedding.shape, jnp.bfloat16, sharding=embedding.sharding)
    Checkpointer(run, states.config()).restore(6, wanted, reports.append)
    (report,) = reports
    assert report.restored == tuple(leaf_paths(saved)) and report.not_used == ()
    assert report.cast == {"params/embedding": ("float32", "bfloat16")}
    assert report.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(saved)) and report.seconds > 0


@pytest.mark.parametrize(
    "pattern", ["files.json", "commit_success.txt", "items/_METADATA", "items/d/*", "iter/metadata"]
)
def test_a_half_written_step_is_passed_over_and_saved_again(saved, run, states, pattern):
    (target,) = (run / "checkpoints" / "6").glob(pattern)
    target.unlink()
    wanted = states.abstract(saved, states.mesh(fsdp=8))
    checkpointer = Checkpointer(run, states.config())
    assert checkpointer.latest_step() == 4
    (skipped,) = checkpointer.skipped_steps
    assert skipped.startswith("6 (") and target.name in skipped
    with pytest.raises(CheckpointError, match=f"step 6 can't be read: .*{target.name} is missing"):
        checkpointer.restore(6, wanted)
    _, data_state = checkpointer.restore(4, wanted)
    assert data_state["step"] == 4

    checkpointer.save(5, saved, {"step": 5})
    checkpointer.save(6, saved, {"step": "again"})
    checkpointer.close()
    assert checkpointer.latest_step() == 6 and checkpointer.skipped_steps == []
    assert sorted(entry.name for entry in (run / "checkpoints").iterdir()) == ["4", "5", "6", "6.incomplete"]
    assert Checkpointer(run, states.config()).restore(6, wanted)[1] == {"step": "again"}


def test_a_killed_save_never_counts(saved, run, states):
    checkpoints = run / "checkpoints"
    shutil.move(checkpoints / "6", checkpoints / "6.orbax-checkpoint-tmp")
    checkpointer = Checkpointer(run, states.config())
    assert checkpointer.latest_step() == 4
    assert checkpointer.skipped_steps == ["6.orbax-checkpoint-tmp (never finished)"]
    checkpointer.save(6, saved, {})
    checkpointer.close()
    assert sorted(entry.name for entry in checkpoints.iterdir()) == ["2", "4", "6"]


def _truncate(path: Path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _garble(path: Path):
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_truncate, _garble])
@pytest.mark.parametrize(
    "part", ["items/d/*", "items/_METADATA", "items/manifest.ocdbt", "iter/metadata", "files.json"]
)
def test_a_damaged_file_is_named(saved, run, states, part, damage):
    folder = run / "checkpoints" / "6"
    (target,) = folder.glob(part)
    damage(target)
    checkpointer = Checkpointer(run, states.config())
    step = checkpointer.latest_step()
    assert step == 6, "damage is not passed over in silence"
    with pytest.raises(CheckpointError) as caught:
        checkpointer.restore(step, states.abstract(saved, states.mesh(fsdp=8)))
    message = str(caught.value)
    assert "step 6 can't be read" in message and str(folder) in message
    assert "other complete steps: 2, 4" in message and "Remove that folder to go on from step 4" in message
    assert target.relative_to(folder).as_posix() in message


def test_another_shape_names_the_first_parameter(saved, run, states):
    wanted = states.abstract(saved, states.mesh(fsdp=8))
    embedding = wanted["params"]["embedding"]
    wanted["params"]["embedding"] = jax.ShapeDtypeStruct((64, 16), embedding.dtype, sharding=embedding.sharding)
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(run, states.config()).restore(6, wanted)
    assert "params/embedding is [64, 32] in the checkpoint and [64, 16] now" in str(caught.value).splitlines()[1]


def test_other_arrays_are_named(saved, run, states):
    wanted = states.abstract(saved, states.mesh(fsdp=8))
    wanted["params"]["head"] = wanted["params"].pop("embedding")
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(run, states.config()).restore(6, wanted)
    assert "params/head is not in the checkpoint" in str(caught.value)
    assert "params/embedding is in the checkpoint but not used now" in str(caught.value)


def test_a_step_that_is_there_is_not_overwritten(saved, run, states):
    checkpointer = Checkpointer(run, states.config())
    with pytest.raises(CheckpointError, match="there already"):
        checkpointer.save(4, saved, {})
    with pytest.raises(CheckpointError, match="complete steps: 2, 4, 6"):
        checkpointer.restore(5, states.abstract(saved, states.mesh(fsdp=8)))


def test_no_disk_space_is_said_before_writing(saved, run, states, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 2000, 2000))
    checkpointer = Checkpointer(run, states.config())
    with pytest.raises(CheckpointError, match=r"no disk space .* needs up to 0\.0[1-9]\d MB .* 0\.002 MB free"):
        checkpointer.save(8, saved, {})
    checkpointer.close()
    assert sorted(entry.name for entry in (run / "checkpoints").iterdir()) == ["2", "4", "6"]


@contextlib.contextmanager
def small_files_only():
    """Writes beyond 4 KB of a file fail, as on a full disk; and those of pytest too, which must not write in here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("how", ["wait", "save", "close"])
def test_a_failed_background_save_is_an_error(saved, run, states, how, capfd):
    checkpointer = Checkpointer(run, states.config(keep=1))
    with small_files_only():
        checkpointer.save(8, saved, {})
        with pytest.raises(CheckpointError) as caught:
            checkpointer.save(9, saved, {}) if how == "save" else getattr(checkpointer, how)()
    message = str(caught.value)
    assert "saving step 8" in message and str(run) in message and "newest complete checkpoint is 6" in message
    assert "File too large" in message or "OUT_OF_RANGE" in message
    checkpointer.close()
    del caught
    gc.collect()
    assert Checkpointer(run, states.config()).restore(6, states.abstract(saved, states.mesh(fsdp=8)))
    assert capfd.readouterr() == ("", "")


def test_a_failed_background_save_is_known_without_waiting(saved, run, states):
    checkpointer = Checkpointer(run, states.config())
    assert checkpointer.failed() is None
    with small_files_only():
        checkpointer.save(8, saved, {})
        deadline = time.monotonic() + 30
        while (failure := checkpointer.failed()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
    assert isinstance(failure, CheckpointError) and "saving step 8" in str(failure)
    assert checkpointer.failed() is None, "an error is raised once"
    checkpointer.close()
    assert checkpointer.latest_step() == 6


def test_a_folder_that_is_a_file_is_an_error(run, states):
    run.mkdir()
    (run / "checkpoints").write_text("in the way")
    checkpointer = Checkpointer(run, states.config())
    with pytest.raises(CheckpointError, match="saving step 1 to .*checkpoints failed"):
        checkpointer.save(1, states.build(states.mesh(fsdp=8)), {})
    checkpointer.close()


def test_nothing_reads_pickle():
    room = Path(__file__).parents[2] / "maxlite" / "checkpoint"
    for path in room.glob("*.py"):
        words = path.read_text(encoding="utf-8")
        assert not any(word in words for word in ("pickle", "marshal", "shelve", "eval(", "np.load")), path
