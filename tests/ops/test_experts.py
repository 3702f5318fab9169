"""Grouped products and their gradients against numpy, slot by slot; the two ways against each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from maxlite.ops import experts as ops
from maxlite.ops.experts import (
    Gathering,
    block_sizes,
    from_experts,
    group_by_expert,
    grouped_bias,
    grouped_product,
    row_groups,
    to_experts,
)

DIM, HIDDEN = 6, 5
# tokens, experts, choices, and which experts: each way through the CPU's loops at least once.
CASES = {
    "one row": (1, 8, 1, "random"),
    "decoding": (2, 8, 2, "random"),
    "a few rows each": (7, 4, 2, "random"),
    "not a multiple": (61, 3, 2, "random"),
    "every expert": (9, 4, 4, "random"),
    "one expert": (33, 1, 1, "random"),
    "two block sizes": (150, 4, 2, "random"),
    "largest blocks": (520, 2, 1, "random"),
    "some without a token": (50, 8, 2, "few"),
    "all to the first": (80, 8, 1, "first"),
    "all to the last": (80, 8, 1, "last"),
}


def choose(name):
    """experts [T, k], each token's different, and their number."""
    tokens, num_experts, k, kind = CASES[name]
    generator = np.random.default_rng(0)
    if kind in ("first", "last"):
        return np.full((tokens, k), 0 if kind == "first" else num_experts - 1), num_experts
    # Of these, experts 0, 3, 4 and the last get no token.
    allowed = np.array([1, 2, 5, 6]) if kind == "few" else np.arange(num_experts)
    return np.stack([generator.permutation(allowed)[:k] for _ in range(tokens)]), num_experts


def inputs(name, dtype=jnp.float32, hidden=HIDDEN):
    experts, num_experts = choose(name)
    generator = np.random.default_rng(1)
    shapes = ((experts.size, DIM), (num_experts, DIM, hidden), (num_experts, hidden), (experts.size, hidden))
    return experts.astype(np.int32), *(generator.normal(size=shape).astype(dtype) for shape in shapes)


def run(experts, slots, kernel, bias):
    """Slots [M, D] -> [M, F]: there, through the experts, and back."""
    places, groups = group_by_expert(experts, kernel.shape[0])
    rows = to_experts(slots, places)
    y = grouped_product(rows, kernel, groups) + grouped_bias(bias, groups, rows.shape[0])
    return from_experts(y, places)


def slot_by_slot(experts, slots, kernel, bias):
    """In float64: the product of each slot, and a function that pulls a gradient back to slots, kernel and bias."""
    slots, kernel, bias = (np.asarray(array, np.float64) for array in (slots, kernel, bias))
    chosen = experts.reshape(-1)
    y = np.stack([slot @ kernel[expert] + bias[expert] for slot, expert in zip(slots, chosen, strict=True)])

    def pull_back(gradient):
        of_slots, of_kernel, of_bias = np.zeros_like(slots), np.zeros_like(kernel), np.zeros_like(bias)
        for slot, expert in enumerate(chosen):
            of_slots[slot] = kernel[expert] @ gradient[slot]
            of_kernel[expert] += np.outer(slots[slot], gradient[slot])
            of_bias[expert] += gradient[slot]
        return of_slots, of_kernel, of_bias

    return y, pull_back


@pytest.mark.parametrize("name", CASES)
def test_products_and_gradients_against_numpy(name):
    experts, slots, kernel, bias, cotangent = inputs(name)

    @functools.partial(jax.grad, argnums=(0, 1, 2), has_aux=True)
    def total(slots, kernel, bias):
        y = run(experts, slots, kernel, bias)
        return jnp.sum(jnp.sin(y) * cotangent), y

    ours, y = jax.jit(total)(slots, kernel, bias)
    expected, pull_back = slot_by_slot(experts, slots, kernel, bias)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    for left, right in zip(ours, pull_back(np.cos(expected) * cotangent), strict=True):
        np.testing.assert_allclose(left, right, atol=3e-5)
    unused = sorted(set(range(kernel.shape[0])) - set(experts.reshape(-1).tolist()))
    np.testing.assert_array_equal(np.asarray(ours[1])[np.array(unused, int)], 0)


@pytest.mark.parametrize("name", ["decoding", "some without a token"])
def test_the_ways_of_a_cpu_and_of_an_accelerator_agree(name):
    experts, slots, kernel, _, cotangent = inputs(name)
    num_slots = experts.size

    @jax.jit
    def both(slots, kernel, cotangent):
        places, groups = group_by_expert(experts, kernel.shape[0])
        rows, gradient = to_experts(slots, places), to_experts(cotangent, places)
        products = [way(rows, kernel, groups) for way in (ops._loop_product, ops._ragged_product)]
        return products, [way(rows, kernel, groups, gradient) for way in (ops._loop_gradients, ops._ragged_gradients)]

    (loop, ragged), (loop_gradients, ragged_gradients) = jax.tree.map(np.asarray, both(slots, kernel, cotangent))
    np.testing.assert_allclose(loop[:num_slots], ragged[:num_slots], atol=1e-5)
    np.testing.assert_array_equal(ragged[num_slots:], 0)
    np.testing.assert_allclose(loop_gradients[0][:num_slots], ragged_gradients[0][:num_slots], atol=1e-5)
    np.testing.assert_allclose(loop_gradients[1], ragged_gradients[1], atol=1e-5)


# jax keeps what it traced of shapes that it has seen, so every case has a width of its own.
@pytest.mark.parametrize(("fitting", "height", "hidden"), [(0, 1, 11), (4, 3, 12), (9, 6, 13)])
def test_few_rows_read_a_matrix_in_slices_that_divide_it(fitting, height, hidden, monkeypatch):
    experts, slots, kernel, bias, _ = inputs("decoding", hidden=hidden)
    monkeypatch.setattr(ops, "SLICE_BYTES", fitting * hidden * 4)
    program = jax.jit(lambda *args: run(*args)).lower(experts, slots, kernel, bias)
    assert f"sizes = [1, {height}, {hidden}]" in program.as_text()
    expected, _ = slot_by_slot(experts, slots, kernel, bias)
    np.testing.assert_allclose(program.compile()(experts, slots, kernel, bias), expected, atol=1e-5)


@pytest.mark.parametrize(("platform", "is_ragged"), [("cpu", False), ("tpu", True), ("cuda", True)])
def test_the_platform_that_is_compiled_for_decides(platform, is_ragged):
    experts, slots, kernel, bias, _ = inputs("a few rows each")
    function = jax.jit(jax.grad(lambda *args: jnp.sum(run(*args)), (1, 2)))
    program = export.export(function, platforms=[platform])(experts, slots, kernel, bias).mlir_module()
    assert ("ragged_dot" in program) == is_ragged


def test_nothing_is_wasted_on_few_rows_and_little_on_many():
    assert block_sizes(1, 8) == block_sizes(8, 8) == (1,)
    assert block_sizes(16, 8) == (4,)
    assert block_sizes(4096, 8) == block_sizes(100_000, 64) == (256, 64)
    for num_slots in (1, 3, 17, 100, 1000):
        for num_experts in (1, 2, 7, 64):
            blocks = block_sizes(num_slots, num_experts)
            assert blocks[0] <= num_slots and blocks[-1] * num_experts <= max(2 * num_slots, num_experts)


def test_padding_is_zeros_on_the_way_there_and_nothing_on_the_way_back():
    experts, slots, kernel, _, cotangent = inputs("a few rows each")

    @jax.jit
    def there_and_back(slots, cotangent):
        places, groups = group_by_expert(experts, kernel.shape[0])
        rows = to_experts(slots, places)
        back = jax.grad(lambda rows: jnp.sum(from_experts(rows, places) * cotangent[:, :1]))(rows)
        return places, groups, rows, from_experts(rows, places), back

    places, groups, rows, home, back = jax.tree.map(np.asarray, there_and_back(slots, cotangent))
    assert rows.shape[0] == experts.size + groups.blocks[-1]
    np.testing.assert_array_equal(rows[experts.size :], 0)
    np.testing.assert_array_equal(home, slots)
    assert groups.sizes.tolist() == np.bincount(experts.reshape(-1), minlength=4).tolist()
    assert (np.diff(experts.reshape(-1)[places.order[: experts.size]]) >= 0).all()
    np.testing.assert_array_equal(back[experts.size :], 0)


@pytest.mark.parametrize("name", ["decoding", "two block sizes"])
def test_bfloat16(name):
    experts, slots, kernel, bias, cotangent = inputs(name, jnp.bfloat16)

    def total(slots, kernel, bias):
        return jnp.sum((run(experts, slots, kernel, bias) * cotangent).astype(jnp.float32))

    ours = jax.jit(jax.grad(total, (0, 1, 2)))(slots, kernel, bias)
    _, pull_back = slot_by_slot(experts, slots, kernel, bias)
    theirs = pull_back(cotangent.astype(np.float64))
    for left, right in zip(ours, theirs, strict=True):
        assert left.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(left, np.float64), right, atol=0.01 * np.abs(right).max())


def test_bfloat16_weight_gradients_add_up_in_float32():
    # 640 ones, far more than an even share: adding ones one after another, bfloat16 stays at 256.
    @functools.partial(jax.grad, argnums=1)
    def total(slots, kernel):
        places, groups = group_by_expert(np.zeros((640, 1), np.int32), 8)
        rows = to_experts(slots, places)
        return jnp.sum(from_experts(grouped_product(rows, kernel, groups), places).astype(jnp.float32))

    gradient = jax.jit(total)(np.ones((640, 2), jnp.bfloat16), np.ones((8, 2, 3), jnp.bfloat16))
    gradient = np.asarray(gradient, np.float32)
    np.testing.assert_array_equal(gradient[0], 640)
    np.testing.assert_array_equal(gradient[1:], 0)


@pytest.mark.parametrize(("is_grouped", "shape"), [(False, (2, 5, 8)), (True, (9, 8))])
def test_a_kernel_in_parts_gives_the_product_and_gradients_of_the_whole(is_grouped, shape):
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(4, *shape)).astype(np.float32)
    kernel = generator.normal(size=(2, 8, 3)).astype(np.float32)
    groups = row_groups(jnp.asarray([5, 2], jnp.int32), 7) if is_grouped else None
    if groups is not None:
        rows[:, 7:] = 0

    def total(way, rows, kernel):
        y = way(rows, kernel)
        return jnp.sum(jnp.sin(y if groups is None else y[:, :7]))

    def in_parts(rows, kernel):
        return grouped_product(rows[0], kernel, groups, Gathering(("fsdp",), 1))[None]

    def undivided(rows, kernel):
        return jnp.stack([grouped_product(part, kernel, groups) for part in rows])

    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",), axis_types=(AxisType.Auto,))
    gathering = jax.shard_map(
        in_parts, mesh=mesh, in_specs=(P("fsdp"), P(None, "fsdp")), out_specs=P("fsdp"), check_vma=False
    )
    ours = jax.jit(jax.value_and_grad(functools.partial(total, gathering), (0, 1)))(rows, kernel)
    theirs = jax.jit(jax.value_and_grad(functools.partial(total, undivided), (0, 1)))(rows, kernel)
    for left, right in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(left, right, atol=2e-5)
