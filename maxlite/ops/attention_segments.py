"""Chunks as segments, for kernels that know of segments alone."""

import jax
import jax.numpy as jnp

from maxlite.ops.attention_types import Tokens


def num_segments(length: int, chunk: int | None) -> int:
    """How many segments rows of `length` tokens may have after `chunk_segments`, padding's 0 included."""
    return (length + 1) * _chunks_of_segment(length, chunk)


def chunk_segments(tokens: Tokens, chunk: int | None, length: int) -> jax.Array | None:
    """Segments whose tokens are of one segment and of one chunk of positions; 0 stays padding.

    tokens: positions and segment_ids [B, T]. length: tokens of the whole row, of which these may be a part.
    Returns: [B, T] int32 below num_segments(length, chunk), or None if there is one segment only.
    """
    if chunk is None:
        return tokens.segment_ids
    # A segment's chunks are consecutive, so that their numbers stay different modulo the most there can be.
    chunks = _chunks_of_segment(length, chunk)
    chunk_ids = tokens.positions // chunk % chunks
    if tokens.segment_ids is None:
        return chunk_ids + chunks
    return jnp.where(tokens.segment_ids == 0, 0, tokens.segment_ids * chunks + chunk_ids)


def _chunks_of_segment(length: int, chunk: int | None) -> int:
    """The most chunks that the tokens of one segment may fall into."""
    return 1 if chunk is None else (length - 2) // chunk + 2
