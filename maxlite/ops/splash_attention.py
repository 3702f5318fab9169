"""Attention on TPUs by the splash kernel of Pallas: tiles that no query may see are never fetched.

The kernel is told which tiles to visit by tables of integers. They are made here from the order of the queries, so that
a device of context parallelism, whose queries are some part of the row in any order, gets tables of its own.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
    DEFAULT_MASK_VALUE,
    BlockSizes,
    SegmentIds,
    SplashAttentionKernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from maxlite.ops.attention_segments import chunk_segments
from maxlite.ops.attention_types import AttentionOptions, QueryShard, Tokens

# The kernel's lengths are multiples of a lane. Larger blocks are faster, but a row must be padded to whole blocks.
LANE = 128
BLOCKS = (512, 256)
# A larger block is taken if it adds no more than this part of the row as padding.
MOST_PADDING = 1 / 8


class _Blocks(NamedTuple):
    """Queries and keys of a tile."""

    query: int
    key: int


class _SeenKeys(NamedTuple):
    """The mask inside a tile; equal ones are one to the caches of jax."""

    reach: int | None

    def __call__(self, query_order: Any, key_order: Any) -> Any:
        seen = query_order >= key_order
        return seen if self.reach is None else seen & (query_order - key_order < self.reach)


def splash_attention(
    options: AttentionOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_tokens: Tokens,
    key_tokens: Tokens,
    sinks: jax.Array | None,
    shard: QueryShard | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention of whole rows, or of one device's queries to whole rows, on arrays local to a device.

    query, key, value: [B, T, N, H], [B, S, K, H], [B, S, K, Hv], N a multiple of K. sinks: [N].
    query_tokens, key_tokens: their positions and segment_ids. Keys must come in the order of the row, and so must
        queries unless there is a `shard`: tables are made before the program runs, when Tokens.order may be unknown.
    interpret: run on the CPU instead, slowly (tests).
    Returns: [B, T, N, Hv]; zeros for padding. The output and its logsumexp are saved under "context".
    """
    orders = np.arange(query.shape[1], dtype=np.int32)[None] if shard is None else shard.orders
    if orders.size != key.shape[1]:
        raise ValueError(f"{orders.size} queries in all shards together, but {key.shape[1]} keys")
    blocks = _Blocks(_block(query.shape[1]), _block(key.shape[1]))
    kernel = _build_kernel(options, orders, blocks, interpret)
    kernel = jax.tree.map(lambda tables: jnp.asarray(tables)[0 if shard is None else shard.index], kernel)

    query = (query.astype(jnp.float32) * options.scale).astype(query.dtype)
    query_ids, key_ids = (chunk_segments(tokens, options.chunk, orders.size) for tokens in (query_tokens, key_tokens))
    query, query_ids = jax.tree.map(lambda array: _padded(array, blocks.query), (query, query_ids))
    key, value, key_ids = jax.tree.map(lambda array: _padded(array, blocks.key), (key, value, key_ids))
    segment_ids = None if query_ids is None else SegmentIds(query_ids, key_ids)
    heads = (query.swapaxes(1, 2), key.swapaxes(1, 2), value.swapaxes(1, 2))
    context = jax.vmap(lambda q, k, v, ids: kernel(q, k, v, segment_ids=ids, sinks=sinks))(*heads, segment_ids)
    context = context.swapaxes(1, 2)[:, : orders.shape[1]]
    if query_tokens.segment_ids is not None:
        # In the kernel padding sees padding, because a query that sees nothing has no softmax.
        context = jnp.where(query_tokens.segment_ids[:, :, None, None] == 0, 0, context)
    return context


def _block(length: int) -> int:
    """Tokens of a tile for rows of `length` tokens."""
    return next((block for block in BLOCKS if -length % block <= MOST_PADDING * length), LANE)


def _padded(array: jax.Array, block: int) -> jax.Array:
    """Add zeros, so that the length, dimension 1, is a multiple of `block`."""
    padding = -array.shape[1] % block
    return jnp.pad(array, ((0, 0), (0, padding), *((0, 0),) * (array.ndim - 2))) if padding else array


def _build_kernel(
    options: AttentionOptions, orders: np.ndarray, blocks: _Blocks, interpret: bool
) -> SplashAttentionKernel:
    """The kernels of all shards: a tree whose arrays have a leading dimension of the shards."""
    # Not make_splash_mha: its shards are runs of the row, cut by shard_map from outside, and it evaluates its mask tile
    # by tile in Python. Here shards have tokens in any order, and a device inside shard_map picks tables by its index.
    orders_padded = np.pad(orders, ((0, 0), (0, -orders.shape[1] % blocks.query)), mode="edge").astype(np.int32)
    seen = _seen_tiles(orders_padded, orders.size, options.reach, blocks)
    tables = _visits(seen)
    transposed = tuple(table.swapaxes(1, 2) for table in _visits(seen.swapaxes(1, 2)))
    forward, backward = (
        MaskInfo(
            data_next=visited[:, None],
            mask_next=None,
            block_mask=visible[:, None],
            partial_mask_blocks=None,
            q_sequence=orders_padded,
        )
        for visited, visible in (tables, transposed)
    )
    return SplashAttentionKernel(
        forward,
        forward,
        backward,
        block_sizes=BlockSizes(
            block_q=blocks.query,
            block_kv=blocks.key,
            block_q_dkv=blocks.query,
            block_kv_dkv=blocks.key,
            block_q_dq=blocks.query,
            block_kv_dq=blocks.key,
        ),
        is_mqa=False,
        save_residuals=False,
        mask_value=DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=options.soft_cap,
        residual_checkpoint_name="context",
        mask_function=_SeenKeys(options.reach),
        interpret=interpret,
    )


def _seen_tiles(orders: np.ndarray, num_keys: int, reach: int | None, blocks: _Blocks) -> np.ndarray:
    """Which pairs of tiles have anything to see: orders [c, T] -> [c, T / query block, S / key block] bool."""
    last = orders.reshape(*orders.shape[:1], -1, blocks.query, 1)
    first = np.zeros_like(last) if reach is None else last - reach + 1
    starts = np.arange(0, num_keys, blocks.key)
    return np.any((last >= starts) & (first < starts + blocks.key), axis=2)


def _visits(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which tiles each tile visits, step by step, and whether the step counts: [c, n, m] -> two of [c, n, w].

    A tile with fewer than the most takes empty steps first; they name its first visit, which so is fetched early.
    """
    steps = np.argsort(seen, axis=2, kind="stable")[:, :, -max(1, seen.sum(axis=2).max()) :]
    counts = np.take_along_axis(seen, steps, axis=2)
    visited = np.where(counts, steps, seen.argmax(axis=2)[:, :, None])
    # The tables live in the little scalar memory.
    return visited.astype(np.min_scalar_type(-seen.shape[2])), counts.astype(np.int8)
