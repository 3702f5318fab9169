"""Mixing and rounding of cached numbers against the same in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import hadamard

from maxlite.ops.kv_quantization import (
    RoundedSlots,
    empty_rounded_slots,
    integers,
    mixed,
    mixed_numbers,
    round_as,
    unmixed,
)

SHAPE = (2, 5, 3, 8)
LARGEST = {"int8": 127.0, "int4": 7.4999}
WAYS = pytest.mark.parametrize(
    ("dtype", "axis"), [(dtype, axis) for dtype in LARGEST for axis in ("dkv", "heads_and_dkv")]
)


def numbers(seed=0):
    """Heads of very different sizes; one token is nothing but zeros."""
    made = np.random.default_rng(seed).normal(size=SHAPE) * np.array([1.0, 30.0, 0.01])[:, None]
    made[1, 2] = 0.0
    return made.astype(np.float32)


def expected_codes(values, dtype, axis):
    """Integers and scales of [B, S, K, H], written out."""
    values = np.asarray(mixed(jnp.asarray(values)))
    shared = (3,) if axis == "dkv" else (2, 3)
    scale = np.abs(values).max(shared, keepdims=True) / np.float32(LARGEST[dtype])
    end = {"int8": 128, "int4": 8}[dtype]
    codes = np.clip(np.rint(values / np.where(scale == 0, 1, scale)), -end, end - 1)
    return codes.astype(int), scale


@WAYS
def test_numbers_equal_those_rounded_by_numpy(dtype, axis):
    values = numbers()
    empty = empty_rounded_slots(SHAPE, dtype, axis)
    slots = round_as(empty, jnp.asarray(values))
    assert [leaf.shape for leaf in slots] == [leaf.shape for leaf in empty]
    assert [leaf.dtype for leaf in slots] == [leaf.dtype for leaf in empty]
    codes, scale = expected_codes(values, dtype, axis)
    # A quotient may be off by its last bit.
    np.testing.assert_allclose(slots.scale, scale, rtol=1.2e-7)
    stored = np.asarray(slots.codes)
    if dtype == "int4":
        np.testing.assert_array_equal(stored, codes[..., 0::2] % 16 + 16 * (codes[..., 1::2] % 16))
    else:
        np.testing.assert_array_equal(stored, codes)
    np.testing.assert_array_equal(integers(slots, jnp.dtype("bfloat16")).astype(np.float32), codes)
    np.testing.assert_array_equal(
        mixed_numbers(slots, jnp.dtype("float32")), np.float32(codes * np.asarray(slots.scale))
    )


@WAYS
def test_no_number_is_off_by_more_than_half_a_step(dtype, axis):
    for seed in range(5):
        values = numbers(seed)
        slots = round_as(empty_rounded_slots(SHAPE, dtype, axis), jnp.asarray(values))
        found = mixed_numbers(slots, jnp.dtype("float32"))
        error = np.abs(np.float64(found) - mixed(jnp.asarray(values)))
        # Beyond half a step only by what float32 makes of it.
        assert (error <= np.asarray(slots.scale) * (0.5 + 1e-5)).all()
        assert (error[np.broadcast_to(slots.scale, SHAPE) == 0] == 0).all()
        # Unmixed, the errors of a head are as large in sum.
        apart = np.float64(unmixed(found)) - values
        np.testing.assert_allclose(np.sum(apart**2, -1), np.sum(error**2, -1), rtol=1e-2, atol=1e-9)


@pytest.mark.parametrize("size", [8, 64, 128])
def test_powers_of_two_are_mixed_by_sylvesters_matrix(size):
    values = np.random.default_rng(0).normal(size=(3, size))
    np.testing.assert_allclose(mixed(jnp.asarray(values)), values @ hadamard(size) / np.sqrt(size), atol=1e-5)


@pytest.mark.parametrize("size", [1, 6, 7, 64, 80, 96])
def test_mixing_keeps_products_and_spreads_what_is_large(size):
    one, other = (np.random.default_rng(seed).normal(size=(4, size)).astype(np.float32) for seed in (0, 1))
    together = np.concatenate([one, other, np.eye(size, dtype=np.float32)])
    made, back = jax.jit(lambda values: (mixed(values), unmixed(mixed(values))))(together)
    made = np.asarray(made)
    np.testing.assert_allclose(np.sum(made[:4] * made[4:8], -1), np.sum(one * other, -1), atol=2e-5)
    np.testing.assert_allclose(back, together, atol=1e-5)
    assert np.abs(made[8:]).max() <= np.sqrt(2 / size) * 1.0001 or size == 1


def test_one_large_feature_costs_the_others_little():
    values = np.random.default_rng(0).normal(size=(1, 50, 1, 64)).astype(np.float32)
    values[..., 3] = 40.0
    slots = round_as(empty_rounded_slots(values.shape, "int4", "dkv"), jnp.asarray(values))
    error = np.asarray(unmixed(mixed_numbers(slots, jnp.dtype("float32")))) - values
    plain_step = 40.0 / 7.4999
    plain = values - np.rint(values / plain_step) * plain_step
    assert np.mean(error**2) < 0.1 * np.mean(plain**2)


@pytest.mark.parametrize(
    ("dtype", "axis", "size"),
    [
        ("int8", "dkv", 8 + 4),
        ("int8", "heads_and_dkv", 8 + 4 / 3),
        ("int4", "dkv", 4 + 4),
        ("int4", "heads_and_dkv", 4 + 4 / 3),
    ],
)
def test_bytes_of_a_token_and_head(dtype, axis, size):
    found = sum(leaf.nbytes for leaf in empty_rounded_slots(SHAPE, dtype, axis)) / (2 * 5 * 3)
    assert found == pytest.approx(size)


def test_numbers_of_another_count_of_tokens_and_dtype():
    empty = empty_rounded_slots((2, 9, 6), "int8", "heads_and_dkv")
    values = jnp.asarray(numbers()[:, :1, :, 0].repeat(2, -1), jnp.bfloat16)
    slots = round_as(empty, values)
    assert isinstance(slots, RoundedSlots) and slots.codes.shape == (2, 1, 6) and slots.scale.shape == (2, 1, 1)
    assert np.abs(np.asarray(slots.codes)).max() == 127
    assert mixed_numbers(slots, jnp.dtype("bfloat16")).dtype == jnp.bfloat16
