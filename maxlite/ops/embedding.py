"""Vectors of tokens from a table whose rows and features lie on several devices."""

import functools

import jax
import jax.numpy as jnp

from maxlite.parallel.sharding import cutting_axes, live_axes, per_device


def look_up(table: jax.Array, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns a row of the table for each token.

    On a mesh every device looks up its features of the words that it has, for all tokens of the devices that have the
    other features, and sends them there: what moves is the tokens' vectors, and never the table. The partitioner
    would gather the vectors of all tokens on every device as soon as rows are cut over their length.

    table: [V, D]. tokens: [B, T] int32. Returns: [B, T, D] in dtype.
    """
    cut = (*cutting_axes("batch", tokens.shape[0]), *cutting_axes("length", tokens.shape[1]))
    run = functools.partial(_on_each_device, dtype, cut)
    out_axes = ("batch", "length", None)
    return per_device(run, (("vocab", "embed"), ("batch", "length")), out_axes)(table, tokens)


def _on_each_device(dtype: jnp.dtype, cut: tuple[str, ...], table: jax.Array, tokens: jax.Array) -> jax.Array:
    """cut: mesh axes along which the tokens differ."""
    features, words = live_axes("embed"), live_axes("vocab")
    # One leading dimension for each axis whose devices have other features and other tokens, the outermost first.
    shared = [axis for axis in features if axis in cut]
    for axis in reversed(shared):
        tokens = jax.lax.all_gather(tokens, axis)
    # Gathering before the cast reads as many rows as there are tokens, not the whole table.
    x = _rows(table, tokens, words).astype(dtype)
    for axis in reversed(features):
        if axis in cut:
            x = jax.lax.all_to_all(x, axis, shared.index(axis), x.ndim - 1, tiled=True)
        else:
            x = jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)
    x = x.reshape(x.shape[len(shared) :])
    return jax.lax.psum(x, words) if words else x


def _rows(table: jax.Array, tokens: jax.Array, words: tuple[str, ...]) -> jax.Array:
    """Zeros for words that other devices have."""
    if not words:
        return table[tokens]
    tokens = tokens - jax.lax.axis_index(words) * table.shape[0]
    here = (tokens >= 0) & (tokens < table.shape[0])
    return jnp.where(here[..., None], table[jnp.where(here, tokens, 0)], 0)
