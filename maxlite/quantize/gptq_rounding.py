"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): rounds a matrix row by row, each row's error made good by the next."""

import functools

import jax
import jax.numpy as jnp

# Added to the diagonal of the inputs' products, as a share of its mean; ten times as much while that is not enough.
DAMPING = 0.01
LOWEST, HIGHEST = -8, 7


def gptq_codes(matrix: jax.Array, scale: jax.Array, products: jax.Array, block: int = 128) -> jax.Array:
    """Returns int4 codes in int8 [K, N], such that codes * scale gives nearly the same products with the inputs.

    The inputs with the largest squares come first, when all others can still make good what was lost. Scales stay as
    they are given, so that any order of the inputs will do.

    matrix: [K, N], what inputs [tokens, K] are multiplied with.
    scale: [tiles, N] float32, of ceil(K / tiles) rows each, the last tile perhaps of fewer.
    products: [K, K] float32, the sum over tokens of the products of every two inputs.
    block: rows whose errors reach the rows behind them in one matrix product.
    """
    damping = DAMPING
    while True:
        factor, order = _inverse_factor(products, damping)
        if bool(jnp.isfinite(factor).all()):
            return _rounded(matrix, scale, factor, order, block)
        # In float32 the inputs of very few tokens may look as if some were sums of others.
        damping *= 10


@jax.jit
def _inverse_factor(products: jax.Array, damping: float) -> tuple[jax.Array, jax.Array]:
    """Returns U, upper triangular, U^T U = inverse of the damped products in order; and that order of the inputs."""
    squares = jnp.diag(products)
    order = jnp.argsort(-squares)
    mean = jnp.mean(squares)
    added = damping * jnp.where(mean == 0, 1.0, mean)
    ordered = products[order][:, order] + added * jnp.eye(len(order))
    # Backwards, the lower factor of a matrix is the upper one of its inverse, inverted.
    lower = jnp.linalg.cholesky(ordered[::-1, ::-1])
    inverse = jax.scipy.linalg.solve_triangular(lower, jnp.eye(len(order)), lower=True)
    return inverse[::-1, ::-1], order


@functools.partial(jax.jit, static_argnames="block")
def _rounded(matrix: jax.Array, scale: jax.Array, factor: jax.Array, order: jax.Array, block: int) -> jax.Array:
    rows, columns = matrix.shape
    blocks = -(-rows // block)
    size = blocks * block
    padding = size - rows
    tile = -(-rows // scale.shape[0])
    left = jnp.pad(matrix.astype(jnp.float32)[order], ((0, padding), (0, 0)))
    scales = jnp.pad(scale[order // tile], ((0, padding), (0, 0)), constant_values=1.0)
    factor = jnp.pad(factor, ((0, padding), (0, padding))) + jnp.diag(jnp.arange(size) >= rows)

    def round_block(number: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        left, codes = state
        first = number * block
        ahead = jax.lax.dynamic_slice_in_dim(factor, first, block)
        inside = jax.lax.dynamic_slice_in_dim(ahead, first, block, axis=1)
        own_left, own_scales = (jax.lax.dynamic_slice_in_dim(part, first, block) for part in (left, scales))
        own_codes, errors = _rounded_block(own_left, own_scales, inside)
        codes = jax.lax.dynamic_update_slice_in_dim(codes, own_codes, first, axis=0)
        # What it does to rows up to this block's is read by nobody.
        return left - jnp.matmul(ahead.T, errors, precision=jax.lax.Precision.HIGHEST), codes

    nothing = jnp.zeros((size, columns), jnp.int8)
    _, codes = jax.lax.fori_loop(0, blocks, round_block, (left, nothing))
    return jnp.zeros((rows, columns), jnp.int8).at[order].set(codes[:rows])


def _rounded_block(left: jax.Array, scales: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of a block of rows, and the errors that the rows behind them are to make good."""

    def round_row(row: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        left, codes, errors = state
        code = jnp.clip(jnp.round(left[row] / scales[row]), LOWEST, HIGHEST)
        error = (left[row] - code * scales[row]) / factor[row, row]
        left = left - factor[row][:, None] * error
        return left, codes.at[row].set(code.astype(jnp.int8)), errors.at[row].set(error)

    start = (left, jnp.zeros(left.shape, jnp.int8), jnp.zeros_like(left))
    _, codes, errors = jax.lax.fori_loop(0, len(left), round_row, start)
    return codes, errors
