import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlite.config.layers import LayerSpec
from maxlite.nn.attention import AttentionContext
from maxlite.nn.gated_delta_net import DeltaCache, GatedDeltaNet
from tests.nn.layers import filled, in_float64, run

BATCH, LENGTH, DIM, KEYS, GROUPS, KEY_WIDTH, VALUE_WIDTH, TAPS = 2, 9, 16, 2, 3, 5, 4, 3
SPEC = LayerSpec("gated_delta_net", "dense")
SIZES = (
    "attention_pattern=gated_delta_net", f"emb_dim={DIM}", f"gdn_conv_kernel_dim={TAPS}", f"gdn_num_key_heads={KEYS}",
    f"gdn_num_value_heads={KEYS * GROUPS}", f"gdn_key_head_dim={KEY_WIDTH}", f"gdn_value_head_dim={VALUE_WIDTH}",
    "normalization_layer_epsilon=0.3", "norm_scale_offset=1.0",
)  # fmt: skip
# Two documents and padding in the first row, padding on the left in the second.
SEGMENTS = np.asarray([[1, 1, 1, 1, 2, 2, 2, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1]], np.int32)
INPUT = np.random.default_rng(0).normal(size=(BATCH, LENGTH, DIM)).astype(np.float32)


def build(tiny_config, dtype="float32"):
    config = tiny_config(*SIZES, f"dtype={dtype}")
    # Rates as they are at first: decays of zero and one would show nothing.
    rates = np.log([[1, 4, 7], [9, 12, 15]])
    layer = GatedDeltaNet(SPEC, config.model, config.compute, rngs=None)
    return filled(layer, log_rate=rates, step_bias=1.0), config


def context_of(segments):
    positions = np.zeros((BATCH, LENGTH), np.int32)
    return AttentionContext(positions, segments, positions, segments, {}, np.int32(0))


def cache_of(config, number=np.zeros):
    """A cache of numbers that number(shape) makes."""
    empty = jax.eval_shape(lambda: GatedDeltaNet.init_cache(SPEC, config.model, config.compute, BATCH, 99))
    return jax.tree.map(lambda leaf: np.asarray(number(leaf.shape), leaf.dtype), empty)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def reference(weights, x):
    """One document, [T, D] -> [T, D], token by token in float64."""

    def projected(name, x):
        kernel = weights[f"{name}/kernel"]
        return (x @ kernel.reshape(DIM, -1)).reshape(len(x), *kernel.shape[1:])

    def convolved(name):
        y, kernel = projected(name, x), weights[f"{name}_conv/kernel"]
        y = np.concatenate([np.zeros((TAPS - 1, *y.shape[1:])), y])
        y = sum(kernel[tap] * y[tap : tap + len(x)] for tap in range(TAPS))
        return y * sigmoid(y)

    query, key, value = map(convolved, ("query", "key", "value"))
    query, key = (y / np.sqrt((y**2).sum(-1, keepdims=True) + 1e-6) for y in (query, key))
    beta, gate = sigmoid(projected("beta", x)), projected("gate", x)
    decay = np.exp(-np.exp(weights["log_rate"]) * np.log1p(np.exp(projected("step", x) + weights["step_bias"])))
    memory, output = np.zeros((KEYS, GROUPS, KEY_WIDTH, VALUE_WIDTH)), np.zeros(gate.shape)
    for token, head, group in np.ndindex(output.shape[:3]):
        held = memory[head, group] * decay[token, head, group]
        missing = value[token, head, group] - key[token, head] @ held
        held = held + beta[token, head, group] * np.outer(key[token, head], missing)
        output[token, head, group] = query[token, head] @ held / np.sqrt(KEY_WIDTH)
        memory[head, group] = held
    output = output / np.sqrt((output**2).mean(-1, keepdims=True) + 0.3) * weights["norm/scale"]
    output = output * gate * sigmoid(gate)
    return output.reshape(len(x), -1) @ weights["out/kernel"].reshape(-1, DIM)


def by_document(weights, segments):
    expected = np.zeros(INPUT.shape)
    for row in range(BATCH):
        for document in set(segments[row].tolist()) - {0}:
            here = segments[row] == document
            expected[row, here] = reference(weights, INPUT[row, here].astype(float))
    return expected


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one document", "packed"])
def test_layer_is_the_reference_and_documents_do_not_touch(tiny_config, segments):
    layer, _ = build(tiny_config)
    found, cache = run(layer, INPUT, context_of(segments), None)
    segments = np.ones((BATCH, LENGTH), np.int32) if segments is None else segments
    expected = by_document(in_float64(layer), segments)
    assert cache is None and np.abs(expected).max() > 0.3
    np.testing.assert_allclose(np.asarray(found)[segments != 0], expected[segments != 0], atol=2e-5)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("lengths", [(9, 9), (6, 9), (1, 4)])
def test_a_cache_continues_where_padded_prompts_end(tiny_config, lengths):
    """Prompts of unequal lengths, in parts of 4 and 5 tokens and padded on the right; then token by token."""
    layer, config = build(tiny_config)
    whole = np.asarray(run(layer, INPUT, context_of(None), None)[0])
    cache = cache_of(config)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), cache)
    real = np.arange(LENGTH) < np.asarray(lengths)[:, None]
    for start, stop in ((0, 4), (4, 9)):
        part = np.where(real[:, start:stop, None], INPUT[:, start:stop], np.float32(7))
        found, cache = run(layer, part, context_of(real[:, start:stop].astype(np.int32)), cache)
        here = real[:, start:stop]
        np.testing.assert_allclose(np.asarray(found)[here], whole[:, start:stop][here], atol=1e-5)
    for step in range(LENGTH - max(lengths)):
        places = np.asarray(lengths) + step
        token = INPUT[np.arange(BATCH), places][:, None]
        found, cache = run(layer, token, context_of(np.ones((BATCH, 1), np.int32)), cache)
        np.testing.assert_allclose(np.asarray(found)[:, 0], whole[np.arange(BATCH), places], atol=1e-5)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), cache) == shapes


def test_a_step_of_padding_changes_nothing(tiny_config):
    layer, config = build(tiny_config)
    cache = cache_of(config, lambda shape: np.random.default_rng(2).normal(size=shape))
    _, after = run(layer, INPUT[:, :1], context_of(np.zeros((BATCH, 1), np.int32)), cache)
    jax.tree.map(np.testing.assert_array_equal, after, cache)


def test_an_empty_cache_holds_zeros_and_keeps_its_memory_in_float32(tiny_config):
    _, config = build(tiny_config, "bfloat16")
    cache = GatedDeltaNet.init_cache(SPEC, config.model, config.compute, BATCH, 1)
    assert isinstance(cache, DeltaCache) and cache.value.dtype == jnp.bfloat16 and cache.memory.dtype == jnp.float32
    assert not any(np.asarray(leaf).any() for leaf in cache)


def test_bfloat16_keeps_its_memory_in_float32(tiny_config):
    layer, config = build(tiny_config, "bfloat16")
    context = context_of(np.ones((BATCH, LENGTH), np.int32))
    found, cache = run(layer, INPUT.astype(jnp.bfloat16), context, cache_of(config))
    assert found.dtype == jnp.bfloat16 and cache.memory.dtype == jnp.float32 and cache.value.dtype == jnp.bfloat16
    exact = by_document(in_float64(layer), np.ones((BATCH, LENGTH), np.int32))
    assert np.abs(np.float32(found) - exact).mean() < 0.02 * np.abs(exact).mean()


def test_weights_and_what_they_are_at_first(tiny_config):
    config = tiny_config(*SIZES)
    layer = GatedDeltaNet(SPEC, config.model, config.compute, rngs=nnx.Rngs(params=jax.random.key(0)))
    weights, many = in_float64(layer), (DIM, KEYS, GROUPS, VALUE_WIDTH)
    assert {path: weight.shape for path, weight in weights.items()} == {
        "query/kernel": (DIM, KEYS, KEY_WIDTH), "key/kernel": (DIM, KEYS, KEY_WIDTH), "value/kernel": many,
        "gate/kernel": many, "beta/kernel": many[:3], "step/kernel": many[:3],
        "query_conv/kernel": (TAPS, KEYS, KEY_WIDTH), "key_conv/kernel": (TAPS, KEYS, KEY_WIDTH),
        "value_conv/kernel": (TAPS, *many[1:]), "log_rate": (KEYS, GROUPS), "step_bias": (KEYS, GROUPS),
        "norm/scale": (VALUE_WIDTH,), "out/kernel": (*many[1:], DIM),
    }  # fmt: skip
    rates = np.exp(weights["log_rate"]).ravel()
    assert (np.diff(rates) > 1).all() and rates[0] > 0.5 and rates[-1] < 16
    # Plain, unlike the model's other norms.
    assert (weights["norm/scale"] == 1).all() and (weights["step_bias"] == 1).all()
