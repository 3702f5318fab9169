"""The splash kernel, interpreted on the CPU, against a naive softmax; its tables; what TPUs' compiler makes of it."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask, splash_attention_mask_info
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlite.ops import splash_attention as module
from maxlite.ops.attention_types import AttentionOptions, QueryShard, Tokens
from maxlite.ops.splash_attention import splash_attention
from maxlite.parallel.topology import build_topology

BATCH, HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 4, 2, 24, 16
PLAIN = AttentionOptions(HEAD_DIM**-0.5, window=None, chunk=None, soft_cap=None)
EVERYTHING = AttentionOptions(HEAD_DIM**-0.5, window=40, chunk=50, soft_cap=1.5)


class Inputs(NamedTuple):
    """What is differentiated: query, key, value and sinks."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    sinks: jax.Array | None


def inputs(length: int, sinks: bool = False, dtype: jnp.dtype = jnp.float32) -> Inputs:
    generator = np.random.default_rng(length)
    shapes = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM))
    arrays = [generator.normal(size=(BATCH, length, *shape)).astype(dtype) for shape in shapes]
    # The last sink is far above every score.
    return Inputs(*arrays, np.array([0.7, -1.3, 2.0, 20.0], np.float32) if sinks else None)


def tokens(length: int, segments: bool) -> Tokens:
    """Row 0 packs two documents and padding, row 1 holds one document; positions start again with each."""
    positions, segment_ids = np.tile(np.arange(length), (BATCH, 1)), np.ones((BATCH, length), int)
    if segments:
        cut, end = length // 3, length - length // 4
        positions[0, cut:] -= cut
        segment_ids[0, cut:], segment_ids[0, end:] = 2, 0
    ids = segment_ids.astype(np.int32) if segments else None
    return Tokens(np.arange(length, dtype=np.int32), positions.astype(np.int32), ids)


def naive_attention(options: AttentionOptions, given: Inputs, of: Tokens) -> jax.Array:
    """All scores at once, of repeated keys."""
    query, key, value, sinks = given
    key, value = (jnp.repeat(array, HEADS // KV_HEADS, axis=2) for array in (key, value))
    scores = jnp.einsum("bqnh,bknh->bnqk", query, key, precision="highest") * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    positions = of.positions
    seen = np.tile(of.order[:, None] >= of.order, (BATCH, 1, 1))
    if options.window is not None:
        seen &= of.order[:, None] - of.order < options.window
    if options.chunk is not None:
        seen &= positions[:, :, None] // options.chunk == positions[:, None] // options.chunk
    if of.segment_ids is not None:
        seen &= (of.segment_ids[:, :, None] == of.segment_ids[:, None]) & (of.segment_ids[:, :, None] > 0)
    weights = jnp.exp(scores) * seen[:, None]
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else jnp.exp(sinks)[None, :, None, None])
    weights = weights / jnp.where(total == 0, 1, total)
    return jnp.einsum("bnqk,bknh->bqnh", weights, value, precision="highest")


def value_and_gradients(function, given: Inputs) -> tuple[jax.Array, Inputs]:
    """The output, and the gradients of a sum of it in which every element has a weight of its own."""

    def weighted(given):
        out = function(given)
        weights = np.cos(np.arange(out.size, dtype=np.float32)).reshape(out.shape)
        return jnp.sum(out.astype(jnp.float32) * weights), out

    gradients, out = jax.jit(jax.grad(weighted, has_aux=True))(given)
    return out, gradients


def assert_close(got, wanted, tolerance: float = 2e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, wanted)


# The interpreter is slow, so that one case has all there is.
@pytest.mark.parametrize(
    ("options", "segments", "sinks"),
    [
        pytest.param(EVERYTHING, True, True, id="everything"),
        pytest.param(PLAIN, False, False, id="causal", marks=pytest.mark.slow),
        pytest.param(PLAIN._replace(window=40), False, True, id="window and sinks", marks=pytest.mark.slow),
        pytest.param(PLAIN._replace(chunk=50), False, False, id="chunk", marks=pytest.mark.slow),
        pytest.param(PLAIN._replace(soft_cap=1.5), True, False, id="soft cap and segments", marks=pytest.mark.slow),
    ],
)
def test_equals_the_naive_softmax_with_gradients(options, segments, sinks):
    length = 200  # not a multiple of a tile
    of, given = tokens(length, segments), inputs(length, sinks)

    def attention(given):
        return splash_attention(options, *given[:3], of, of, given.sinks, interpret=True)

    got = value_and_gradients(attention, given)
    assert_close(got, value_and_gradients(lambda given: naive_attention(options, given, of), given))
    if segments:
        assert not got[0][0, length - length // 4 :].any()


@pytest.mark.slow
def test_bfloat16_keeps_float32_scores():
    of, given = tokens(128, True), inputs(128, dtype=jnp.bfloat16)
    got = splash_attention(PLAIN, *given[:3], of, of, None, interpret=True)
    wide = jax.tree.map(lambda array: array.astype(jnp.float32), given)
    assert got.dtype == jnp.bfloat16
    assert_close(got.astype(jnp.float32), naive_attention(PLAIN, wide, of), 0.02)


@pytest.mark.parametrize(
    ("options", "balanced"),
    [(PLAIN._replace(window=90), True), pytest.param(PLAIN._replace(chunk=50), False, marks=pytest.mark.slow)],
)
def test_every_shard_of_the_queries_has_its_part(options, balanced):
    """Shards of the queries, in the balanced order or not, against the keys of whole rows."""
    length, shards = 288, 2
    chunks = np.arange(length, dtype=np.int32).reshape(2 * shards, -1)
    places = [(0, 3), (1, 2)] if balanced else [(0, 1), (2, 3)]
    orders = np.stack([np.concatenate([chunks[place] for place in pair]) for pair in places])
    of, given = tokens(length, True), inputs(length)

    def attention(given):
        def shard(index):
            rows = jnp.asarray(orders)[index]
            return splash_attention(
                options,
                given.query[:, rows],
                *given[1:3],
                Tokens(None, *(jnp.asarray(array)[:, rows] for array in of[1:])),
                of,
                None,
                shard=QueryShard(orders, index),
                interpret=True,
            )

        parts = jax.lax.map(shard, jnp.arange(shards)).swapaxes(0, 1)
        return parts.reshape(BATCH, length, HEADS, VALUE_DIM)[:, np.argsort(orders.reshape(-1))]

    wanted = value_and_gradients(lambda given: naive_attention(options, given, of), given)
    assert_close(value_and_gradients(attention, given), wanted)


def test_queries_of_all_shards_are_the_keys():
    of, given = tokens(128, True), inputs(128)
    with pytest.raises(ValueError, match="64 queries in all shards together, but 128 keys"):
        splash_attention(PLAIN, given.query[:, :64], *given[1:3], of, of, None)


@pytest.mark.parametrize("reach", [None, 100, 300])
def test_tables_visit_the_tiles_that_the_library_visits(reach):
    length, block = 1024, 128
    orders = np.arange(length, dtype=np.int32)[None]
    kernel = module._build_kernel(PLAIN._replace(window=reach), orders, module._Blocks(block, block), True)
    window = (None if reach is None else reach - 1, 0)
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.LocalMask((length, length), window, 0)])
    theirs = splash_attention_mask_info.process_mask(mask, (block, block))[0]
    theirs_backward = splash_attention_mask_info.process_mask_dkv(mask, (block, block))[0]
    for ours, wanted in ((kernel.fwd_mask_info, theirs), (kernel.dkv_mask_info, theirs_backward)):
        assert ours.data_next[0].shape == wanted.data_next.shape and ours.data_next.dtype == wanted.data_next.dtype
        axis = 1 if wanted is theirs_backward else 2
        for row in range(length // block):
            visits = [
                sorted(np.take(info.data_next.reshape(wanted.data_next.shape), row, 3 - axis)[
                    np.take(info.block_mask.reshape(wanted.data_next.shape), row, 3 - axis) > 0
                ])
                for info in (ours, wanted)
            ]  # fmt: skip
            assert visits[0] == visits[1], row


def test_tiles_fit_the_row():
    sizes = {1: 128, 200: 128, 512: 512, 640: 128, 700: 256, 4096: 512, 4224: 512, 5000: 512}
    assert {length: module._block(length) for length in sizes} == sizes


@pytest.fixture
def tpu_devices():
    pytest.importorskip("libtpu", reason="libtpu, the compiler for TPUs, is not installed")
    return build_topology("v5e-4", 1).devices


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("options", "head_dim", "value_dim", "sinks"),
    [
        (AttentionOptions(192**-0.5, None, None, None), 192, 128, False),
        (AttentionOptions(0.125, 300, 400, 30.0), 64, 64, True),
    ],
    ids=["latent attention", "everything"],
)
def test_compiles_for_tpus_without_a_square_buffer(tpu_devices, options, head_dim, value_dim, sinks):
    length, heads, kv_heads = 1536, 8, 4
    mesh = Mesh(np.array(tpu_devices).reshape(2, 2), ("data", "tensor"))
    rows, whole = PartitionSpec("data", None, "tensor"), PartitionSpec("data")
    specs = (rows, rows, rows, whole, whole, PartitionSpec("tensor"))
    shapes = [(2, length, heads, head_dim), (2, length, kv_heads, head_dim), (2, length, kv_heads, value_dim)]
    shapes += [(2, length), (2, length), (heads,)]
    dtypes = [jnp.bfloat16] * 3 + [jnp.int32] * 2 + [jnp.float32]
    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in zip(shapes, dtypes, specs, strict=True)
    ]

    def local(query, key, value, positions, segment_ids, sink_logits):
        of = Tokens(None, positions, segment_ids)
        return splash_attention(options, query, key, value, of, of, sink_logits if sinks else None)

    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
    # As the policy saves the context and its logsumexp, the forward kernel is not run again: three calls in all.
    policy = jax.checkpoint_policies.save_only_these_names("context")
    loss = jax.grad(
        jax.checkpoint(lambda *given: sharded(*given).astype(jnp.float32).sum(), policy=policy), (0, 1, 2, 5)
    )
    program = jax.jit(loss).lower(*arguments).compile().as_text()
    assert program.count('custom_call_target="tpu_custom_call"') == 3
    assert not re.search(rf"\[(\d+,)*{length},{length}\]", program)
