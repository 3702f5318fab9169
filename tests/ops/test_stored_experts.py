"""Products of rows with their experts' stored matrices, against loops in numpy over the matrices as floats."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from maxlite.ops import stored_experts as ops
from maxlite.ops.experts import NOT_CUT, Gathering, from_experts, group_by_expert, to_experts
from maxlite.ops.stored import dequantize_kernel, quantize_kernel
from maxlite.ops.stored_experts import StoredExperts, grouped_stored_product

EXPERTS, DIM, HIDDEN = 6, 8, 5
WHOLE = (NOT_CUT, NOT_CUT)
# tokens and choices: blocks of one row, small ones and large ones.
SIZES = {"decoding": (1, 2), "a few rows each": (7, 2), "many": (150, 3)}


def case(name, qtype, tile, dtype=jnp.float32):
    """Choices, slots, the stored kernel, and the same as floats of the dtype."""
    tokens, k = SIZES[name]
    generator = np.random.default_rng(0)
    # The first expert and the last but one get none.
    choices = np.stack([generator.permutation([1, 2, 3, 5])[:k] for _ in range(tokens)])
    slots = generator.normal(size=(tokens * k, DIM)).astype(dtype)
    kernel = generator.normal(size=(EXPERTS, DIM, HIDDEN)).astype(np.float32)
    return choices.astype(np.int32), slots, *stored_and_floats(kernel, qtype, tile, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def stored_and_floats(kernel, qtype, tile, dtype=jnp.float32):
    stored = StoredExperts(*quantize_kernel(kernel, (1,), qtype, tile))
    return stored, dequantize_kernel(*stored, (1,), qtype, jnp.dtype(dtype))


def run(multiply, choices, slots):
    places, groups = group_by_expert(choices, EXPERTS)
    return from_experts(multiply(to_experts(slots, places), groups), places)


@pytest.mark.parametrize(
    ("name", "qtype", "tile"),
    [
        *((name, "int4", 4) for name in SIZES),
        ("decoding", "int8", None),
        ("many", "int8", None),
        ("many", "nf4", 4),
        ("a few rows each", "fp8", None),
    ],
)
def test_rows_and_their_gradients_against_numpy(name, qtype, tile):
    choices, slots, stored, floats = case(name, qtype, tile)

    def public(rows, stored, groups):
        return grouped_stored_product(rows, stored, groups, qtype, WHOLE)

    # What other platforms run.
    other = functools.partial(ops._whole_product, qtype)

    @jax.jit
    def product_and_gradient(slots, stored):
        def total(slots, way):
            y = run(lambda rows, groups: way(rows, stored, groups), choices, slots)
            return jnp.sum(jnp.sin(y)), y

        return [jax.grad(total, has_aux=True)(slots, way) for way in (public, other)]

    experts, kernel = choices.reshape(-1), np.asarray(floats)
    expected = np.stack([row @ kernel[expert] for row, expert in zip(slots, experts, strict=True)])
    expected_gradient = np.stack([kernel[expert] @ np.cos(row) for row, expert in zip(expected, experts, strict=True)])
    for gradient, product in product_and_gradient(slots, stored):
        np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-5)


def test_the_transposed_product_of_other_platforms():
    choices, slots, stored, floats = case("many", "int4", 4)

    @jax.jit
    def product(stored):
        places, groups = group_by_expert(choices, EXPERTS)
        rows = jnp.ones((len(places.order), HIDDEN)) * (places.order < choices.size)[:, None]
        return from_experts(ops._whole_product("int4", rows, stored, groups, transposed=True), places)

    found = product(stored)
    np.testing.assert_allclose(found, np.asarray(floats).sum(2)[np.asarray(choices).reshape(-1)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tile", (None, 4))
def test_as_many_rows_for_each_expert(tile):
    _, _, stored, floats = case("many", "nf4", tile)
    rows = np.random.default_rng(1).normal(size=(EXPERTS, 3, DIM)).astype(np.float32)

    @jax.jit
    def product_and_back(rows, stored):
        found, back = jax.vjp(lambda rows: grouped_stored_product(rows, stored, None, "nf4", WHOLE), rows)
        return found, *back(found)

    found, back = product_and_back(rows, stored)
    np.testing.assert_allclose(found, np.einsum("ERD,EDF->ERF", rows, floats), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(back, np.einsum("ERF,EDF->ERD", found, floats), rtol=1e-5, atol=1e-5)


def test_bfloat16_rows_give_bfloat16():
    choices, slots, stored, floats = case("a few rows each", "int8", None, jnp.bfloat16)

    def multiply(rows, groups):
        return grouped_stored_product(rows, stored, groups, "int8", WHOLE)

    found = jax.jit(lambda slots: run(multiply, choices, slots))(slots)
    assert found.dtype == jnp.bfloat16
    chosen = np.asarray(floats, np.float32)[np.asarray(choices).reshape(-1)]
    expected = np.einsum("MD,MDF->MF", np.asarray(slots, np.float32), chosen)
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize(("dimension", "tile"), [(1, None), (1, 4), (2, None), (2, 4)])
def test_a_kernel_cut_over_devices_is_made_whole(dimension, tile):
    choices, slots, stored, floats = case("many", "int4", tile)
    if dimension == 2:
        kernel = np.tile(np.asarray(floats), (1, 1, 4))
        stored, _ = stored_and_floats(kernel, "int4", tile)
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",), axis_types=(AxisType.Auto,))
    cut = Gathering(("fsdp",), dimension)
    # Tiles are whole on every device; what is beside them is cut as the codes are.
    gatherings = (cut, cut if dimension == 2 else NOT_CUT)
    spec = P(*[None] * dimension, "fsdp")
    places, groups = jax.jit(group_by_expert, static_argnums=1)(choices, EXPERTS)

    def total(rows, stored, gatherings):
        return jnp.sum(jnp.sin(grouped_stored_product(rows, stored, groups, "int4", gatherings)), 0)

    def on_devices(rows, stored):
        return jax.value_and_grad(lambda rows: jnp.sum(total(rows, stored, gatherings)))(rows)

    specs = (P(), StoredExperts(spec, spec if dimension == 2 else P()))
    mapped = jax.shard_map(on_devices, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    rows = jax.jit(to_experts)(slots, places)
    found = jax.jit(mapped)(rows, stored)
    expected = jax.jit(jax.value_and_grad(lambda rows: jnp.sum(total(rows, stored, WHOLE))))(rows)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
