"""Flash attention where tokens come in any order, keys are only a part, and tiles are left out."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.ops import flash_attention as module
from maxlite.ops.attention import plain_attention
from maxlite.ops.attention_types import AttentionOptions, Tokens
from maxlite.ops.flash_attention import flash_attention, flash_backward, flash_forward

BATCH, KV_HEADS, GROUPS, HEAD_DIM, VALUE_DIM = 2, 2, 2, 8, 6
SCALE = HEAD_DIM**-0.5
PLAIN = AttentionOptions(SCALE, None, None, None)
EVERYTHING = AttentionOptions(SCALE, 11, 14, 1.5)
SINKS = np.array([[0.7, -1.3], [2.0, 20.0]], np.float32)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch):
    """Tiles of 8 tokens, so that short rows have several."""
    monkeypatch.setattr(module, "TILE", 8)


def arrays(length: int) -> list[np.ndarray]:
    """Query, key, value and a gradient for the output."""
    generator = np.random.default_rng(length)
    heads = ((KV_HEADS, GROUPS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM), (KV_HEADS, GROUPS, VALUE_DIM))
    return [generator.normal(size=(BATCH, length, *shape)).astype(np.float32) for shape in heads]


def rows(length: int, segments: bool = False) -> Tokens:
    """Row 0 packs two documents and padding, row 1 holds one document."""
    positions, segment_ids = np.tile(np.arange(length, dtype=np.int32), (BATCH, 1)), np.ones((BATCH, length), np.int32)
    if not segments:
        return Tokens(np.arange(length, dtype=np.int32), positions, None)
    cut, end = length // 3, length - length // 4
    positions[0, cut:] -= cut
    segment_ids[0, cut:], segment_ids[0, end:] = 2, 0
    return Tokens(np.arange(length, dtype=np.int32), positions, segment_ids)


def chosen(tokens: Tokens, places: np.ndarray) -> Tokens:
    return jax.tree.map(lambda array: array[..., places], tokens)


@pytest.mark.parametrize(
    ("options", "segments", "length"),
    [(PLAIN, False, 8), (PLAIN, True, 29), (EVERYTHING, False, 29), (EVERYTHING, True, 8), (EVERYTHING, True, 29)],
    ids=str,
)
def test_normalizer_is_the_logsumexp(options: AttentionOptions, segments: bool, length: int):
    query, key, value, _ = arrays(length)
    tokens = rows(length, segments)
    _, normalizer = jax.jit(functools.partial(flash_forward, options))(query, key, value, tokens, tokens, SINKS)
    query, key, sinks = (np.asarray(array, np.float64) for array in (query, key, SINKS))
    scores = SCALE * np.einsum("btkgh,bskh->bkgts", query, key)
    scores = scores if options.soft_cap is None else options.soft_cap * np.tanh(scores / options.soft_cap)
    order, positions = np.arange(length), np.asarray(tokens.positions)
    seen = np.tile(order[:, None] >= order, (BATCH, 1, 1))
    if options.window is not None:
        seen &= order[:, None] - order < options.window
        seen &= positions[:, :, None] // options.chunk == positions[:, None] // options.chunk
    if segments:
        ids = np.asarray(tokens.segment_ids)
        seen &= (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] > 0)
    total = np.sum(np.exp(scores) * seen[:, None, None], axis=-1) + np.exp(sinks)[..., None]
    np.testing.assert_allclose(normalizer, np.log(total), atol=2e-6)


def test_normalizer_of_a_query_that_sees_nothing():
    query, key, value, _ = arrays(12)
    tokens = rows(12)._replace(segment_ids=np.zeros((BATCH, 12), np.int32))
    context, normalizer = jax.jit(flash_forward, static_argnums=0)(PLAIN, query, key, value, tokens, tokens, None)
    assert (np.asarray(context) == 0).all()
    np.testing.assert_allclose(normalizer, -1e29)


@pytest.mark.parametrize("options", [PLAIN, EVERYTHING], ids=["causal", "everything"])
def test_tokens_in_any_order_and_some_queries_only(options: AttentionOptions):
    query, key, value, output_gradient = arrays(29)
    tokens = rows(29, segments=True)
    generator = np.random.default_rng(3)
    some, mixed = generator.permutation(29)[:13], generator.permutation(29)
    output_gradient = output_gradient[:, some]

    def loss(attend, mixed, query, key, value, sinks):
        tokens_of = (chosen(tokens, some), chosen(tokens, mixed))
        out = attend(options, query[:, some], key[:, mixed], value[:, mixed], *tokens_of, sinks)
        return jnp.sum(out * output_gradient), out

    def differentiate(attend, mixed):
        function = jax.jit(jax.value_and_grad(functools.partial(loss, attend, mixed), (0, 1, 2, 3), has_aux=True))
        (_, out), gradients = function(query, key, value, SINKS)
        return out, *gradients

    expected = differentiate(plain_attention, np.arange(29))
    for one, other in zip(differentiate(flash_attention, mixed), expected, strict=True):
        assert np.abs(other).max() > 1e-3
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_parts_of_the_keys_combine_to_the_whole():
    *inputs, output_gradient = arrays(29)
    tokens, parts = rows(29, segments=True), (slice(0, 11), slice(11, 29))

    @jax.jit
    def in_parts(query, key, value):
        given = [(key[:, part], value[:, part], tokens, tokens.part(part)) for part in parts]
        pieces = [
            flash_forward(EVERYTHING, query, *arguments, sinks)
            for arguments, sinks in zip(given, (SINKS, None), strict=True)
        ]
        normalizer = functools.reduce(jnp.logaddexp, [piece[1] for piece in pieces])
        shares = [jnp.exp(piece[1] - normalizer).transpose(0, 3, 1, 2)[..., None] for piece in pieces]
        context = sum(share * piece[0] for share, piece in zip(shares, pieces, strict=True))
        mean_gradient = jnp.sum(context * output_gradient, -1).transpose(0, 2, 3, 1)
        (query_a, *first), (query_b, *second) = (
            flash_backward(EVERYTHING, query, *arguments, normalizer, mean_gradient, output_gradient)
            for arguments in given
        )
        return context, (
            query_a + query_b,
            *(jnp.concatenate(pair, axis=1) for pair in zip(first, second, strict=True)),
        )

    def loss(query, key, value):
        out = plain_attention(EVERYTHING, query, key, value, tokens, tokens, SINKS)
        return jnp.sum(out * output_gradient), out

    context, got = in_parts(*inputs)
    expected, expected_context = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*inputs)
    np.testing.assert_allclose(context, expected_context, atol=2e-6)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "unseen"),
    [
        (AttentionOptions(SCALE, None, None, None), slice(32, None)),
        (AttentionOptions(SCALE, 9, None, None), slice(0, 16)),
        (AttentionOptions(SCALE, None, 9, None), slice(0, 16)),
    ],
    ids=["later keys", "keys before the window", "keys before the chunk"],
)
def test_tiles_in_which_nothing_is_seen_are_left_out(options: AttentionOptions, unseen: slice):
    query, key, value, output_gradient = arrays(48)
    # A zero times NaN is NaN, so whatever were computed of these keys would show.
    key[:, unseen] = value[:, unseen] = np.nan
    part, tokens = slice(24, 32), rows(48)

    def loss(query, key, value):
        out = flash_attention(options, query[:, part], key, value, tokens.part(part), tokens, None)
        return jnp.sum(out * output_gradient[:, part])

    for gradient in jax.jit(jax.grad(loss, (0, 1, 2)))(query, key, value):
        assert np.isfinite(gradient).all()


def test_pipeline_stages_side_by_side():
    query, key, value, output_gradient = (np.stack([array, 2 * array]) for array in arrays(29))
    tokens = rows(29, segments=True)
    positions, segment_ids = (np.stack([array, array[::-1]]) for array in tokens[1:])

    def gradients(query, key, value, output_gradient, positions, segment_ids):
        of = Tokens(tokens.order, positions, segment_ids)

        def loss(query, key, value):
            return jnp.sum(flash_attention(EVERYTHING, query, key, value, of, of, SINKS) * output_gradient)

        return jax.value_and_grad(loss, (0, 1, 2))(query, key, value)

    given = (query, key, value, output_gradient, positions, segment_ids)
    together = jax.jit(jax.vmap(gradients)).lower(*given)
    alone = jax.jit(gradients).lower(*(array[0] for array in given))
    # The loops turn as often as the order says: what is batched decides nothing.
    assert together.as_text().count("stablehlo.while") == alone.as_text().count("stablehlo.while") > 0
    found, alone = together.compile()(*given), alone.compile()
    expected = [jax.tree.leaves(alone(*(array[stage] for array in given))) for stage in range(2)]
    for one, other in zip(jax.tree.leaves(found), zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(one, np.stack(other), rtol=1e-5, atol=1e-5)


def test_no_buffer_of_queries_times_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "TILE", 16)
    length = 256
    query, key, value, _ = arrays(length)
    tokens = rows(length, segments=True)

    def program(attend) -> jax.stages.Compiled:
        def loss(query, key, value):
            return jnp.sum(jnp.sin(attend(EVERYTHING, query, key, value, tokens, tokens, SINKS)))

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(query, key, value).compile()

    def largest_product(compiled: jax.stages.Compiled) -> int:
        """How many pairs of tokens the buffers of scores hold: elements of the two last dimensions."""
        shapes = re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
        last = [[int(size) for size in shape.split(",")][-2:] for shape in shapes]
        return max(sizes[0] * sizes[1] for sizes in last if len(sizes) == 2 and min(sizes) > 2 * HEAD_DIM - 1)

    flash, plain = program(flash_attention), program(plain_attention)
    assert largest_product(plain) >= length * length
    assert largest_product(flash) <= 16 * length
    memory = (compiled.memory_analysis().temp_size_in_bytes for compiled in (flash, plain))
    assert next(memory) < next(memory) / 5


def causal_softmax(query, key, value, output_gradient):
    """Output and gradients in float64, of one document without sinks."""
    query, key, value, output_gradient = (np.asarray(a, np.float64) for a in (query, key, value, output_gradient))
    seen = np.tril(np.ones((query.shape[1],) * 2))
    weights = np.exp(SCALE * np.einsum("btkgh,bskh->bkgts", query, key)) * seen
    weights /= weights.sum(-1, keepdims=True)
    of_weights = np.einsum("btkgv,bskv->bkgts", output_gradient, value)
    of_scores = SCALE * weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True))
    return (
        np.einsum("bkgts,bskv->btkgv", weights, value),
        np.einsum("bkgts,bskh->btkgh", of_scores, key),
        np.einsum("bkgts,btkgh->bskh", of_scores, query),
        np.einsum("bkgts,btkgv->bskv", weights, output_gradient),
    )


@pytest.mark.parametrize("length", [1, 7, 9, 31])
def test_lengths_that_tiles_do_not_divide(length: int):
    *inputs, output_gradient = arrays(length)
    tokens = rows(length)

    def loss(query, key, value):
        out = flash_attention(PLAIN, query, key, value, tokens, tokens, None)
        return jnp.sum(out * output_gradient), out

    gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*inputs)
    for one, other in zip((out, *gradients), causal_softmax(*inputs, output_gradient), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
