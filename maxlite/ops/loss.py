"""Cross entropy from final hidden states, tiled over the sequence so that the logits never exist all at once."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class _Options(NamedTuple):
    """Static numbers of the loss; hashable, so that one custom_vjp serves every setting."""

    num_tiles: int
    z_loss_multiplier: float
    soft_cap: float | None


def chunked_cross_entropy(
    x: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    num_tiles: int,
    z_loss_multiplier: float = 0.0,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Weighted cross entropy and z-loss (PaLM, arXiv:2204.02311, section 5), summed over all tokens.

    At most [B, T / num_tiles, V] float32 logits exist at once, forward and backward: the gradients are computed with
    the forward (three matmuls in all, no recomputation). Without differentiation no gradient is computed. The
    gradient is that of loss + z-loss; only x and unembedding get one.

    x: [B, T, D] final hidden states.
    unembedding: [D, V].
    targets: [B, T] int32, the token to predict at each position.
    weights: [B, T] float32, 0 for padding.
    num_tiles: into how many parts T is cut; a remainder is padded with weight 0.
    z_loss_multiplier: factor of the squared logsumexp.
    soft_cap: bounds the logits to (-soft_cap, soft_cap) by tanh (Gemma 2, arXiv:2408.00118).
    Returns: (loss, z_loss), float32 scalars: sum of weight * (logsumexp - logit of the target), and
        z_loss_multiplier * sum of weight * logsumexp^2. The first carries the gradient of both when their cotangents
        are equal; see `_backward`.
    """
    if num_tiles < 1:
        raise ValueError(f"num_tiles must be at least 1, not {num_tiles}")
    options = _Options(min(num_tiles, x.shape[1]), float(z_loss_multiplier), soft_cap)
    return _tiled_loss(options, x, unembedding, targets, weights.astype(jnp.float32))


def _tiles(array: jax.Array, num_tiles: int) -> jax.Array:
    """Cut T into tiles, padded with zeros: [B, T, ...] -> [num_tiles, B, T / num_tiles, ...]."""
    batch, length = array.shape[:2]
    tile = -(-length // num_tiles)
    padding = [(0, 0), (0, tile * num_tiles - length)] + [(0, 0)] * (array.ndim - 2)
    cut = jnp.pad(array, padding).reshape(batch, num_tiles, tile, *array.shape[2:])
    return jnp.moveaxis(cut, 1, 0)


def _tile_loss(
    options: _Options, x: jax.Array, unembedding: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Loss of one tile: (loss, z_loss, logits [B, T, V] after the soft cap, logsumexp [B, T]), all float32."""
    logits = jnp.einsum("BTD,DV->BTV", x, unembedding, preferred_element_type=jnp.float32)
    if options.soft_cap is not None:
        logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    loss = jnp.sum(weights * (normalizer - picked))
    z_loss = options.z_loss_multiplier * jnp.sum(weights * normalizer**2)
    return loss, z_loss, logits, normalizer


def _logits_gradient(
    options: _Options, logits: jax.Array, normalizer: jax.Array, targets: jax.Array, weights: jax.Array
) -> jax.Array:
    """Gradient of loss + z_loss for the logits before the soft cap: [B, T, V] float32."""
    softmax_factor = weights * (1.0 + 2.0 * options.z_loss_multiplier * normalizer)
    is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == targets[..., None]
    gradient = jnp.exp(logits - normalizer[..., None]) * softmax_factor[..., None]
    gradient = gradient - jnp.where(is_target, weights[..., None], 0.0)
    if options.soft_cap is not None:
        gradient = gradient * (1.0 - (logits / options.soft_cap) ** 2)
    return gradient


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled_loss(
    options: _Options, x: jax.Array, unembedding: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(loss, z_loss) without gradients: what evaluation runs."""
    kernel = unembedding.astype(x.dtype)

    def add_tile(sums: tuple[jax.Array, jax.Array], tile: tuple[jax.Array, ...]) -> tuple[tuple, None]:
        tile_x, tile_targets, tile_weights = tile
        loss, z_loss, _, _ = _tile_loss(options, tile_x, kernel, tile_targets, tile_weights)
        return (sums[0] + loss, sums[1] + z_loss), None

    tiles = tuple(_tiles(array, options.num_tiles) for array in (x, targets, weights))
    zero = jnp.zeros((), jnp.float32)
    sums, _ = jax.lax.scan(add_tile, (zero, zero), tiles)
    return sums


def _forward(
    options: _Options, x: jax.Array, unembedding: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    """Loss and, while each tile's logits are at hand, the gradients: x's in its dtype, the unembedding's in float32."""
    kernel = unembedding.astype(x.dtype)

    def add_tile(sums: tuple[jax.Array, ...], tile: tuple[jax.Array, ...]) -> tuple[tuple, jax.Array]:
        tile_x, tile_targets, tile_weights = tile
        loss, z_loss, logits, normalizer = _tile_loss(options, tile_x, kernel, tile_targets, tile_weights)
        gradient = _logits_gradient(options, logits, normalizer, tile_targets, tile_weights).astype(x.dtype)
        x_gradient = jnp.einsum("BTV,DV->BTD", gradient, kernel, preferred_element_type=jnp.float32)
        kernel_gradient = jnp.einsum("BTD,BTV->DV", tile_x, gradient, preferred_element_type=jnp.float32)
        return (sums[0] + loss, sums[1] + z_loss, sums[2] + kernel_gradient), x_gradient.astype(x.dtype)

    tiles = tuple(_tiles(array, options.num_tiles) for array in (x, targets, weights))
    zero = jnp.zeros((), jnp.float32)
    initial = (zero, zero, jnp.zeros(unembedding.shape, jnp.float32))
    (loss, z_loss, kernel_gradient), x_gradient = jax.lax.scan(add_tile, initial, tiles)
    x_gradient = jnp.moveaxis(x_gradient, 0, 1).reshape(x.shape[0], -1, x.shape[2])[:, : x.shape[1]]
    # An empty array carries the unembedding's dtype to the backward pass: residuals must be arrays.
    return (loss, z_loss), (x_gradient, kernel_gradient, jnp.zeros((0,), unembedding.dtype))


def _backward(
    options: _Options, residuals: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None, None]:
    """Scale the stored gradients of loss + z_loss by the loss's cotangent; a second pair for z_loss is not kept."""
    del options
    x_gradient, kernel_gradient, like_unembedding = residuals
    scale = cotangents[0]
    x_gradient = (x_gradient.astype(jnp.float32) * scale).astype(x_gradient.dtype)
    return x_gradient, (kernel_gradient * scale).astype(like_unembedding.dtype), None, None


_tiled_loss.defvjp(_forward, _backward)
