"""Attention on NVIDIA GPUs by cuDNN's flash kernel, through jax.nn.dot_product_attention.

The kernel knows causality and windows, but neither segments nor chunks, and a mask would be a buffer of T x S. So
segments are told by extra features of the heads: the bits of a segment's number, as +a or -a. The product of two codes
is 0 for equal segments and far below every score for others.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.ops.attention_segments import chunk_segments, num_segments
from maxlite.ops.attention_types import AttentionOptions, Tokens

DTYPES = ("bfloat16", "float16")
# The kernel's head sizes are multiples of this, and at most these, on Hopper and later, and before.
HEAD_MULTIPLE = 8
LARGEST_HEAD, LARGEST_HEAD_BEFORE_HOPPER = 256, 128
# How far below its own segment's scores a query finds those of others, at least: exp(-256) is 0. A larger one costs
# precision, as the codes' products are summed up with the score in float32.
SEGMENT_GAP = 256.0


class CudnnArguments(NamedTuple):
    """Arguments of jax.nn.dot_product_attention.

    query, key, value: [B, T, N, H'], [B, S, K, H'], [B, S, K, H'], H' a multiple of HEAD_MULTIPLE.
    local_window_size: how many keys before and after its own a query sees.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    scale: float
    local_window_size: tuple[int, int] | None
    is_causal: bool = True


def cudnn_attention(
    options: AttentionOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_tokens: Tokens,
    key_tokens: Tokens,
    sinks: jax.Array | None,
) -> jax.Array:
    """Causal attention of whole rows, on arrays local to a device; what it lacks, `cudnn_lacks` tells.

    query, key, value: [B, T, N, H], [B, T, K, H], [B, T, K, Hv] bfloat16 or float16, tokens in the order of the row.
    sinks: must be None. Returns: [B, T, N, Hv]; zeros for padding. The output is named "context", but its logsumexp
        stays inside the kernel: a remat policy cannot spare the backward pass the forward kernel.
    """
    lacking = cudnn_lacks(
        options, query.dtype.name, (query.shape[3], value.shape[3]), key.shape[1], sinks=sinks is not None
    )
    assert lacking is None and query.shape[1] == key.shape[1], lacking
    arguments = cudnn_arguments(options, query, key, value, (query_tokens, key_tokens))
    context = jax.nn.dot_product_attention(**arguments._asdict(), implementation="cudnn")
    context = checkpoint_name(context[..., : value.shape[3]], "context")
    if query_tokens.segment_ids is not None:
        # In the kernel padding sees padding.
        context = jnp.where(query_tokens.segment_ids[:, :, None, None] == 0, 0, context)
    return context


def cudnn_lacks(
    options: AttentionOptions,
    dtype: str,
    head_dims: tuple[int, int],
    length: int,
    *,
    sinks: bool,
    largest_head: int = LARGEST_HEAD,
) -> str | None:
    """Returns what the kernel cannot do of what is asked, None if it can do all.

    head_dims: H of queries and keys, Hv of values. length: tokens of a row. Rows are taken to have segments.
    largest_head: LARGEST_HEAD_BEFORE_HOPPER for GPUs of a compute capability below 9.0.
    """
    if dtype not in DTYPES:
        return f"dtype={dtype} (it knows {' and '.join(DTYPES)})"
    if options.soft_cap is not None:
        return "a soft cap of the scores"
    if sinks:
        return "attention sinks"
    size = _head_size(head_dims, length, options.chunk, segments=True)
    if size > largest_head:
        return f"heads of {size} features, segments' included (its largest are {largest_head} on this GPU)"
    return None


def cudnn_arguments(
    options: AttentionOptions, query: jax.Array, key: jax.Array, value: jax.Array, tokens: tuple[Tokens, Tokens]
) -> CudnnArguments:
    """Put segments and chunks into the heads, and make the heads of values as large; tokens: those of query and key."""
    length = key.shape[1]
    query_ids, key_ids = (chunk_segments(part, options.chunk, length) for part in tokens)
    size = _head_size((query.shape[3], value.shape[3]), length, options.chunk, segments=query_ids is not None)
    if query_ids is not None and key_ids is not None:
        bits = _num_bits(length, options.chunk)
        # Two numbers that differ in one bit have a product that is less by 2. Powers of two are exact in every dtype.
        power = math.ceil(math.log2(SEGMENT_GAP / 2 / options.scale))
        of_query, of_key = 2.0 ** (power // 2), 2.0 ** (power - power // 2)
        query = _with_features(query, of_query * _signs(query_ids, bits), of_query)
        key = _with_features(key, of_key * _signs(key_ids, bits), -of_key * bits)
    query, key, value = (
        jnp.pad(array, ((0, 0), (0, 0), (0, 0), (0, size - array.shape[3]))) for array in (query, key, value)
    )
    window = None if options.reach is None else (options.reach - 1, 0)
    return CudnnArguments(query, key, value, options.scale, window)


def _num_bits(length: int, chunk: int | None) -> int:
    return (num_segments(length, chunk) - 1).bit_length()


def _head_size(head_dims: tuple[int, int], length: int, chunk: int | None, *, segments: bool) -> int:
    """Features of a head with its segment's code: H for queries and keys, Hv for values -> H'."""
    code = _num_bits(length, chunk) + 1 if segments else 0
    return -(-max(head_dims[0] + code, head_dims[1]) // HEAD_MULTIPLE) * HEAD_MULTIPLE


def _signs(segment_ids: jax.Array, bits: int) -> jax.Array:
    """[B, T] -> [B, T, 1, bits] float32, +1 and -1 for the bits of each number."""
    return 2.0 * ((segment_ids[:, :, None, None] >> jnp.arange(bits)) & 1).astype(jnp.float32) - 1.0


def _with_features(heads: jax.Array, code: jax.Array, constant: float) -> jax.Array:
    """Append a code [B, T, 1, bits] and a constant to all heads [B, T, N, H]."""
    code = jnp.pad(code, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=constant)
    code = jnp.broadcast_to(code, (*heads.shape[:3], code.shape[3]))
    return jnp.concatenate([heads, code.astype(heads.dtype)], axis=3)
