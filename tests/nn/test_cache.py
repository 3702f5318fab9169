import functools

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
from tests.nn.layers import filled, run

ALL_FORMS = [(dtype, axis) for dtype in ("int8", "int4") for axis in ("dkv", "heads_and_dkv")]
FORMS = pytest.mark.parametrize("form", ALL_FORMS)
# By what is masked; attention to floats is then one program for all forms.
ATTEND = {
    name: jax.jit(functools.partial(attend_cache, scale=0.3, **masks))
    for name, masks in {
        "plain": {},
        "window": {"window": 3, "soft_cap": 1.5},
        "chunk": {"chunk": 4, "sinks": np.arange(4, dtype=np.float32)},
    }.items()
}


def rounded(form):
    dtype, axis = form
    return ("quantize_kvcache=true", f"kv_quant_dtype={dtype}", f"kv_quant_axis={axis}")


@jax.jit
def numbers(slots):
    """What was written, as near as its form allows."""
    return as_written(read_slots(slots, jnp.dtype("float32")), slots)


write = jax.jit(write_slots)


def empty_of(form, tiny_config, shape):
    """Empty slots of a form; its zeros are numpy's."""
    empty = jax.eval_shape(lambda: empty_slots(shape, tiny_config(*rounded(form)).compute))
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), empty)


def test_slots_are_written_at_the_index():
    found = write(np.zeros((2, 5, 3), jnp.bfloat16), np.ones((2, 2, 3), np.float32), np.int32(2))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found)[:, :, 0], [[0, 0, 1, 1, 0]] * 2)


@FORMS
def test_rounded_slots_are_written_at_the_index(form, tiny_config):
    empty = empty_of(form, tiny_config, (2, 5, 3, 4))
    new = np.random.default_rng(0).normal(size=(2, 2, 3, 4)).astype(np.float32)
    found = write(write(empty, new, np.int32(1)), -new, np.int32(2))
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


def test_empty_slots_hold_zeros(tiny_config):
    for form in (("int8", "dkv"), ("int4", "heads_and_dkv")):
        empty = empty_slots((2, 5, 3, 4), tiny_config(*rounded(form)).compute)
        assert not np.asarray(empty.codes).any() and not np.asarray(empty.scale).any()


@pytest.mark.parametrize(
    ("form", "masks"),
    [
        *((form, "plain") for form in ALL_FORMS),
        *((form, name) for form in ALL_FORMS[1:3] for name in ("window", "chunk")),
    ],
)
def test_attention_to_rounded_slots_is_attention_to_the_numbers_in_them(form, masks, tiny_config):
    random = np.random.default_rng(1)
    # Tokens and heads of different sizes, by which a scale of another one would be seen.
    sizes = random.uniform(0.2, 4.0, size=(2, 7, 2, 1))
    query = random.normal(size=(2, 3, 4, 8)).astype(np.float32)
    empty = empty_of(form, tiny_config, (2, 9, 2, 8))
    key, value = (write(empty, (random.normal(size=(2, 7, 2, 8)) * sizes).astype(np.float32), 0) for _ in range(2))
    positions = np.broadcast_to(np.arange(9, dtype=np.int32), (2, 9))
    segments = (positions < 7).astype(np.int32)
    context = AttentionContext(positions[:, 4:7], segments[:, 4:7], positions, segments, {}, np.int32(4))
    found = ATTEND[masks](query, key, value, context)
    expected = ATTEND[masks](query, numbers(key), numbers(value), context)
    np.testing.assert_allclose(found, expected, atol=5e-6)


@FORMS
def test_a_layer_keeps_the_form_of_its_cache(form, tiny_config):
    config, spec = tiny_config(*rounded(form)), LayerSpec("nope", "dense")
    attention = filled(Attention(spec, config.model, config.compute, rngs=None), width=0.125)
    empty = jax.eval_shape(lambda: Attention.init_cache(spec, config.model, config.compute, 2, 6))
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), empty)
    positions = np.broadcast_to(np.arange(6, dtype=np.int32), (2, 6))
    context = AttentionContext(positions, positions * 0 + 1, positions, positions * 0 + 1, {}, np.int32(0))
    x = np.random.default_rng(0).normal(size=(2, 6, 64)).astype(np.float32)
    found, cache = run(attention, x, context, zeros)
    assert isinstance(cache, LayerCache)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), cache) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), empty
    )
    exact = np.asarray(run(attention, x, context, None)[0])
    assert 0 < np.abs(found - exact).mean() < (0.02 if form[0] == "int8" else 0.3) * np.abs(exact).mean()


def test_tokens_are_noted_and_the_index_moves():
    note = jax.jit(write_tokens)
    slots = np.zeros((2, 4), np.int32)
    cache = Cache({}, slots, slots, np.int32(0))
    cache = note(cache, np.array([[0, 1], [0, 0]]), np.array([[1, 1], [0, 1]]))
    cache = note(cache, np.array([[2], [1]]), np.array([[1], [1]]))
    assert int(cache.index) == 3 and cache.index.dtype == jnp.int32
    np.testing.assert_array_equal(cache.positions, [[0, 1, 2, 0], [0, 0, 1, 0]])
    np.testing.assert_array_equal(cache.segment_ids, [[1, 1, 1, 0], [0, 1, 1, 0]])
