"""Attention: both paths against a float64 reference, their gradients against a naive softmax, masks, empty rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.ops import attention
from maxlite.ops.attention import dot_product_attention

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 8
SCALE = HEAD_DIM**-0.5
EVERYTHING = {"window": 5, "chunk": 7, "soft_cap": 1.5, "sinks": True, "segments": True, "value_dim": 6}
CASES = {
    "causal": {},
    "segments": {"segments": True},
    "window": {"window": 5},
    "window and segments": {"window": 5, "segments": True},
    "soft cap": {"soft_cap": 1.5},
    "chunk": {"chunk": 6},
    "chunk and segments": {"chunk": 6, "segments": True},
    "sinks": {"sinks": True},
    "sinks and segments": {"sinks": True, "segments": True},
    "narrow values": {"value_dim": 5},
    "wide values": {"value_dim": 11, "segments": True},
    "everything": EVERYTHING,
}
PATHS = pytest.mark.parametrize("aligned", [False, True], ids=["plain", "blockwise"])


def arrays(length: int, dtype: jnp.dtype = jnp.float32, value_dim: int = HEAD_DIM) -> list[jax.Array]:
    """Query, key, value and a gradient for the output."""
    generator = np.random.default_rng(length)
    shapes = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, value_dim), (HEADS, value_dim))
    return [jnp.asarray(generator.normal(size=(BATCH, length, *shape)), dtype) for shape in shapes]


def sink_logits(dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """One per query head; the last is far above every score."""
    return jnp.asarray([0.7, -1.3, 2.0, 20.0], dtype)


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


def visible(named: dict, b: int, t: int, window: int | None, chunk: int | None) -> np.ndarray:
    """Which keys query t of row b sees: [S] bool."""
    named = {name: np.asarray(array) for name, array in named.items()}
    position, key_positions = named["query_positions"][b, t], named["key_positions"][b]
    seen = key_positions <= position
    if window is not None:
        seen &= key_positions > position - window
    if chunk is not None:
        seen &= key_positions // chunk == position // chunk
    if "query_segment_ids" in named:
        segment = named["query_segment_ids"][b, t]
        seen &= (named["key_segment_ids"][b] == segment) & (segment != 0)
    return seen


def reference(query, key, value, named, *, window=None, chunk=None, soft_cap=None, sinks=None) -> np.ndarray:
    """The definition, one query and one key at a time in float64."""
    query, key, value = (np.asarray(array, np.float64) for array in (query, key, value))
    sinks = np.full(HEADS, -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    out = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, t in np.ndindex(query.shape[:2]):
        seen = visible(named, b, t, window, chunk)
        for n in range(HEADS if seen.any() else 0):
            kv_head = n // (HEADS // KV_HEADS)
            scores = SCALE * key[b, seen, kv_head] @ query[b, t, n]
            scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores)
            out[b, t, n] = weights @ value[b, seen, kv_head] / (weights.sum() + np.exp(sinks[n]))
    return out


def naive(query, key, value, sinks, named, *, window=None, chunk=None, soft_cap=None) -> jax.Array:
    """One dense softmax, whose derivative is left to jax."""
    rows = [[visible(named, b, t, window, chunk) for t in range(query.shape[1])] for b in range(BATCH)]
    seen = jnp.asarray(np.array(rows))[:, None]
    key, value = (jnp.repeat(array, HEADS // KV_HEADS, axis=2) for array in (key, value))
    scores = SCALE * jnp.einsum("btnh,bsnh->bnts", query, key)
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen, scores, -1e30)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jnp.where(seen, jax.nn.softmax(scores, axis=-1)[..., : key.shape[1]], 0.0)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def split(case: dict, length: int) -> tuple[dict, dict, list[jax.Array]]:
    """The static options of a case, its tokens, and query, key, value and output gradient."""
    options = {name: option for name, option in case.items() if name in ("window", "chunk", "soft_cap")}
    inputs = arrays(length, value_dim=case.get("value_dim", HEAD_DIM))
    return options, tokens(length, case.get("segments", False)), inputs


def sinks_of(case: dict) -> jax.Array | None:
    return sink_logits() if "sinks" in case else None


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    """Blocks of 8 queries, so that short rows have several."""
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("length", [1, 29])
@PATHS
def test_matches_the_definition(case: dict, length: int, aligned: bool):
    options, named, (query, key, value, _) = split(case, length)
    sinks = sinks_of(case)
    attend = jax.jit(functools.partial(dot_product_attention, scale=SCALE, aligned=aligned, **options))
    got = attend(query, key, value, sinks=sinks, **named)
    np.testing.assert_allclose(got, reference(query, key, value, named, sinks=sinks, **options), atol=2e-6)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@PATHS
def test_gradients_match_a_naive_softmax(case: dict, aligned: bool):
    options, named, (*inputs, output_gradient) = split(case, 29)
    inputs.append(sinks_of(case))
    attend = functools.partial(dot_product_attention, scale=SCALE, aligned=aligned, **named, **options)

    def got_loss(query, key, value, sinks):
        return jnp.sum(attend(query, key, value, sinks=sinks) * output_gradient)

    def naive_loss(query, key, value, sinks):
        return jnp.sum(naive(query, key, value, sinks, named, **options) * output_gradient)

    got, expected = (jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*inputs) for loss in (got_loss, naive_loss))
    assert (got[3] is None) == ("sinks" not in case)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.abs(other).max() > 1e-3
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("name", ["window and segments", "everything"])
def test_gradients_match_finite_differences(name: str):
    options, named, (*inputs, output_gradient) = split(CASES[name], 13)
    inputs += [] if sinks_of(CASES[name]) is None else [sinks_of(CASES[name])]
    attend = functools.partial(dot_product_attention, scale=SCALE, aligned=True, **named, **options)

    def loss(query, key, value, sinks=None):
        return jnp.sum(attend(query, key, value, sinks=sinks) * output_gradient)

    wide = [np.asarray(array, np.float64) for array in inputs]
    directions = [np.random.default_rng(7).normal(size=array.shape) for array in wide]
    step = 1e-5
    ends = []
    for sign in (1, -1):
        query, key, value, *sinks = (w + sign * step * d for w, d in zip(wide, directions, strict=True))
        ends.append(reference(query, key, value, named, sinks=sinks[0] if sinks else None, **options))
    slope = np.sum((ends[0] - ends[1]) * np.asarray(output_gradient, np.float64)) / (2 * step)
    gradients = jax.jit(jax.grad(loss, tuple(range(len(inputs)))))(*inputs)
    got = sum(np.sum(np.asarray(g, np.float64) * d) for g, d in zip(gradients, directions, strict=True))
    assert got == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize("sinks", [None, sink_logits()], ids=["no sinks", "sinks"])
@PATHS
def test_rows_that_see_nothing_are_zero_and_finite(aligned: bool, sinks: jax.Array | None):
    query, key, value, output_gradient = arrays(12)
    named = tokens(12, segments=True)
    padding = np.asarray(named["query_segment_ids"]) == 0

    def inner(query, key, value, sinks, output_gradient):
        out = dot_product_attention(query, key, value, scale=SCALE, aligned=aligned, sinks=sinks, **named)
        return jnp.sum(out * output_gradient), out

    differentiate = jax.jit(jax.value_and_grad(inner, (0, 1, 2, 3), has_aux=True))
    (_, out), (*gradients, sink_gradient) = differentiate(query, key, value, sinks, output_gradient)
    assert (np.asarray(out)[padding] == 0.0).all()
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        assert (np.asarray(gradient)[padding] == 0.0).all()
    if sinks is not None:
        unpadded = jnp.where(padding[..., None, None], 0.0, output_gradient)
        np.testing.assert_array_equal(sink_gradient, differentiate(query, key, value, sinks, unpadded)[1][3])


@PATHS
def test_a_sink_of_minus_infinity_changes_nothing(aligned: bool):
    query, key, value, _ = arrays(12)
    attend = jax.jit(functools.partial(dot_product_attention, scale=SCALE, aligned=aligned))
    named = tokens(12, segments=True)
    got = attend(query, key, value, sinks=jnp.full(HEADS, -jnp.inf), **named)
    np.testing.assert_array_equal(got, attend(query, key, value, **named))


@pytest.mark.parametrize("options", [{}, {"chunk": 3}, {"chunk": 6, "window": 4, "sinks": sink_logits()}])
@pytest.mark.parametrize("value_dim", [HEAD_DIM, 5])
def test_decoding_ignores_empty_cache_slots(options: dict, value_dim: int):
    query, key, value, _ = arrays(9, value_dim=value_dim)
    cache = [jnp.pad(array, [(0, 0), (0, 7), (0, 0), (0, 0)], constant_values=9.0) for array in (key, value)]
    slots = jnp.tile(jnp.arange(16, dtype=jnp.int32), (BATCH, 1))
    named = {
        "query_positions": slots[:, 7:9],
        "key_positions": jnp.where(slots < 9, slots, 0),
        "query_segment_ids": jnp.ones((BATCH, 2), jnp.int32),
        "key_segment_ids": (slots < 9).astype(jnp.int32),
    }
    attend = jax.jit(functools.partial(dot_product_attention, scale=SCALE, **options))
    got = attend(query[:, 7:9], *cache, **named)
    np.testing.assert_allclose(got, reference(query, key, value, tokens(9), **options)[:, 7:9], atol=2e-6)


@PATHS
def test_bfloat16_accumulates_in_float32(aligned: bool):
    query, key, value, output_gradient = arrays(29, jnp.bfloat16)
    named, sinks = tokens(29), sink_logits(jnp.bfloat16)

    def inner(query, key, value, sinks):
        out = dot_product_attention(query, key, value, scale=SCALE, aligned=aligned, sinks=sinks, **named)
        return jnp.sum((out * output_gradient).astype(jnp.float32)), out

    differentiate = jax.jit(jax.value_and_grad(inner, (0, 1, 2, 3), has_aux=True))
    (_, out), gradients = differentiate(query, key, value, sinks)
    assert out.dtype == jnp.bfloat16
    assert all(gradient.dtype == jnp.bfloat16 for gradient in gradients)
    expected = reference(query, key, value, named, sinks=sinks)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=0.02)


@pytest.mark.parametrize("options", [{"window": 16}, {"chunk": 16}, {"chunk": 16, "window": 90}])
def test_blocks_of_keys_out_of_reach_are_skipped(options: dict):
    query, key, value, _ = arrays(128)

    def flops(**options) -> float:
        attend = functools.partial(dot_product_attention, scale=SCALE, aligned=True, **tokens(128), **options)
        return jax.jit(attend).lower(query, key, value).cost_analysis()["flops"]

    # A block of 8 queries needs 23 keys at most, of 64 in the mean.
    assert flops(**options) < 0.5 * flops()


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


def test_uneven_heads_half_given_segments_and_odd_sinks_are_refused():
    query, key, value, _ = arrays(4)
    with pytest.raises(ValueError, match="share"):
        dot_product_attention(query[:, :, :3], key, value, scale=SCALE, **tokens(4))
    named = tokens(4, segments=True)
    del named["key_segment_ids"]
    with pytest.raises(ValueError, match="both or neither"):
        dot_product_attention(query, key, value, scale=SCALE, **named)
    for sinks in (jnp.zeros(KV_HEADS), jnp.zeros((HEADS, 1))):
        with pytest.raises(ValueError, match="one logit per query head"):
            dot_product_attention(query, key, value, scale=SCALE, sinks=sinks, **tokens(4))
