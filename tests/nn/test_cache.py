import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.config.layers import LayerSpec
from maxlite.nn.attention import Attention, AttentionContext, attend_cache
from maxlite.nn.cache import (
    Cache,
    LayerCache,
    as_stored,
    as_written,
    empty_slots,
    read_slots,
    write_slots,
    write_tokens,
)
from maxlite.ops.kv_quantization import RoundedSlots

FORMS = pytest.mark.parametrize(
    "form", [(dtype, axis) for dtype in ("int8", "int4") for axis in ("dkv", "heads_and_dkv")]
)


def rounded(form):
    dtype, axis = form
    return ("quantize_kvcache=true", f"kv_quant_dtype={dtype}", f"kv_quant_axis={axis}")


def numbers(slots):
    """What was written, as near as its form allows."""
    return as_written(read_slots(slots, jnp.dtype("float32")), slots)


def test_slots_are_written_at_the_index():
    stored = jnp.zeros((2, 5, 3), jnp.bfloat16)
    found = write_slots(stored, jnp.ones((2, 2, 3)), jnp.int32(2))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found[:, :, 0], [[0, 0, 1, 1, 0]] * 2)


@FORMS
def test_rounded_slots_are_written_at_the_index(form, tiny_config):
    empty = empty_slots((2, 5, 3, 4), tiny_config(*rounded(form)).compute)
    new = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 3, 4)))
    found = write_slots(write_slots(empty, new, jnp.int32(1)), -new, jnp.int32(2))
    assert isinstance(found, RoundedSlots)
    written = np.zeros((2, 5, 3, 4))
    written[:, 1:3], written[:, 2:4] = new, -new
    np.testing.assert_allclose(numbers(found), written, atol=0.02 if form[0] == "int8" else 0.3)
    assert (np.asarray(found.scale)[:, [0, 4]] == 0).all() and (np.asarray(found.scale)[:, 1:4] > 0).all()


def test_slots_are_floats_unless_asked(tiny_config):
    slots = empty_slots((2, 5, 3, 4), tiny_config("dtype=bfloat16").compute)
    assert isinstance(slots, jax.Array) and slots.dtype == jnp.bfloat16 and slots.shape == (2, 5, 3, 4)
    assert read_slots(slots, jnp.dtype("bfloat16")) is slots
    assert as_stored(slots, slots) is slots and as_written(slots, slots) is slots


@FORMS
@pytest.mark.parametrize("masks", [{}, {"window": 3, "soft_cap": 1.5}, {"chunk": 4, "sinks": jnp.arange(4.0)}])
def test_attention_to_rounded_slots_is_attention_to_the_numbers_in_them(form, masks, tiny_config):
    random, compute = np.random.default_rng(1), tiny_config(*rounded(form)).compute
    # Tokens and heads of different sizes, by which a scale of another one would be seen.
    sizes = random.uniform(0.2, 4.0, size=(2, 7, 2, 1))
    query = jnp.asarray(random.normal(size=(2, 3, 4, 8)), jnp.float32)
    key, value = (
        write_slots(empty_slots((2, 9, 2, 8), compute), jnp.asarray(random.normal(size=(2, 7, 2, 8)) * sizes), 0)
        for _ in range(2)
    )
    positions = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (2, 9))
    segments = (positions < 7).astype(jnp.int32)
    context = AttentionContext(positions[:, 4:7], segments[:, 4:7], positions, segments, {}, jnp.int32(4))
    found = attend_cache(query, key, value, context, scale=0.3, **masks)
    expected = attend_cache(query, numbers(key), numbers(value), context, scale=0.3, **masks)
    np.testing.assert_allclose(found, expected, atol=5e-6)


@FORMS
def test_a_layer_keeps_the_form_of_its_cache(form, tiny_config, rngs):
    config = tiny_config(*rounded(form))
    attention = Attention(LayerSpec("nope", "dense"), config.model, config.compute, rngs=rngs)
    empty = Attention.init_cache(LayerSpec("nope", "dense"), config.model, config.compute, 2, 6)
    positions = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (2, 6))
    context = AttentionContext(positions, positions * 0 + 1, positions, positions * 0 + 1, {}, jnp.int32(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 64)), jnp.float32)
    found, cache = attention(x, context, empty)
    assert isinstance(cache, LayerCache)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), cache) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), empty
    )
    exact, _ = attention(x, context, None)
    assert 0 < np.abs(found - exact).mean() < (0.02 if form[0] == "int8" else 0.3) * np.abs(exact).mean()


def test_tokens_are_noted_and_the_index_moves():
    slots = jnp.zeros((2, 4), jnp.int32)
    cache = Cache({}, slots, slots, jnp.int32(0))
    cache = write_tokens(cache, jnp.array([[0, 1], [0, 0]]), jnp.array([[1, 1], [0, 1]]))
    cache = write_tokens(cache, jnp.array([[2], [1]]), jnp.array([[1], [1]]))
    assert int(cache.index) == 3 and cache.index.dtype == jnp.int32
    np.testing.assert_array_equal(cache.positions, [[0, 1, 2, 0], [0, 0, 1, 0]])
    np.testing.assert_array_equal(cache.segment_ids, [[1, 1, 1, 0], [0, 1, 1, 0]])
