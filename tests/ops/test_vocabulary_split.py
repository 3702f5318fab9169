"""Who exchanges and who gathers, and that the columns of a plan are those that it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from maxlite.config.schema import MESH_AXES
from maxlite.ops.vocabulary_split import Group, Split, Step, plan_split
from maxlite.parallel.sharding import use_mesh


def mesh_of(**sizes: int) -> Mesh:
    shape = [sizes.get(axis, 1) for axis in MESH_AXES]
    return Mesh(np.array(jax.devices()).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def plan(tokens: int, columns: int, mesh: Mesh, matrix_axes: tuple[str, ...] = ("fsdp",)) -> Split:
    with use_mesh(mesh, ()):
        return plan_split(tokens, columns, matrix_axes=matrix_axes, column_axes=(), token_axes=("data", "fsdp"))


def test_few_tokens_are_exchanged_among_all():
    # Llama 3 with 2,048 tokens a device: sqrt(1.5 * 128256 / 2048) = 9.7.
    assert plan(2048, 128256, mesh_of(fsdp=8)).steps == (Step(Group("fsdp", 8, 1), exchange=True),)


def test_more_tokens_are_exchanged_in_runs_of_neighbours():
    steps = plan(8192, 128256, mesh_of(fsdp=8)).steps
    assert steps == (Step(Group("fsdp", 4, 1), exchange=True), Step(Group("fsdp", 2, 4), exchange=False))
    with use_mesh(mesh_of(fsdp=8), ()):
        assert [step.group.members() for step in steps] == [
            [[0, 1, 2, 3], [4, 5, 6, 7]],
            [[0, 4], [1, 5], [2, 6], [3, 7]],
        ]


def test_many_tokens_stay_where_they_are():
    assert plan(10**6, 128256, mesh_of(fsdp=8)).steps == (Step(Group("fsdp", 8, 1), exchange=False),)


def test_a_vocabulary_that_does_not_divide_is_gathered():
    assert plan(8, 50257, mesh_of(fsdp=8)).steps == (Step(Group("fsdp", 8, 1), exchange=False),)


def test_outer_axes_gather_once_the_inner_ones_exchange_enough():
    steps = plan(8192, 128256, mesh_of(fsdp=2, context=4), ("fsdp", "context")).steps
    assert steps == (Step(Group("context", 4, 1), exchange=True), Step(Group("fsdp", 2, 1), exchange=False))


@pytest.mark.parametrize("tokens", [1, 40, 10**6])
@pytest.mark.parametrize("matrix_axes", [("fsdp",), ("fsdp", "context")])
def test_columns_are_where_the_plan_says_and_gradients_come_back(tokens: int, matrix_axes: tuple[str, ...]):
    mesh = mesh_of(fsdp=8) if matrix_axes == ("fsdp",) else mesh_of(fsdp=2, context=4)
    whole = jnp.arange(16 * 64, dtype=jnp.float32).reshape(16, 64)
    with use_mesh(mesh, ()):
        split = plan_split(tokens, 64, matrix_axes=matrix_axes, column_axes=(), token_axes=matrix_axes)

        def check(part: jax.Array) -> tuple[jax.Array, jax.Array]:
            mine = split.matrix(part)
            first = split.first_column(mine.shape[1])
            expected = jax.lax.dynamic_slice_in_dim(whole, first, mine.shape[1], axis=1)
            # Each device's tokens add once; those that have the same columns have different tokens.
            return jnp.max(jnp.abs(mine - expected))[None], split.matrix_gradient(mine)

        spec = PartitionSpec(matrix_axes)
        mapped = jax.shard_map(check, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=False)
        errors, gradient = jax.jit(mapped)(whole)
    assert not errors.any()
    sharing = 8 // np.prod([group.size for group in split.columns], dtype=int)
    np.testing.assert_array_equal(gradient, whole * sharing)
