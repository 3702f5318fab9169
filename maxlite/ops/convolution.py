"""Short causal convolutions, each feature by itself, that stop where a document begins; and where documents begin."""

import jax
import jax.numpy as jnp


def document_numbers(segment_ids: jax.Array) -> jax.Array:
    """Numbers the documents of a row from 0, in order; padding (segment 0) belongs to the document before it.

    segment_ids: [B, T] int32. Returns: [B, T] int32.
    """
    begins = (segment_ids[:, 1:] != segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
    return jnp.pad(jnp.cumsum(begins.astype(jnp.int32), axis=1), ((0, 0), (1, 0)))


def causal_convolution(x: jax.Array, kernel: jax.Array, documents: jax.Array, history: jax.Array) -> jax.Array:
    """Each token's feature is the sum of the last W tokens', its own with the last weight.

    x: [B, T, ...]; kernel: [W, ...]. documents: [B, T] int32, as of `document_numbers`.
    history: [B, W-1, ...], the tokens before x, of document 0; zeros if there are none.
    Returns: as x, in float32.
    """
    width, length = kernel.shape[0], x.shape[1]
    before = jnp.concatenate([history.astype(x.dtype), x], axis=1)
    documents_before = jnp.pad(documents, ((0, 0), (width - 1, 0)))
    ones = (1,) * (x.ndim - 2)
    total = jnp.zeros(x.shape, jnp.float32)
    for tap in range(width):
        same = documents_before[:, tap : tap + length] == documents
        part = before[:, tap : tap + length].astype(jnp.float32) * kernel[tap].astype(jnp.float32)
        total = total + jnp.where(same.reshape(*same.shape, *ones), part, 0.0)
    return total


def next_history(x: jax.Array, history: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns the history that follows on x, of whose rows only the first `counts` [B] tokens are no padding.

    x: [B, T, ...]; history, and what is returned: [B, W-1, ...].
    """
    before = jnp.concatenate([history, x.astype(history.dtype)], axis=1)
    places = counts[:, None] + jnp.arange(history.shape[1])
    return jnp.take_along_axis(before, places.reshape(*places.shape, *(1,) * (x.ndim - 2)), axis=1)
