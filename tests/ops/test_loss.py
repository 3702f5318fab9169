"""Chunked cross entropy: values and gradients against a float64 reference, and which matmuls the program holds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxlite.config.schema import MESH_AXES, LogicalAxisRules
from maxlite.ops.loss import chunked_cross_entropy
from maxlite.parallel.sharding import use_mesh

BATCH, LENGTH, DIM, VOCAB = 2, 10, 8, 50


def problem(dtype: jnp.dtype = jnp.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(BATCH, LENGTH, DIM)).astype(dtype)
    unembedding = generator.normal(size=(DIM, VOCAB)).astype(dtype)
    targets = generator.integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32)
    weights = generator.random((BATCH, LENGTH))
    weights[0, -3:] = 0.0
    return x, unembedding, targets, weights.astype(np.float32)


def reference(logits, targets, weights, multiplier: float = 0.0, soft_cap: float | None = None):
    """(loss, z_loss) and the gradient of their sum for the logits, in float64."""
    raw = np.asarray(logits, np.float64)
    weights = np.asarray(weights, np.float64)
    capped = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    largest = capped.max(-1, keepdims=True)
    exponentials = np.exp(capped - largest)
    normalizer = (np.log(exponentials.sum(-1, keepdims=True)) + largest)[..., 0]
    probabilities = exponentials / exponentials.sum(-1, keepdims=True)
    one_hot = np.eye(raw.shape[-1])[np.asarray(targets)]
    loss = (weights * (normalizer - (capped * one_hot).sum(-1))).sum()
    z_loss = multiplier * (weights * normalizer**2).sum()
    gradient = weights[..., None] * (probabilities * (1 + 2 * multiplier * normalizer[..., None]) - one_hot)
    if soft_cap is not None:
        gradient = gradient * (1 - np.tanh(raw / soft_cap) ** 2)
    return loss, z_loss, gradient


@pytest.mark.parametrize(
    ("num_tiles", "multiplier", "soft_cap"),
    [
        (1, 0.05, None),
        (2, 0.05, None),
        (3, 0.05, None),
        (8, 0.05, None),
        (64, 0.05, None),
        (3, 0.0, None),
        (3, 0.05, 3.0),
    ],
)
def test_values_and_gradients_match_float64(num_tiles: int, multiplier: float, soft_cap: float | None):
    x, unembedding, targets, weights = problem()

    def total(x, unembedding):
        options = {"num_tiles": num_tiles, "z_loss_multiplier": multiplier, "soft_cap": soft_cap}
        loss, z_loss = chunked_cross_entropy(x, unembedding, targets, weights, **options)
        return 0.5 * (loss + z_loss), (loss, z_loss)

    (_, parts), gradients = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(x, unembedding)
    wide_x, wide_unembedding = np.asarray(x, np.float64), np.asarray(unembedding, np.float64)
    loss, z_loss, gradient = reference(wide_x @ wide_unembedding, targets, weights, multiplier, soft_cap)
    np.testing.assert_allclose(parts, (loss, z_loss), rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(gradients[0], 0.5 * gradient @ wide_unembedding.T, atol=1e-5)
    np.testing.assert_allclose(gradients[1], 0.5 * np.einsum("btd,btv->dv", wide_x, gradient), atol=1e-5)


def test_evaluation_equals_training_and_computes_no_gradient():
    x, unembedding, targets, weights = problem()

    def total(x, unembedding):
        return sum(chunked_cross_entropy(x, unembedding, targets, weights, num_tiles=2, z_loss_multiplier=0.1))

    plain = str(jax.make_jaxpr(total)(x, unembedding))
    assert plain.count("dot_general") == 1
    training = str(jax.make_jaxpr(jax.grad(total, (0, 1)))(x, unembedding))
    assert training.count("dot_general") == 3
    value, _ = jax.jit(jax.value_and_grad(total, (0, 1)))(x, unembedding)
    np.testing.assert_allclose(jax.jit(total)(x, unembedding), value, rtol=1e-6)


def test_padding_has_neither_loss_nor_gradient():
    x, unembedding, targets, weights = problem()
    x[0, -1] = 1e4

    def total(x, weights):
        return sum(chunked_cross_entropy(x, unembedding, targets, weights, num_tiles=3, z_loss_multiplier=0.1))

    run = jax.jit(jax.value_and_grad(total))
    assert (np.asarray(run(x, weights)[1])[0, -3:] == 0.0).all()
    assert run(x, np.zeros_like(weights))[0] == 0.0


def test_bfloat16_rounds_only_in_the_matmul():
    x, unembedding, targets, weights = problem(jnp.bfloat16)
    logits = np.einsum("BTD,DV->BTV", x.astype(np.float32), unembedding.astype(np.float32))
    loss, z_loss, gradient = reference(logits, targets, weights, 0.1)

    def total(x, unembedding):
        parts = chunked_cross_entropy(x, unembedding, targets, weights, num_tiles=2, z_loss_multiplier=0.1)
        return sum(parts), parts

    (_, parts), gradients = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(x, unembedding)
    np.testing.assert_allclose(parts, (loss, z_loss), atol=1e-4 * BATCH * LENGTH)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.bfloat16]
    expected = np.einsum("btd,btv->dv", np.asarray(x, np.float64), gradient)
    np.testing.assert_allclose(np.asarray(gradients[1], np.float64), expected, atol=0.05)


def test_float32_unembedding_keeps_a_float32_gradient_under_bfloat16_states():
    x, _, targets, weights = problem(jnp.bfloat16)
    unembedding = problem()[1]
    gradient = jax.eval_shape(
        jax.grad(lambda w: chunked_cross_entropy(x, w, targets, weights, num_tiles=2)[0]), unembedding
    )
    assert gradient.dtype == jnp.float32


def test_no_tiles_is_refused():
    with pytest.raises(ValueError, match="num_tiles"):
        chunked_cross_entropy(*problem(), num_tiles=0)


def mesh_of(sizes: dict[str, int]) -> Mesh:
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    return Mesh(np.array(jax.devices()).reshape(shape), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


@pytest.fixture(scope="module")
def rules(tiny_config) -> LogicalAxisRules:
    return tiny_config().parallel.logical_axis_rules


def on_mesh(rules: LogicalAxisRules, sizes: dict[str, int], function, *arguments):
    """Runs a jitted function on a mesh of 8 devices with these axes."""
    with use_mesh(mesh_of(sizes), rules):
        return jax.jit(function)(*arguments)


def large_problem(length: int = 12, vocab: int = 96) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(1)
    x = generator.normal(size=(8, length, 16)).astype(np.float32)
    unembedding = generator.normal(size=(16, vocab)).astype(np.float32)
    targets = generator.integers(0, vocab, (8, length)).astype(np.int32)
    weights = generator.random((8, length))
    weights[3, 4:] = 0.0
    return x, unembedding, targets, weights.astype(np.float32)


def losses_and_gradients(num_tiles: int, targets: np.ndarray, weights: np.ndarray):
    """A function of (x, unembedding): (loss, z_loss) and the gradients."""

    def total(x, unembedding):
        options = {"num_tiles": num_tiles, "z_loss_multiplier": 0.1, "soft_cap": 5.0}
        parts = chunked_cross_entropy(x, unembedding, targets, weights, **options)
        return 0.5 * sum(parts), parts

    return jax.value_and_grad(total, (0, 1), has_aux=True)


def expected_losses_and_gradients(x, unembedding, targets, weights):
    """The same in float64: (loss, z_loss), and the gradients of half their sum."""
    x, unembedding = np.asarray(x, np.float64), np.asarray(unembedding, np.float64)
    loss, z_loss, gradient = reference(x @ unembedding, targets, weights, 0.1, 5.0)
    gradients = 0.5 * gradient @ unembedding.T, 0.5 * np.einsum("btd,btv->dv", x, gradient)
    return (loss, z_loss), gradients


# Vocabularies of 960 words are exchanged among all, 96 and 64 in groups of 2; a length of 10 is not divided by 4.
@pytest.mark.parametrize(
    ("sizes", "length", "vocab"),
    [
        ({"fsdp": 8}, 12, 96),
        ({"data": 2, "fsdp": 4}, 4, 960),
        ({"fsdp": 4, "tensor": 2}, 4, 960),
        ({"tensor": 8}, 10, 64),
        ({"data": 2, "context": 2, "tensor": 2}, 10, 64),
        ({"fsdp": 2, "context": 2, "expert": 2}, 12, 96),
        ({"context": 4, "expert": 2}, 4, 960),
    ],
    ids=str,
)
def test_any_mesh_gives_what_one_device_gives(rules, sizes: dict[str, int], length: int, vocab: int):
    x, unembedding, targets, weights = large_problem(length, vocab)
    train = losses_and_gradients(3, targets, weights)
    evaluate = functools.partial(chunked_cross_entropy, num_tiles=2, z_loss_multiplier=0.1, soft_cap=5.0)

    def both(x, unembedding):
        return *train(x, unembedding), evaluate(x, unembedding, targets, weights)

    (total, parts), gradients, evaluated = on_mesh(rules, sizes, both, x, unembedding)
    expected, expected_gradients = expected_losses_and_gradients(x, unembedding, targets, weights)
    np.testing.assert_allclose(total, 0.5 * sum(expected), rtol=1e-5)
    np.testing.assert_allclose(parts, expected, rtol=1e-5)
    for found, expected_gradient in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(found, expected_gradient, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(evaluated, expected, rtol=1e-5)


def test_no_device_has_all_of_the_matrix_or_its_gradient(rules):
    # Two tokens a device and 1,024 words: as cheap to move tokens as it gets.
    x, unembedding, targets, weights = large_problem(2, 1024)
    function = losses_and_gradients(1, targets, weights)
    mesh = mesh_of({"fsdp": 8})
    arranged = NamedSharding(mesh, PartitionSpec("fsdp"))
    with use_mesh(mesh, rules):
        program = jax.jit(function, in_shardings=arranged, out_shardings=(None, arranged)).lower(x, unembedding)
    text = program.compile().as_text()
    assert "[16,128]" in text and "[16,1024]" not in text and "all-to-all" in text


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 2, "context": 2, "expert": 2}, {"fsdp": 4, "tensor": 2}], ids=str)
def test_the_loss_of_each_source_and_the_same_gradients(rules, sizes: dict[str, int]):
    x, unembedding, targets, weights = large_problem()
    source_ids = np.random.default_rng(2).integers(0, 3, targets.shape).astype(np.int32)
    options = {"num_tiles": 3, "z_loss_multiplier": 0.1, "soft_cap": 5.0}

    def total(x, unembedding):
        given = {"source_ids": source_ids, "num_sources": 4}
        loss, z_loss = chunked_cross_entropy(x, unembedding, targets, weights, **options, **given)
        return 0.5 * (jnp.sum(loss) + z_loss), (loss, z_loss)

    function = jax.value_and_grad(total, (0, 1), has_aux=True)
    (_, (loss, z_loss)), gradients = on_mesh(rules, sizes or {"data": 8}, function, x, unembedding)
    logits = np.asarray(x, np.float64) @ np.asarray(unembedding, np.float64)
    for source in range(4):
        expected = reference(logits, targets, np.where(source_ids == source, weights, 0.0), 0.1, 5.0)
        np.testing.assert_allclose(loss[source], expected[0], rtol=1e-5)
    assert loss[3] == 0
    (_, whole), expected = expected_losses_and_gradients(x, unembedding, targets, weights)
    np.testing.assert_allclose(z_loss, whole, rtol=1e-5)
    for left, right in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=2e-5)


def test_sources_without_their_number_are_refused():
    with pytest.raises(ValueError, match="num_sources"):
        chunked_cross_entropy(*problem(), num_tiles=1, source_ids=np.zeros((BATCH, LENGTH), np.int32))
