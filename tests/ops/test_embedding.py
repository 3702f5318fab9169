import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.ops.embedding import look_up
from maxlite.parallel.mesh import build_mesh
from maxlite.parallel.sharding import use_mesh

TABLE = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
TOKENS = np.random.default_rng(1).integers(0, 16, (8, 12), np.int32)


@pytest.mark.parametrize(
    ("shape", "degrees"),
    [
        ((8, 12), ("ici_fsdp_parallelism=8",)),
        ((8, 12), ("ici_fsdp_parallelism=2", "ici_expert_parallelism=2", "ici_tensor_parallelism=2")),
        ((8, 12), ("ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_context_parallelism=2")),
        # Rows and tokens that not all axes divide.
        ((2, 12), ("ici_fsdp_parallelism=2", "ici_expert_parallelism=2", "ici_context_parallelism=2")),
        ((1, 1), ("ici_fsdp_parallelism=2", "ici_context_parallelism=2", "ici_tensor_parallelism=2")),
    ],
)
def test_it_is_the_rows_of_the_table_on_any_mesh(tiny_config, shape, degrees):
    parallel = tiny_config(*degrees).parallel
    mesh, tokens = build_mesh(parallel, jax.devices()[:8]), TOKENS[: shape[0], : shape[1]]
    weight = np.arange(24, dtype=np.float32)

    def loss(table):
        rows = look_up(table, tokens, jnp.dtype("float32"))
        return jnp.sum(rows**2 * weight), rows

    with use_mesh(mesh, parallel.logical_axis_rules):
        gradient, got = jax.jit(jax.grad(loss, has_aux=True))(TABLE)
    np.testing.assert_array_equal(got, TABLE[tokens])
    expected = np.zeros_like(TABLE)
    np.add.at(expected, tokens, 2 * TABLE[tokens] * np.arange(24.0))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


def test_the_table_is_not_gathered(tiny_config):
    parallel = tiny_config("ici_fsdp_parallelism=2", "ici_context_parallelism=4").parallel
    mesh = build_mesh(parallel, jax.devices()[:8])
    with use_mesh(mesh, parallel.logical_axis_rules):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, ("fsdp", "context")))
        table = jax.device_put(TABLE, sharding)
        text = jax.jit(lambda table: look_up(table, TOKENS, jnp.dtype("bfloat16"))).lower(table).compile().as_text()
    assert "all-to-all" in text
    gathered = [line for line in text.splitlines() if "all-gather(" in line or "all-gather-start(" in line]
    # Token ids only.
    assert gathered and all("s32[" in line.split("=")[1][:20] for line in gathered), gathered
