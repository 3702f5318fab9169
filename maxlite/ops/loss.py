"""Cross entropy from final hidden states, tiled over the tokens so that the logits never exist all at once."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlite.ops.soft_cap import soft_capped
from maxlite.ops.vocabulary_split import Split, plan_split
from maxlite.parallel.sharding import axis_size, cutting_axes, live_axes, per_device

# How the arguments and the gradients lie on a mesh.
_HIDDEN_AXES = ("batch", "norm_length", None)
_TOKEN_AXES = ("batch", "norm_length")
_MATRIX_AXES = ("embed", "vocab")


class _Options(NamedTuple):
    """Static numbers of the loss; hashable, so that one custom_vjp serves every setting."""

    num_tiles: int
    z_loss_multiplier: float
    soft_cap: float | None
    num_sources: int | None

    @property
    def loss_shape(self) -> tuple[int, ...]:
        """Of the summed cross entropy: a scalar, or one number a source."""
        return () if self.num_sources is None else (self.num_sources,)


class _Tile(NamedTuple):
    """Tokens of one tile: x [B, T, D], the others [B, T]; of all tiles, with a leading dimension.

    B counts the rows of all devices whose tokens this one serves.
    """

    x: jax.Array
    targets: jax.Array
    weights: jax.Array
    source_ids: jax.Array | None


# Targets, weights and source ids of all tokens, each [B, T].
_Tokens = tuple[jax.Array, jax.Array, jax.Array | None]


def chunked_cross_entropy(
    x: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    num_tiles: int,
    z_loss_multiplier: float = 0.0,
    soft_cap: float | None = None,
    source_ids: jax.Array | None = None,
    num_sources: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Weighted cross entropy and z-loss (PaLM, arXiv:2204.02311, section 5), summed over all tokens.

    One device has at most the float32 logits of one of `num_tiles` parts of its tokens at once, forward and backward:
    the gradients are computed with the forward (three matmuls in all, no recomputation). Without differentiation no
    gradient is computed. The gradient is that of loss + z-loss; only x and unembedding get one. On a mesh the devices
    share the tokens and the vocabulary as ops/vocabulary_split.py says, and none has all of the unembedding's gradient
    unless it has few tokens to compute.

    x: [B, T, D] final hidden states.
    unembedding: [D, V].
    targets: [B, T] int32, the token to predict at each position.
    weights: [B, T] float32, 0 for padding.
    num_tiles: into how many parts a device's share of T is cut; a remainder is padded with weight 0.
    z_loss_multiplier: factor of the squared logsumexp.
    soft_cap: bounds the logits to (-soft_cap, soft_cap) by tanh (Gemma 2, arXiv:2408.00118).
    source_ids: [B, T] int32 below num_sources, where the loss of each source is wanted; both or neither.
    Returns: (loss, z_loss), float32: sum of weight * (logsumexp - logit of the target), a scalar or [num_sources], and
        the scalar z_loss_multiplier * sum of weight * logsumexp^2. The first carries the gradient of both when all
        their cotangents are equal; see `_backward`.
    """
    if num_tiles < 1:
        raise ValueError(f"num_tiles must be at least 1, not {num_tiles}")
    if (source_ids is None) != (num_sources is None):
        raise ValueError("source_ids and num_sources go together")
    options = _Options(num_tiles, float(z_loss_multiplier), soft_cap, num_sources)
    return _tiled_loss(options, x, unembedding, (targets, weights.astype(jnp.float32), source_ids))


def _tile_loss(
    options: _Options, split: Split, tile: _Tile, kernel: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], jax.Array, jax.Array, jax.Array]:
    """Of one tile, kernel [D, V]: (loss, z_loss), logits [B, T, V] after the cap, logsumexp [B, T], targets among V."""
    logits = jnp.einsum("BTD,DV->BTV", tile.x, kernel, preferred_element_type=jnp.float32)
    logits = soft_capped(logits, options.soft_cap)
    maximum = split.max_columns(jnp.max(logits, axis=-1))
    total = split.sum_columns(jnp.sum(jnp.exp(logits - maximum[..., None]), axis=-1))
    normalizer = jnp.log(total) + maximum
    places = tile.targets - split.first_column(logits.shape[-1])
    picked = jnp.take_along_axis(logits, places[..., None], axis=-1, mode="clip")[..., 0]
    # A target among the columns of another device is picked there.
    picked = split.sum_columns(jnp.where((places >= 0) & (places < logits.shape[-1]), picked, 0.0))
    loss = _sum_by_source(options, tile.weights * (normalizer - picked), tile.source_ids)
    z_loss = options.z_loss_multiplier * jnp.sum(tile.weights * normalizer**2)
    return (loss, z_loss), logits, normalizer, places


def _sum_by_source(options: _Options, losses: jax.Array, source_ids: jax.Array | None) -> jax.Array:
    """losses [B, T] -> their sum, or [num_sources]."""
    if options.num_sources is None or source_ids is None:
        return jnp.sum(losses)
    is_of = source_ids == jnp.arange(options.num_sources, dtype=jnp.int32)[:, None, None]
    return jnp.sum(jnp.where(is_of, losses, 0.0), axis=(1, 2))


def _logits_gradient(
    options: _Options, logits: jax.Array, normalizer: jax.Array, places: jax.Array, weights: jax.Array
) -> jax.Array:
    """Gradient of loss + z_loss for the logits before the soft cap: [B, T, V] float32."""
    softmax_factor = weights * (1.0 + 2.0 * options.z_loss_multiplier * normalizer)
    is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == places[..., None]
    gradient = jnp.exp(logits - normalizer[..., None]) * softmax_factor[..., None]
    gradient = gradient - jnp.where(is_target, weights[..., None], 0.0)
    if options.soft_cap is not None:
        gradient = gradient * (1.0 - (logits / options.soft_cap) ** 2)
    return gradient


def _plan(x: jax.Array, part: jax.Array, kernel: jax.Array) -> Split:
    """How the devices share the work: x [B, T, D] of all of them, `part` of x and `kernel` of this one."""
    # Mesh axes of the batch do not cut the length, even where they do not divide the batch (`per_device`).
    of_batch = live_axes("batch")
    length_axes = tuple(axis for axis in cutting_axes("norm_length", x.shape[1]) if axis not in of_batch)
    batch_axes = cutting_axes("batch", x.shape[0])
    parts = tuple(whole // own for whole, own in zip(x.shape[:2], part.shape[:2], strict=True))
    assert parts == (axis_size(batch_axes), axis_size(length_axes)), f"{parts} parts: {batch_axes}, {length_axes}"
    matrix_axes = live_axes("embed")
    return plan_split(
        part.shape[0] * part.shape[1],
        kernel.shape[1],
        matrix_axes=matrix_axes,
        column_axes=[axis for axis in live_axes("vocab") if axis not in matrix_axes],
        token_axes=(*batch_axes, *length_axes),
    )


def _tiles(options: _Options, split: Split, tokens: _Tile) -> _Tile:
    """This device's tokens, x [B, T, D] and the others [B, T] -> tiles: x of its own, the others of all it serves."""
    length = tokens.x.shape[1]
    count = min(options.num_tiles, length)
    width = -(-length // count)

    def cut(array: jax.Array) -> jax.Array:
        padding = [(0, 0), (0, width * count - length)] + [(0, 0)] * (array.ndim - 2)
        parts = jnp.pad(array, padding).reshape(array.shape[0], count, width, *array.shape[2:])
        return jnp.moveaxis(parts, 1, 0)

    def served(array: jax.Array) -> jax.Array:
        return split.gather(cut(array), axis=1)

    sources = None if tokens.source_ids is None else served(tokens.source_ids)
    return _Tile(cut(tokens.x), served(tokens.targets), served(tokens.weights), sources)


def _argument_axes(tokens: _Tokens) -> tuple:
    return (_HIDDEN_AXES, _MATRIX_AXES, *(None if part is None else _TOKEN_AXES for part in tokens))


def _loss_axes(options: _Options) -> tuple[tuple[None, ...], tuple[None, ...]]:
    return (None,) * len(options.loss_shape), ()


def _from_tiles(tiles: jax.Array, length: int) -> jax.Array:
    """[tiles, B, T / tiles, D] -> [B, T, D], without the padding of T."""
    whole = jnp.moveaxis(tiles, 0, 1)
    return whole.reshape(whole.shape[0], -1, whole.shape[3])[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled_loss(
    options: _Options, x: jax.Array, unembedding: jax.Array, tokens: _Tokens
) -> tuple[jax.Array, jax.Array]:
    """(loss, z_loss) without gradients: what evaluation runs."""

    def run(part: jax.Array, kernel: jax.Array, *own: jax.Array) -> tuple[jax.Array, jax.Array]:
        split = _plan(x, part, kernel)
        kernel = split.matrix(kernel.astype(x.dtype))

        def add_tile(sums: tuple[jax.Array, jax.Array], tile: _Tile) -> tuple[tuple, None]:
            tile = tile._replace(x=split.gather(tile.x))
            (loss, z_loss), *_ = _tile_loss(options, split, tile, kernel)
            return (sums[0] + loss, sums[1] + z_loss), None

        zeros = jnp.zeros(options.loss_shape, jnp.float32), jnp.zeros((), jnp.float32)
        sums, _ = jax.lax.scan(add_tile, zeros, _tiles(options, split, _Tile(part, *own)))
        return split.sum_tokens(sums[0]), split.sum_tokens(sums[1])

    return per_device(run, _argument_axes(tokens), _loss_axes(options))(x, unembedding, *tokens)


def _forward(
    options: _Options, x: jax.Array, unembedding: jax.Array, tokens: _Tokens
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    """Loss and, while each tile's logits are at hand, the gradients: x's in its dtype, the unembedding's in float32."""

    def run(part: jax.Array, kernel: jax.Array, *own: jax.Array) -> tuple[jax.Array, ...]:
        split = _plan(x, part, kernel)
        kernel = split.matrix(kernel.astype(x.dtype))

        def add_tile(sums: tuple[jax.Array, ...], tile: _Tile) -> tuple[tuple, jax.Array]:
            tile = tile._replace(x=split.gather(tile.x))
            (loss, z_loss), logits, normalizer, places = _tile_loss(options, split, tile, kernel)
            gradient = _logits_gradient(options, logits, normalizer, places, tile.weights).astype(x.dtype)
            x_gradient = jnp.einsum("BTV,DV->BTD", gradient, kernel, preferred_element_type=jnp.float32)
            kernel_gradient = jnp.einsum("BTD,BTV->DV", tile.x, gradient, preferred_element_type=jnp.float32)
            sums = (sums[0] + loss, sums[1] + z_loss, sums[2] + kernel_gradient)
            return sums, split.scatter(x_gradient.astype(x.dtype))

        shapes = (options.loss_shape, (), kernel.shape)
        initial = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
        sums, x_gradient = jax.lax.scan(add_tile, initial, _tiles(options, split, _Tile(part, *own)))
        return (
            split.sum_tokens(sums[0]),
            split.sum_tokens(sums[1]),
            _from_tiles(x_gradient, part.shape[1]),
            split.matrix_gradient(sums[2]),
        )

    mapped = per_device(run, _argument_axes(tokens), (*_loss_axes(options), _HIDDEN_AXES, _MATRIX_AXES))
    loss, z_loss, x_gradient, kernel_gradient = mapped(x, unembedding, *tokens)
    # An empty array carries the unembedding's dtype to the backward pass: residuals must be arrays.
    return (loss, z_loss), (x_gradient, kernel_gradient, jnp.zeros((0,), unembedding.dtype))


def _backward(
    options: _Options, residuals: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None]:
    """Scale the stored gradients of loss + z_loss by the loss's cotangent; a second pair for z_loss is not kept."""
    x_gradient, kernel_gradient, like_unembedding = residuals
    scale = cotangents[0] if options.num_sources is None else cotangents[0][0]
    x_gradient = (x_gradient.astype(jnp.float32) * scale).astype(x_gradient.dtype)
    return x_gradient, (kernel_gradient * scale).astype(like_unembedding.dtype), None


_tiled_loss.defvjp(_forward, _backward)
