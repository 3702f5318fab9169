"""Attention: every way against a float64 reference, gradients against a naive softmax, masks, empty rows, meshes."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxlite.config.schema import LogicalAxisRules
from maxlite.ops import attention, flash_attention
from maxlite.ops.attention import dot_product_attention, self_attention
from maxlite.ops.attention_types import ContextParallel
from maxlite.ops.context_parallel import balanced_order
from maxlite.ops.splash_attention import splash_attention
from maxlite.parallel.sharding import use_mesh

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
# Against given keys; and a row's own, by the kernels that run on CPUs.
WAYS = pytest.mark.parametrize("way", ["given_keys", "dot_product", "blockwise"])


def attention_of(way: str) -> Callable[..., jax.Array]:
    """dot_product_attention, or self_attention by a kernel with the same arguments."""
    if way == "given_keys":
        return dot_product_attention

    def attend(query, key, value, *, query_positions, query_segment_ids=None, sinks=None, **options):
        options = {name: option for name, option in options.items() if not name.startswith("key_")}
        tokens = {"positions": query_positions, "segment_ids": query_segment_ids}
        return self_attention(query, key, value, sinks=sinks, kernel=way, **tokens, **options)

    return attend


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
def small_tiles(monkeypatch: pytest.MonkeyPatch):
    """Tiles of 8 tokens, so that short rows have several."""
    monkeypatch.setattr(flash_attention, "TILE", 8)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("length", [1, 29])
@WAYS
def test_matches_the_definition(case: dict, length: int, way: str):
    options, named, (query, key, value, _) = split(case, length)
    sinks = sinks_of(case)
    attend = jax.jit(functools.partial(attention_of(way), scale=SCALE, **options))
    got = attend(query, key, value, sinks=sinks, **named)
    np.testing.assert_allclose(got, reference(query, key, value, named, sinks=sinks, **options), atol=2e-6)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@WAYS
def test_gradients_match_a_naive_softmax(case: dict, way: str):
    options, named, (*inputs, output_gradient) = split(case, 29)
    inputs.append(sinks_of(case))
    attend = functools.partial(attention_of(way), scale=SCALE, **named, **options)

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
    attend = functools.partial(attention_of("blockwise"), scale=SCALE, **named, **options)

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
@WAYS
def test_rows_that_see_nothing_are_zero_and_finite(way: str, sinks: jax.Array | None):
    query, key, value, output_gradient = arrays(12)
    named = tokens(12, segments=True)
    padding = np.asarray(named["query_segment_ids"]) == 0

    def inner(query, key, value, sinks, output_gradient):
        out = attention_of(way)(query, key, value, scale=SCALE, sinks=sinks, **named)
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


@WAYS
def test_a_sink_of_minus_infinity_changes_nothing(way: str):
    query, key, value, _ = arrays(12)
    attend = jax.jit(functools.partial(attention_of(way), scale=SCALE))
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


@WAYS
def test_bfloat16_accumulates_in_float32(way: str):
    query, key, value, output_gradient = arrays(29, jnp.bfloat16)
    named, sinks = tokens(29), sink_logits(jnp.bfloat16)

    def inner(query, key, value, sinks):
        out = attention_of(way)(query, key, value, scale=SCALE, sinks=sinks, **named)
        return jnp.sum((out * output_gradient).astype(jnp.float32)), out

    differentiate = jax.jit(jax.value_and_grad(inner, (0, 1, 2, 3), has_aux=True))
    (_, out), gradients = differentiate(query, key, value, sinks)
    assert out.dtype == jnp.bfloat16
    assert all(gradient.dtype == jnp.bfloat16 for gradient in gradients)
    expected = reference(query, key, value, named, sinks=sinks)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=0.02)


def test_a_policy_that_saves_context_computes_the_scores_once_more_only():
    inputs = arrays(29)[:3]
    policy = jax.checkpoint_policies.save_only_these_names("context")

    def inner(query, key, value):
        attended = attention_of("blockwise")(query, key, value, scale=SCALE, **tokens(29))
        return jnp.sum(jnp.sin(attended))

    def matmuls(function) -> int:
        return jax.jit(jax.value_and_grad(function, (0, 1, 2))).lower(*inputs).as_text().count("dot_general")

    # Two matmuls forward and five backward, each in a loop; without the policy the forward's two come again.
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


@pytest.mark.parametrize("kernel", ["dot_product", "blockwise", "splash"])
def test_documents_do_not_depend_on_their_neighbours(kernel: str, monkeypatch: pytest.MonkeyPatch):
    interpreted = attention._without_groups(functools.partial(splash_attention, interpret=True))
    monkeypatch.setattr(attention, "KERNELS", {**attention.KERNELS, "splash": interpreted})
    lengths, row = (5, 9, 7), 32
    query, key, value, _ = (np.array(array) for array in arrays(row))
    positions, segment_ids = np.zeros((BATCH, row), np.int32), np.zeros((BATCH, row), np.int32)
    starts = np.cumsum((0, *lengths))
    for number, (start, length) in enumerate(zip(starts[:-1], lengths, strict=True)):
        positions[:, start : start + length] = np.arange(length)
        segment_ids[:, start : start + length] = number + 1
    attend = jax.jit(functools.partial(self_attention, scale=SCALE, kernel=kernel))
    packed = np.asarray(attend(query, key, value, positions=positions, segment_ids=segment_ids))
    assert (packed[:, starts[-1] :] == 0).all()
    for start, length in zip(starts[:-1], lengths, strict=True):
        document = slice(start, start + length)
        given = {"positions": positions[:, document], "segment_ids": np.ones((BATCH, length), np.int32)}
        alone = attend(query[:, document], key[:, document], value[:, document], **given)
        np.testing.assert_allclose(packed[:, document], alone, atol=1e-5)
    key[:, 2], value[:, 2] = 5.0, -5.0
    changed = np.asarray(attend(query, key, value, positions=positions, segment_ids=segment_ids))
    assert np.abs(changed - packed)[:, 2:5].max() > 0.1
    np.testing.assert_array_equal(changed[:, 5:], packed[:, 5:])


def on_mesh(shape: dict[str, int], rules: LogicalAxisRules, way: ContextParallel | None, kernel: str) -> None:
    """Compares everything's output and gradients on a mesh of fake devices with those of one device."""
    options, named, (*inputs, output_gradient) = split(EVERYTHING, 32)
    named = {"positions": named["query_positions"], "segment_ids": named["query_segment_ids"]}
    mesh = Mesh(np.array(jax.devices()[: np.prod([*shape.values()])]).reshape(*shape.values()), tuple(shape))
    balances = way is not None and way.load_balance
    order = balanced_order(32, shape["context"]) if balances else np.arange(32)

    def attend(query, key, value, sinks, order):
        rows = {name: array[:, order] for name, array in named.items()}
        arrays = (array[:, order] for array in (query, key, value))
        out = self_attention(*arrays, sinks=sinks, scale=SCALE, kernel=kernel, context_parallel=way, **rows, **options)
        return jnp.sum(out * output_gradient[:, order]), out

    differentiate = jax.jit(jax.value_and_grad(attend, (0, 1, 2, 3), has_aux=True))
    (_, expected), expected_gradients = differentiate(*inputs, sink_logits(), np.arange(32))
    with use_mesh(mesh, rules):
        differentiate = jax.jit(jax.value_and_grad(attend, (0, 1, 2, 3), has_aux=True))
        (_, out), gradients = differentiate(*inputs, sink_logits(), order)
    np.testing.assert_allclose(out, expected[:, order], atol=2e-6)
    for one, other in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("kernel", ["dot_product", "blockwise"])
@pytest.mark.parametrize("way", [None, ContextParallel("all_gather", True)], ids=["whole rows", "cut rows"])
def test_a_mesh_changes_nothing(kernel: str, way: ContextParallel | None):
    shape = {"data": 2, "tensor": 2, "context": 1 if way is None else 2}
    rules = (("batch", ("data",)), ("length", ("context",)), ("activation_heads", ("tensor",)))
    on_mesh(shape, (*rules, ("activation_kv_heads", ("tensor",))), way, kernel)


def test_key_heads_that_are_not_cut_follow_their_query_heads():
    on_mesh({"tensor": 4}, (("activation_heads", ("tensor",)), ("activation_kv_heads", ())), None, "blockwise")


def test_rows_that_a_mesh_cannot_cut_are_refused():
    query, key, value, _ = arrays(9)
    named = {"positions": tokens(9)["query_positions"], "segment_ids": None}
    with use_mesh(Mesh(np.array(jax.devices()[:2]), ("context",)), (("length", ("context",)),)):
        with pytest.raises(ValueError, match="9 tokens"):
            self_attention(query, key, value, scale=SCALE, kernel="blockwise", **named)
