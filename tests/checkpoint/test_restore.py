import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.checkpoint.manager import Checkpointer
from maxlite.checkpoint.restore import parameter_shapes, parameters_folder, restore_parameters
from maxlite.errors import CheckpointError


@pytest.fixture
def saved(run, states):
    """A run with the steps 1 and 2, whose parameters differ."""
    checkpointer = Checkpointer(run, states.config())
    first, second = (states.build(states.mesh(fsdp=8), seed=seed) for seed in (1, 2))
    checkpointer.save(1, first, {})
    checkpointer.save(2, second, {})
    checkpointer.close()
    return first, second


def test_parameters_of_a_run_and_of_a_step(saved, run, states):
    first, second = saved
    wanted = states.abstract(first["params"], states.mesh(fsdp=2, tensor=4))
    newest = restore_parameters(str(run), wanted)
    states.assert_same(newest, second["params"])
    assert newest["embedding"].sharding == wanted["embedding"].sharding
    states.assert_same(restore_parameters(run / "checkpoints" / "1", wanted), first["params"])


def test_parameters_are_cast(saved, run, states):
    params = saved[1]["params"]
    wanted = states.abstract(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), states.mesh(fsdp=8))
    found = restore_parameters(run, wanted)
    expected = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), params)
    states.assert_same(found, expected)


def test_parameters_of_other_shapes_are_refused(saved, run, states):
    wanted = states.abstract(saved[0]["params"], states.mesh(fsdp=8))
    norm = wanted["layers"]["norm"]
    wanted["layers"]["norm"] = jax.ShapeDtypeStruct((64,), norm.dtype, sharding=norm.sharding)
    with pytest.raises(CheckpointError, match=r"params/layers/norm is \[32\] in the checkpoint and \[64\] now"):
        restore_parameters(run, wanted)


def test_parameter_shapes_from_metadata(saved, run):
    assert parameter_shapes(run) == {
        "embedding": ((64, 32), np.dtype("float32")),
        "layers/mlp": ((32, 16), np.dtype("float32")),
        "layers/norm": ((32,), np.dtype("float32")),
    }


def test_the_newest_complete_step_is_read(saved, run):
    (run / "checkpoints" / "2" / "files.json").unlink()
    assert parameters_folder(run) == run / "checkpoints" / "1"


def test_a_damaged_file_is_an_error(saved, run, states):
    folder = run / "checkpoints" / "2"
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="step 2 can't be read: items/.* has 100 bytes where"):
        restore_parameters(run, states.abstract(saved[0]["params"], states.mesh(fsdp=8)))


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("nowhere", "there is no such folder"),
        (".", "it has no folder 'checkpoints'"),
        ("run/checkpoints/7", "steps that exist there: 1, 2"),
        ("run/checkpoints", "it has no folder 'checkpoints'"),
    ],
)
def test_a_path_that_holds_no_checkpoint(saved, run, tmp_path, place, found):
    with pytest.raises(CheckpointError, match=found):
        parameters_folder(tmp_path / place)
