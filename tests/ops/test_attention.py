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
# Given keys and a row's own by "dot_product" differ in what they call tokens only.
OF_DOT_PRODUCT = ("causal", "segments", "window and segments", "chunk", "sinks and segments", "everything")
EACH = [
    *((way, name) for way in ("given_keys", "blockwise") for name in CASES),
    *(("dot_product", name) for name in OF_DOT_PRODUCT),
]


def attention_of(way: str) -> Callable[..., jax.Array]:
    """dot_product_attention, or self_attention by a kernel with the same arguments."""
    if way == "given_keys":
        return dot_product_attention

    def attend(query, key, value, *, query_positions, query_segment_ids=None, sinks=None, **options):
        options = {name: option for name, option in options.items() if not name.startswith("key_")}
        tokens = {"positions": query_positions, "segment_ids": query_segment_ids}
        return self_attention(query, key, value, sinks=sinks, kernel=way, **tokens, **options)

    return attend


def arrays(length: int, dtype: jnp.dtype = jnp.float32, value_dim: int = HEAD_DIM) -> list[np.ndarray]:
    """Query, key, value and a gradient for the output."""
    generator = np.random.default_rng(length)
    shapes = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, value_dim), (HEADS, value_dim))
    return [generator.normal(size=(BATCH, length, *shape)).astype(dtype) for shape in shapes]


def sink_logits(dtype: jnp.dtype = jnp.float32) -> np.ndarray:
    """One per query head; the last is far above every score."""
    return np.array([0.7, -1.3, 2.0, 20.0]).astype(dtype)


def tokens(length: int, segments: bool = False) -> dict[str, np.ndarray]:
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
    return {name: array.astype(np.int32) for name, array in named.items()}


def visible(named: dict, b: int, t: int, window: int | None, chunk: int | None) -> np.ndarray:
    """Which keys query t of row b sees: [S] bool."""
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


def naive(query, key, value, sinks, seen, soft_cap) -> jax.Array:
    """One dense softmax, whose derivative is left to jax; seen: [B, 1, T, S]."""
    key, value = (jnp.repeat(array, HEADS // KV_HEADS, axis=2) for array in (key, value))
    scores = SCALE * jnp.einsum("btnh,bsnh->bnts", query, key)
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen, scores, -1e30)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    weights = jnp.where(seen, jax.nn.softmax(scores, axis=-1)[..., : key.shape[1]], 0.0)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def split(case: dict, length: int) -> tuple[dict, dict, list[np.ndarray]]:
    """The static options of a case, its tokens, and query, key, value and output gradient."""
    options = {name: option for name, option in case.items() if name in ("window", "chunk", "soft_cap")}
    inputs = arrays(length, value_dim=case.get("value_dim", HEAD_DIM))
    return options, tokens(length, case.get("segments", False)), inputs


def sinks_of(case: dict) -> np.ndarray | None:
    return sink_logits() if "sinks" in case else None


@functools.cache
def differentiate(way: str, name: str) -> Callable:
    """A program: query, key, value, sinks, the output's gradient and tokens give output and gradients."""
    options, _, _ = split(CASES[name], 1)

    def loss(query, key, value, sinks, output_gradient, named):
        out = attention_of(way)(query, key, value, sinks=sinks, scale=SCALE, **named, **options)
        return jnp.sum((out * output_gradient).astype(jnp.float32)), out

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))

    def out_and_gradients(*arguments) -> tuple[np.ndarray, tuple]:
        (_, out), gradients = run(*arguments)
        return out, gradients

    return out_and_gradients


def run_case(way: str, name: str) -> tuple[np.ndarray, tuple]:
    """Output and gradients of 29 tokens."""
    _, named, (*inputs, output_gradient) = split(CASES[name], 29)
    return differentiate(way, name)(*inputs, sinks_of(CASES[name]), output_gradient, named)


@functools.cache
def naive_gradients(soft_cap: float | None) -> Callable:
    def loss(query, key, value, sinks, output_gradient, seen):
        return jnp.sum(naive(query, key, value, sinks, seen, soft_cap) * output_gradient)

    return jax.jit(jax.grad(loss, (0, 1, 2, 3)))


@functools.cache
def expected_of(name: str) -> tuple[np.ndarray, tuple]:
    """What run_case gives, by the definition and by the naive softmax."""
    options, named, (*inputs, output_gradient) = split(CASES[name], 29)
    sinks, soft_cap = sinks_of(CASES[name]), options.get("soft_cap")
    shape, bounds = (BATCH, 29), (options.get("window"), options.get("chunk"))
    seen = np.reshape([visible(named, b, t, *bounds) for b, t in np.ndindex(shape)], (BATCH, 1, 29, 29))
    gradients = naive_gradients(soft_cap)(*inputs, sinks, output_gradient, seen)
    return reference(*inputs, named, sinks=sinks, **options), gradients


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch):
    """Tiles of 8 tokens, so that short rows have several."""
    monkeypatch.setattr(flash_attention, "TILE", 8)


@pytest.mark.parametrize(("way", "name"), EACH)
def test_output_matches_the_definition_and_gradients_a_naive_softmax(way: str, name: str):
    (out, got), (expected_out, expected) = run_case(way, name), expected_of(name)
    np.testing.assert_allclose(out, expected_out, atol=2e-6)
    assert (got[3] is None) == ("sinks" not in CASES[name])
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.abs(other).max() > 1e-3
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("name", ["causal", "sinks and segments", "everything"])
@WAYS
def test_a_row_of_one_token_matches_the_definition(way: str, name: str):
    options, named, (query, key, value, _) = split(CASES[name], 1)
    sinks = sinks_of(CASES[name])
    attend = jax.jit(functools.partial(attention_of(way), scale=SCALE, **options))
    got = attend(query, key, value, sinks=sinks, **named)
    np.testing.assert_allclose(got, reference(query, key, value, named, sinks=sinks, **options), atol=2e-6)


@pytest.mark.parametrize("name", ["window and segments", "everything"])
def test_gradients_match_finite_differences(name: str):
    options, named, (*inputs, output_gradient) = split(CASES[name], 29)
    inputs += [] if sinks_of(CASES[name]) is None else [sinks_of(CASES[name])]
    wide = [np.asarray(array, np.float64) for array in inputs]
    directions = [np.random.default_rng(7).normal(size=array.shape) for array in wide]
    step = 1e-5
    ends = []
    for sign in (1, -1):
        query, key, value, *sinks = (w + sign * step * d for w, d in zip(wide, directions, strict=True))
        ends.append(reference(query, key, value, named, sinks=sinks[0] if sinks else None, **options))
    slope = np.sum((ends[0] - ends[1]) * np.asarray(output_gradient, np.float64)) / (2 * step)
    gradients = jax.tree.leaves(run_case("blockwise", name)[1])
    got = sum(np.sum(np.asarray(g, np.float64) * d) for g, d in zip(gradients, directions, strict=True))
    assert got == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize("name", ["segments", "sinks and segments"])
@WAYS
def test_rows_that_see_nothing_are_zero_and_finite(way: str, name: str):
    _, named, (*inputs, output_gradient) = split(CASES[name], 29)
    padding = named["query_segment_ids"] == 0
    out, (*gradients, sink_gradient) = run_case(way, name)
    assert (np.asarray(out)[padding] == 0.0).all()
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        assert (np.asarray(gradient)[padding] == 0.0).all()
    if "sinks" in CASES[name]:
        unpadded = np.where(padding[..., None, None], np.float32(0), output_gradient)
        again = differentiate(way, name)(*inputs, sink_logits(), unpadded, named)[1]
        np.testing.assert_array_equal(sink_gradient, again[3])


@WAYS
def test_a_sink_of_minus_infinity_changes_nothing(way: str):
    _, named, (*inputs, output_gradient) = split(CASES["segments"], 29)
    without_weight = np.full(HEADS, -np.inf, np.float32)
    got, _ = differentiate(way, "sinks and segments")(*inputs, without_weight, output_gradient, named)
    np.testing.assert_array_equal(got, run_case(way, "segments")[0])


@pytest.mark.parametrize(
    ("options", "value_dim"),
    [({}, 5), ({"chunk": 3}, HEAD_DIM), ({"chunk": 6, "window": 4, "sinks": sink_logits()}, 5)],
    ids=["causal", "chunk", "window and sinks"],
)
def test_decoding_ignores_empty_cache_slots(options: dict, value_dim: int):
    query, key, value, _ = arrays(9, value_dim=value_dim)
    cache = [np.pad(array, [(0, 0), (0, 7), (0, 0), (0, 0)], constant_values=9.0) for array in (key, value)]
    slots = np.tile(np.arange(16, dtype=np.int32), (BATCH, 1))
    named = {
        "query_positions": slots[:, 7:9],
        "key_positions": np.where(slots < 9, slots, 0),
        "query_segment_ids": np.ones((BATCH, 2), np.int32),
        "key_segment_ids": (slots < 9).astype(np.int32),
    }
    attend = jax.jit(functools.partial(dot_product_attention, scale=SCALE, **options))
    got = attend(query[:, 7:9], *cache, **named)
    np.testing.assert_allclose(got, reference(query, key, value, tokens(9), **options)[:, 7:9], atol=2e-6)


@WAYS
def test_bfloat16_accumulates_in_float32(way: str):
    query, key, value, output_gradient = arrays(29, jnp.bfloat16)
    named, sinks = tokens(29), sink_logits(jnp.bfloat16)
    out, gradients = differentiate(way, "sinks")(query, key, value, sinks, output_gradient, named)
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
    for sinks in (np.zeros(KV_HEADS, np.float32), np.zeros((HEADS, 1), np.float32)):
        with pytest.raises(ValueError, match="one logit per query head"):
            dot_product_attention(query, key, value, scale=SCALE, sinks=sinks, **tokens(4))


@pytest.mark.parametrize("kernel", ["dot_product", "blockwise", "splash"])
def test_documents_do_not_depend_on_their_neighbours(kernel: str, monkeypatch: pytest.MonkeyPatch):
    interpreted = attention._without_groups(functools.partial(splash_attention, interpret=True))
    monkeypatch.setattr(attention, "KERNELS", {**attention.KERNELS, "splash": interpreted})
    lengths, row = (5, 9, 7), 32
    query, key, value, _ = arrays(row)
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
        alone = reference(query[:, document], key[:, document], value[:, document], tokens(length))
        np.testing.assert_allclose(packed[:, document], alone, atol=1e-5)
    key[:, 2], value[:, 2] = 5.0, -5.0
    changed = np.asarray(attend(query, key, value, positions=positions, segment_ids=segment_ids))
    assert np.abs(changed - packed)[:, 2:5].max() > 0.1
    np.testing.assert_array_equal(changed[:, 5:], packed[:, 5:])


def everything(kernel: str, way: ContextParallel | None, order: np.ndarray) -> tuple[jax.Array, tuple]:
    """The output and gradients of 32 tokens in this order."""
    options, named, (*inputs, output_gradient) = split(EVERYTHING, 32)
    rows = {"positions": named["query_positions"][:, order], "segment_ids": named["query_segment_ids"][:, order]}
    output_gradient = output_gradient[:, order]

    def attend(query, key, value, sinks):
        arrays = (array[:, order] for array in (query, key, value))
        out = self_attention(*arrays, sinks=sinks, scale=SCALE, kernel=kernel, context_parallel=way, **rows, **options)
        return jnp.sum(out * output_gradient), out

    (_, out), gradients = jax.jit(jax.value_and_grad(attend, (0, 1, 2, 3), has_aux=True))(*inputs, sink_logits())
    return out, gradients


@functools.cache
def on_one_device(kernel: str) -> tuple[jax.Array, tuple]:
    return everything(kernel, None, np.arange(32))


def on_mesh(shape: dict[str, int], rules: LogicalAxisRules, way: ContextParallel | None, kernel: str) -> None:
    """Compares everything's output and gradients on a mesh of fake devices with those of one device."""
    mesh = Mesh(np.array(jax.devices()[: np.prod([*shape.values()])]).reshape(*shape.values()), tuple(shape))
    balances = way is not None and way.load_balance
    order = balanced_order(32, shape["context"]) if balances else np.arange(32)
    expected, expected_gradients = on_one_device(kernel)
    with use_mesh(mesh, rules):
        out, gradients = everything(kernel, way, order)
    np.testing.assert_allclose(out, np.asarray(expected)[:, order], atol=2e-6)
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
