"""GPTQ on plain matrices: against another implementation, and on inputs of all kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwix._src.core import qarray
from qwix.contrib import gptq_core

from maxlite.ops.stored import codes_for, unpack
from maxlite.quantize.gptq_rounding import gptq_codes
from tests.quantize.two_models import round_kernel

# One shape where the shape does not matter, so that programs serve several tests.
ROWS, COLUMNS = 64, 24


@jax.jit
def nearest_codes(matrix, scale):
    return unpack(codes_for(matrix, scale, (0,), "int4"), (0,), "int4")


def correlated_inputs(num_tokens: int, size: int, seed: int = 0) -> np.ndarray:
    """[tokens, size], each input a mixture of a few causes, in the order of falling squares."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_tokens, size // 4)) @ rng.normal(size=(size // 4, size))
    x = (x + 0.1 * rng.normal(size=x.shape)) * np.geomspace(4, 0.5, size)
    return np.float32(x[:, np.argsort(-np.square(x).sum(axis=0))])


def values_of(codes, scale: np.ndarray) -> np.ndarray:
    size = -(-codes.shape[0] // scale.shape[0])
    return np.asarray(codes, np.float32) * np.repeat(np.asarray(scale), size, axis=0)[: codes.shape[0]]


def lost(x: np.ndarray, matrix: np.ndarray, rounded: np.ndarray) -> float:
    """The part of the products that rounding changed."""
    return float(np.linalg.norm(x @ (rounded - matrix)) / np.linalg.norm(x @ matrix))


@pytest.mark.parametrize(("size", "tile"), [(64, None), (160, 16), (136, 50)])
def test_it_loses_less_than_rounding_to_nearest_where_inputs_are_correlated(size, tile):
    x = correlated_inputs(4 * size, size)
    matrix = np.random.default_rng(1).normal(size=(size, COLUMNS)).astype(np.float32)
    _, scale = round_kernel(matrix, (0,), "int4", tile)
    codes = np.asarray(gptq_codes(jnp.asarray(matrix), scale, jnp.asarray(x.T @ x)))
    assert codes.dtype == np.int8 and codes.min() >= -8 and codes.max() <= 7
    before = lost(x, matrix, values_of(nearest_codes(matrix, scale), scale))
    assert lost(x, matrix, values_of(codes, scale)) < 0.6 * before


@pytest.mark.slow
def test_the_codes_are_those_of_another_implementation():
    x = correlated_inputs(128, 24)
    matrix = np.random.default_rng(2).normal(size=(24, 6)).astype(np.float32)
    how = qarray.HowToQuantize(qtype=jnp.int4, channelwise_axes=[0], tiled_axes={1: 12}, calibration_method="absmax")
    theirs, _ = gptq_core.quantize_weight(jnp.asarray(matrix.T), jnp.asarray(x.T @ x), how)
    scale = np.abs(matrix.reshape(2, 12, 6)).max(axis=1) / 7.5
    for block in (128, 8):
        ours = gptq_codes(jnp.asarray(matrix), jnp.asarray(scale), jnp.asarray(x.T @ x), block)
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs.qvalue, np.int8).T)


def test_inputs_may_come_in_any_order():
    x = correlated_inputs(4 * ROWS, ROWS)
    matrix = np.random.default_rng(3).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    scale = jnp.asarray(np.abs(matrix).max(axis=0, keepdims=True) / 7.5)
    order = np.random.default_rng(4).permutation(ROWS)
    straight = np.asarray(gptq_codes(jnp.asarray(matrix), scale, jnp.asarray(x.T @ x)))
    mixed = gptq_codes(jnp.asarray(matrix[order]), scale, jnp.asarray((x.T @ x)[order][:, order]))
    np.testing.assert_array_equal(np.asarray(mixed), straight[order])


def test_inputs_that_say_nothing_of_each_other_leave_the_nearest():
    matrix = jnp.asarray(np.random.default_rng(5).normal(size=(ROWS, COLUMNS)), jnp.float32)
    # No element lies between two levels, as the largest does by a scale of its own.
    scale = round_kernel(matrix, (0,), "int4", None)[1] * 1.03
    for products in (np.zeros((ROWS, ROWS), np.float32), np.diag(np.arange(ROWS, dtype=np.float32))):
        np.testing.assert_array_equal(gptq_codes(matrix, scale, jnp.asarray(products)), nearest_codes(matrix, scale))


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_inputs_of_a_single_token_are_no_trouble(size):
    x = np.float32(size) * np.random.default_rng(6).normal(size=(1, ROWS)).astype(np.float32)
    matrix = np.random.default_rng(7).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    _, scale = round_kernel(matrix, (0,), "int4", None)
    found = gptq_codes(jnp.asarray(matrix), scale, jnp.asarray(x.T @ x))
    nearest = nearest_codes(matrix, scale)
    assert lost(x, matrix, values_of(found, scale)) < 0.1 * lost(x, matrix, values_of(nearest, scale))


def test_codes_of_scales_too_small_stop_at_their_ends():
    matrix = jnp.asarray(np.random.default_rng(8).normal(size=(ROWS, COLUMNS)), jnp.float32)
    scale = jnp.asarray(np.full((1, COLUMNS), 0.01, np.float32))
    codes = gptq_codes(matrix, scale, jnp.asarray(np.eye(ROWS, dtype=np.float32)))
    np.testing.assert_array_equal(codes, nearest_codes(matrix, scale))
