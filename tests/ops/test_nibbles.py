import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.ops.nibbles import pack_nibbles, unpack_nibbles


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_neighbours_share_a_byte(axis):
    values = np.random.default_rng(0).integers(-8, 8, (4, 6, 2), dtype=np.int8)
    packed = pack_nibbles(jnp.asarray(values), axis)
    pairs = np.moveaxis(values.astype(int), axis, -1)
    expected = np.moveaxis((pairs[..., 0::2] % 16) + 16 * (pairs[..., 1::2] % 16), -1, axis)
    assert packed.dtype == jnp.uint8
    np.testing.assert_array_equal(packed, expected)
    found = unpack_nibbles(packed, axis)
    assert found.dtype == jnp.int8
    np.testing.assert_array_equal(found, values)


def test_every_byte_is_two_numbers():
    values = jnp.arange(256, dtype=jnp.int32).astype(jnp.uint8)
    found = np.asarray(unpack_nibbles(values, 0)).reshape(256, 2)
    assert sorted(map(tuple, found.tolist())) == [(low, high) for low in range(-8, 8) for high in range(-8, 8)]
    np.testing.assert_array_equal(pack_nibbles(unpack_nibbles(values, 0), 0), values)


def test_numbers_without_a_sign():
    values = jnp.arange(16, dtype=jnp.uint8)[None]
    np.testing.assert_array_equal(unpack_nibbles(pack_nibbles(values, 1), 1) & 15, values)


def test_unpacking_joins_no_halves():
    text = jax.jit(lambda packed: unpack_nibbles(packed, 1)).lower(jnp.zeros((2, 4), jnp.uint8)).as_text()
    assert "concatenate" not in text
