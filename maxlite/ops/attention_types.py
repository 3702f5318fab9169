"""What every attention kernel is told: static options, and the order, position and segment of each token."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Scores of unseen keys, and the floor of a row's maximum: finite, so that a row which sees no key gives exp(-1e29),
# which is 0, where infinities would give NaN.
UNSEEN_SCORE = -1e30
LEAST_MAXIMUM = -1e29


class AttentionOptions(NamedTuple):
    """Static numbers of the attention; hashable, so that one custom_vjp serves every setting.

    scale: factor of the scores, as a rule 1 / sqrt(H).
    window: how many tokens back a query sees, itself included.
    chunk: length of the chunks, in positions, that see themselves only (Llama 4).
    soft_cap: bounds the scores to (-soft_cap, soft_cap) by tanh (Gemma 2, arXiv:2408.00118).
    """

    scale: float
    window: int | None
    chunk: int | None
    soft_cap: float | None

    @property
    def reach(self) -> int | None:
        """How many tokens back, itself included, the farthest key that any query may see lies; None if unbounded."""
        return min((bound for bound in (self.window, self.chunk) if bound is not None), default=None)


class Tokens(NamedTuple):
    """The tokens of a batch of rows, in any order: a query sees keys of its own segment whose order is not after its.

    order: [T] int32, the place of each token in its row, the same for all rows.
    positions: [B, T] int32; only a chunk needs them. Inside a segment they differ from the order by a constant.
    segment_ids: [B, T] int32, None when all tokens are of one segment; 0 is padding.
    """

    order: Any
    positions: Any
    segment_ids: Any

    @classmethod
    def of_rows(cls, length: int, positions: Any, segment_ids: Any) -> "Tokens":
        """Returns whole rows of `length` tokens, in their order."""
        return cls(jnp.arange(length, dtype=jnp.int32), positions, segment_ids)

    def part(self, tokens: slice) -> "Tokens":
        """Returns the same of some tokens only."""
        return Tokens(self.order[tokens], *(None if array is None else array[:, tokens] for array in self[1:]))


class QueryShard(NamedTuple):
    """Which queries of the rows this device has, where the length is sharded.

    orders: [c, T] int32 numpy, the place in its row of every query of each of the c shards.
    index: int32 scalar, which shard this device is, as a rule jax.lax.axis_index.
    """

    orders: np.ndarray
    index: Any


class ContextParallel(NamedTuple):
    """How attention shards the length: "all_gather" or "ring"; whether rows come in the balanced order."""

    strategy: str
    load_balance: bool


def visible(options: AttentionOptions, query: Tokens, key: Tokens) -> jax.Array:
    """Which keys each query sees: [B or 1, T, S] bool. Here an order may also be of each row, [B, T]."""
    query_order, key_order = query.order[..., :, None], key.order[..., None, :]
    seen = key_order <= query_order
    if options.window is not None:
        seen = seen & (key_order > query_order - options.window)
    if options.chunk is not None:
        # As no key comes after its query, this bound is enough; it spares a division for every query and key.
        chunk_starts = query.positions - query.positions % options.chunk
        seen = seen & (key.positions[:, None, :] >= chunk_starts[:, :, None])
    if query.segment_ids is not None:
        # Padding, segment 0, matches nothing.
        query_segment_ids = jnp.where(query.segment_ids == 0, -1, query.segment_ids)
        seen = seen & (query_segment_ids[:, :, None] == key.segment_ids[:, None, :])
    return seen.reshape(-1, *seen.shape[-2:])
