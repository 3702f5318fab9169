"""Attention: both paths against a float64 reference, their gradients against each other, masks and empty rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.ops import attention
from maxlite.ops.attention import dot_product_attention

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 8
SCALE = HEAD_DIM**-0.5
CASES = {
    "causal": {},
    "segments": {"segments": True},
    "window": {"window": 5},
    "window and segments": {"window": 5, "segments": True},
    "soft cap": {"soft_cap": 1.5},
}


def arrays(length: int, dtype: jnp.dtype = jnp.float32) -> list[jax.Array]:
    """Query, key, value and a gradient for the output."""
    generator = np.random.default_rng(length)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [jnp.asarray(generator.normal(size=(BATCH, length, n, HEAD_DIM)), dtype) for n in heads]


def tokens(length: int, segments: bool = False) -> dict[str, jax.Array]:
    """Positions and segments: row 0 packs two documents and padding, row 1 holds one document."""
    positions = np.tile(np.arange(length), (BATCH, 1))
    segment_ids = np.ones((BATCH, length), int)
    cut, end = length // 3, length - length // 4
    positions[0, cut:] -= cut
    segment_ids[0, cut:] = 2
    positions[0, end:] = 0
    segment_ids[0, end:] = 0
    if not segments:
        positions = np.tile(np.arange(length), (BATCH, 1))
    named = {"query_positions": positions, "key_positions": positions}
    if segments:
        named |= {"query_segment_ids": segment_ids, "key_segment_ids": segment_ids}
    return {name: jnp.asarray(array, jnp.int32) for name, array in named.items()}


def reference(query, key, value, named, window=None, soft_cap=None) -> np.ndarray:
    """The definition, one query and one key at a time in float64."""
    query, key, value = (np.asarray(array, np.float64) for array in (query, key, value))
    named = {name: np.asarray(array) for name, array in named.items()}
    out = np.zeros(query.shape)
    for b, t, n in np.ndindex(query.shape[:3]):
        distance = named["query_positions"][b, t] - named["key_positions"][b]
        seen = (distance >= 0) & (distance < (np.inf if window is None else window))
        if "query_segment_ids" in named:
            segment = named["query_segment_ids"][b, t]
            seen &= (named["key_segment_ids"][b] == segment) & (segment != 0)
        if seen.any():
            kv_head = n // (HEADS // KV_HEADS)
            scores = SCALE * key[b, seen, kv_head] @ query[b, t, n]
            scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max())
            out[b, t, n] = weights @ value[b, seen, kv_head] / weights.sum()
    return out


def split(case: dict, length: int) -> tuple[dict, dict]:
    options = {name: option for name, option in case.items() if name != "segments"}
    return options, tokens(length, case.get("segments", False))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    """Blocks of 8 queries, so that short rows have several."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("length", [1, 29])
@pytest.mark.parametrize("aligned", [False, True])
def test_matches_the_definition(case: dict, length: int, aligned: bool):
    query, key, value, _ = arrays(length)
    options, named = split(case, length)
    attend = jax.jit(functools.partial(dot_product_attention, scale=SCALE, aligned=aligned, **options))
    got = attend(query, key, value, **named)
    np.testing.assert_allclose(got, reference(query, key, value, named, **options), atol=2e-6)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_of_both_paths_agree(case: dict):
    query, key, value, output_gradient = arrays(29)
    options, named = split(case, 29)

    def gradients(aligned: bool):
        def inner(query, key, value):
            out = dot_product_attention(query, key, value, scale=SCALE, aligned=aligned, **named, **options)
            return jnp.sum(out * output_gradient)

        return jax.jit(jax.grad(inner, (0, 1, 2)))(query, key, value)

    for blockwise, plain in zip(gradients(True), gradients(False), strict=True):
        np.testing.assert_allclose(blockwise, plain, atol=5e-6)


def test_gradients_match_finite_differences():
    query, key, value, output_gradient = arrays(13)
    options, named = split(CASES["window and segments"], 13)

    def inner(query, key, value):
        out = dot_product_attention(query, key, value, scale=SCALE, aligned=True, **named, **options)
        return jnp.sum(out * output_gradient)

    wide = [np.asarray(array, np.float64) for array in (query, key, value)]
    directions = [np.random.default_rng(7).normal(size=array.shape) for array in wide]
    step = 1e-5
    ends = [
        reference(*(w + sign * step * d for w, d in zip(wide, directions, strict=True)), named, **options)
        for sign in (1, -1)
    ]
    slope = np.sum((ends[0] - ends[1]) * np.asarray(output_gradient, np.float64)) / (2 * step)
    gradients = jax.jit(jax.grad(inner, (0, 1, 2)))(query, key, value)
    got = sum(np.sum(np.asarray(g, np.float64) * d) for g, d in zip(gradients, directions, strict=True))
    assert got == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize("aligned", [False, True])
def test_rows_that_see_nothing_are_zero_and_finite(aligned: bool):
    query, key, value, output_gradient = arrays(12)
    named = tokens(12, segments=True)
    padding = np.asarray(named["query_segment_ids"]) == 0

    def inner(query, key, value):
        out = dot_product_attention(query, key, value, scale=SCALE, aligned=aligned, **named)
        return jnp.sum(out * output_gradient), out

    (_, out), gradients = jax.jit(jax.value_and_grad(inner, (0, 1, 2), has_aux=True))(query, key, value)
    assert (np.asarray(out)[padding] == 0.0).all()
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        assert (np.asarray(gradient)[padding] == 0.0).all()


def test_decoding_ignores_empty_cache_slots():
    query, key, value, _ = arrays(9)
    cache = [jnp.pad(array, [(0, 0), (0, 7), (0, 0), (0, 0)], constant_values=9.0) for array in (key, value)]
    slots = jnp.tile(jnp.arange(16, dtype=jnp.int32), (BATCH, 1))
    named = {
        "query_positions": slots[:, 8:9],
        "key_positions": jnp.where(slots < 9, slots, 0),
        "query_segment_ids": jnp.ones((BATCH, 1), jnp.int32),
        "key_segment_ids": (slots < 9).astype(jnp.int32),
    }
    got = dot_product_attention(query[:, 8:9], *cache, scale=SCALE, **named)
    np.testing.assert_allclose(got, reference(query, key, value, tokens(9))[:, 8:9], atol=2e-6)


@pytest.mark.parametrize("aligned", [False, True])
def test_bfloat16_accumulates_in_float32(aligned: bool):
    query, key, value, output_gradient = arrays(29, jnp.bfloat16)
    named = tokens(29)

    def inner(query, key, value):
        out = dot_product_attention(query, key, value, scale=SCALE, aligned=aligned, **named)
        return jnp.sum((out * output_gradient).astype(jnp.float32)), out

    (_, out), gradients = jax.jit(jax.value_and_grad(inner, (0, 1, 2), has_aux=True))(query, key, value)
    assert out.dtype == jnp.bfloat16
    assert all(gradient.dtype == jnp.bfloat16 for gradient in gradients)
    expected = reference(query, key, value, named)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=0.02)


def test_a_policy_that_saves_context_computes_the_scores_once_more_only():
    inputs = arrays(8)[:3]
    policy = jax.checkpoint_policies.save_only_these_names("context")

    def inner(query, key, value):
        return jnp.sum(jnp.sin(dot_product_attention(query, key, value, scale=SCALE, aligned=True, **tokens(8))))

    def matmuls(function) -> int:
        return jax.jit(jax.value_and_grad(function, (0, 1, 2))).lower(*inputs).as_text().count("dot_general")

    # One block: two matmuls forward and five backward; without the policy the forward's two come again.
    assert matmuls(inner) == 7
    assert matmuls(jax.checkpoint(inner, policy=policy)) == 7
    assert matmuls(jax.checkpoint(inner)) == 9


def test_uneven_heads_and_half_given_segments_are_refused():
    query, key, value, _ = arrays(4)
    with pytest.raises(ValueError, match="share"):
        dot_product_attention(query[:, :, :3], key, value, scale=SCALE, **tokens(4))
    named = tokens(4, segments=True)
    del named["key_segment_ids"]
    with pytest.raises(ValueError, match="both or neither"):
        dot_product_attention(query, key, value, scale=SCALE, **named)
