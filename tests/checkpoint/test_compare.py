"""Two steps compared; what differs is put there by the test."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxlite.checkpoint.compare import compare_steps
from maxlite.checkpoint.manager import Checkpointer
from maxlite.errors import CheckpointError


@pytest.fixture
def compare(tmp_path, states):
    """compare(first, second): the comparison of two saved dicts of parameters, saved on different meshes."""

    def run(first, second):
        folders = []
        for name, params, sizes in (("a", first, {"data": 8}), ("b", second, {"fsdp": 2})):
            sharding = NamedSharding(states.mesh(**sizes), PartitionSpec())
            checkpointer = Checkpointer(tmp_path / name, states.config())
            checkpointer.save(1, {"params": jax.device_put(params, sharding)}, {})
            checkpointer.close()
            folders.append(tmp_path / name / "checkpoints" / "1")
        return compare_steps(*folders)

    return run


def test_equal_steps_are_equal_whatever_the_mesh(compare):
    params = {"w": jnp.arange(24.0).reshape(4, 6), "b": jnp.array([jnp.nan, jnp.inf, 0.0], jnp.bfloat16)}
    other = params | {"b": jnp.array([jnp.nan, jnp.inf, -0.0], jnp.bfloat16)}
    found = compare(params, other)
    assert found.equal == 2 and not found.values and not found.only_first and not found.only_second
    assert not found.shapes and not found.dtypes


def test_all_that_can_differ(compare):
    first = {"gone": jnp.ones(2), "shape": jnp.ones((2, 3)), "dtype": jnp.ones(4), "same": jnp.ones(3),
             "value": jnp.arange(10.0), "number": jnp.arange(3)}  # fmt: skip
    second = {"new": jnp.ones(5), "shape": jnp.ones((3, 2)), "dtype": jnp.ones(4, jnp.bfloat16), "same": jnp.ones(3),
              "value": jnp.arange(10.0).at[3].add(0.5).at[7].add(-2.0), "number": jnp.array([0, 1, 9])}  # fmt: skip
    found = compare(first, second)
    assert found.only_first.keys() == {"params/gone"} and found.only_second.keys() == {"params/new"}
    assert found.only_second["params/new"].shape == (5,)
    assert [leaf.shape for leaf in found.shapes["params/shape"]] == [(2, 3), (3, 2)]
    assert [str(leaf.dtype) for leaf in found.dtypes["params/dtype"]] == ["float32", "bfloat16"]
    values = {row.path: row for row in found.values}
    assert values.keys() == {"params/value", "params/number"} and found.equal == 2
    assert values["params/value"][1:] == (2, 10, 2.0, 0) and values["params/number"][1:] == (1, 3, 7.0, 0)


def test_other_dtypes_are_compared_by_value(compare):
    # 1 + 2**-9 is no bfloat16, and the nearest one is 1.
    found = compare({"w": jnp.array([1.0, 1 + 2**-9])}, {"w": jnp.array([1.0, 1.0], jnp.bfloat16)})
    assert found.values == [("params/w", 1, 2, 2**-9, 0)]


def test_what_is_not_finite_is_counted_beside_the_largest_difference(compare):
    found = compare({"w": jnp.array([1.0, jnp.nan, jnp.inf, 4.0])}, {"w": jnp.array([1.0, 2.0, -jnp.inf, 3.0])})
    assert found.values == [("params/w", 3, 4, 1.0, 2)]


def test_where_nothing_is_finite_in_both_the_largest_difference_is_0(compare):
    found = compare({"w": jnp.array([jnp.nan])}, {"w": jnp.array([2.0])})
    assert found.values == [("params/w", 1, 1, 0.0, 1)]


def test_blocks_cover_every_element(compare, monkeypatch):
    monkeypatch.setattr("maxlite.checkpoint.compare._BLOCK", 7)
    first = np.random.default_rng(0).normal(size=(5, 9)).astype(np.float32)
    second = first.copy()
    second.flat[[0, 6, 7, 41, 44]] += np.float32([1, 2, 3, 4, 5])
    found = compare({"w": first}, {"w": second})
    assert found.values[0].count == 5 and found.values[0].largest == pytest.approx(5)


def test_damage_is_an_error_and_no_difference(compare, tmp_path):
    compare({"w": jnp.ones(4)}, {"w": jnp.ones(4)})
    folder = tmp_path / "a" / "checkpoints" / "1"
    for path in (folder / "items").rglob("manifest.ocdbt"):
        path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(CheckpointError):
        compare_steps(folder, tmp_path / "b" / "checkpoints" / "1")
