import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlite.config.layers import LayerSpec
from maxlite.nn.attention import AttentionContext
from maxlite.nn.gated_delta_net import DeltaCache, GatedDeltaNet

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
    """The layer, with noise in every weight."""
    config = tiny_config(*SIZES, f"dtype={dtype}")
    layer = GatedDeltaNet(SPEC, config.model, config.compute, rngs=nnx.Rngs(params=jax.random.key(0)))
    graphdef, state = nnx.split(layer)
    generator = np.random.default_rng(1)
    state = jax.tree.map(lambda leaf: leaf + jnp.asarray(generator.normal(size=leaf.shape) * 0.2, leaf.dtype), state)
    return nnx.merge(graphdef, state), config


def weights_of(layer):
    return {"/".join(path): np.float64(leaf.get_raw_value()) for path, leaf in nnx.to_flat_state(nnx.state(layer))}


def context_of(segments):
    segments = None if segments is None else jnp.asarray(segments)
    positions = jnp.zeros((BATCH, LENGTH), jnp.int32)
    return AttentionContext(positions, segments, positions, segments, {}, jnp.int32(0))


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
    found, cache = layer(jnp.asarray(INPUT), context_of(segments), None)
    segments = np.ones((BATCH, LENGTH), np.int32) if segments is None else segments
    expected = by_document(weights_of(layer), segments)
    assert cache is None and np.abs(expected).max() > 0.3
    np.testing.assert_allclose(np.asarray(found)[segments != 0], expected[segments != 0], atol=2e-5)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("lengths", [pytest.param((9, 9), marks=pytest.mark.slow), (6, 9), (1, 4)])
def test_a_cache_continues_where_padded_prompts_end(tiny_config, lengths):
    """Prompts of unequal lengths, in parts of 4 and 5 tokens and padded on the right; then token by token."""
    layer, config = build(tiny_config)
    whole, _ = layer(jnp.asarray(INPUT), context_of(None), None)
    cache = GatedDeltaNet.init_cache(SPEC, config.model, config.compute, BATCH, 99)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), cache)
    real = np.arange(LENGTH) < np.asarray(lengths)[:, None]
    for start, stop in ((0, 4), (4, 9)):
        part = jnp.where(real[:, start:stop, None], INPUT[:, start:stop], 7.0)
        context = context_of(real[:, start:stop].astype(np.int32))
        found, cache = layer(part, context, cache)
        here = real[:, start:stop]
        np.testing.assert_allclose(np.asarray(found)[here], np.asarray(whole)[:, start:stop][here], atol=1e-5)
    for step in range(LENGTH - max(lengths)):
        places = np.asarray(lengths) + step
        token = jnp.asarray(INPUT[np.arange(BATCH), places])[:, None]
        found, cache = layer(token, context_of(np.ones((BATCH, 1), np.int32)), cache)
        np.testing.assert_allclose(found[:, 0], np.asarray(whole)[np.arange(BATCH), places], atol=1e-5)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), cache) == shapes


def test_a_step_of_padding_changes_nothing(tiny_config):
    layer, config = build(tiny_config)
    random = np.random.default_rng(2)
    empty = GatedDeltaNet.init_cache(SPEC, config.model, config.compute, BATCH, 1)
    cache = jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape), leaf.dtype), empty)
    _, after = layer(jnp.asarray(INPUT[:, :1]), context_of(np.zeros((BATCH, 1), np.int32)), cache)
    jax.tree.map(np.testing.assert_array_equal, after, cache)


def test_bfloat16_keeps_its_memory_in_float32(tiny_config):
    layer, config = build(tiny_config, "bfloat16")
    cache = GatedDeltaNet.init_cache(SPEC, config.model, config.compute, BATCH, 1)
    assert isinstance(cache, DeltaCache) and cache.value.dtype == jnp.bfloat16 and cache.memory.dtype == jnp.float32
    found, cache = layer(jnp.asarray(INPUT, jnp.bfloat16), context_of(np.ones((BATCH, LENGTH), np.int32)), cache)
    assert found.dtype == jnp.bfloat16 and cache.memory.dtype == jnp.float32 and cache.value.dtype == jnp.bfloat16
    exact, _ = layer(jnp.asarray(INPUT), context_of(None), None)
    assert np.abs(found.astype(jnp.float32) - exact).mean() < 0.02 * np.abs(exact).mean()


def test_weights_and_what_they_are_at_first(tiny_config):
    config = tiny_config(*SIZES)
    layer = GatedDeltaNet(SPEC, config.model, config.compute, rngs=nnx.Rngs(params=jax.random.key(0)))
    weights, many = weights_of(layer), (DIM, KEYS, GROUPS, VALUE_WIDTH)
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
