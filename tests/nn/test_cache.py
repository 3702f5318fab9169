import jax.numpy as jnp
import numpy as np

from maxlite.nn.cache import Cache, write_slots, write_tokens


def test_slots_are_written_at_the_index():
    stored = jnp.zeros((2, 5, 3), jnp.bfloat16)
    found = write_slots(stored, jnp.ones((2, 2, 3)), jnp.int32(2))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found[:, :, 0], [[0, 0, 1, 1, 0]] * 2)


def test_tokens_are_noted_and_the_index_moves():
    slots = jnp.zeros((2, 4), jnp.int32)
    cache = Cache({}, slots, slots, jnp.int32(0))
    cache = write_tokens(cache, jnp.array([[0, 1], [0, 0]]), jnp.array([[1, 1], [0, 1]]))
    cache = write_tokens(cache, jnp.array([[2], [1]]), jnp.array([[1], [1]]))
    assert int(cache.index) == 3 and cache.index.dtype == jnp.int32
    np.testing.assert_array_equal(cache.positions, [[0, 1, 2, 0], [0, 0, 1, 0]])
    np.testing.assert_array_equal(cache.segment_ids, [[1, 1, 1, 0], [0, 1, 1, 0]])
