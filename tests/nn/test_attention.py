import jax
import numpy as np
import pytest
from flax import nnx

from maxlite.config.layers import LayerSpec
from maxlite.nn.attention import Attention, AttentionContext
from maxlite.nn.rotary import rotary_tables, rotations
from tests.nn.layers import filled, in_float64, run

LENGTH = 7


def rotated(x, interleave, share, theta=1e4):
    """Rotary positions by complex numbers, over the first `share` of the features. x: [T, N, H]."""
    size = int(x.shape[-1] * share)
    turning, rest = x[..., :size], x[..., size:]
    first, second = (
        (turning[..., 0::2], turning[..., 1::2])
        if interleave
        else (turning[..., : size // 2], turning[..., size // 2 :])
    )
    angles = np.arange(x.shape[0])[:, None] * theta ** (-np.arange(size // 2) / (size // 2))
    turned = (first + 1j * second) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag, rest], -1)


def turned_in_proportion(x, share, theta=1e4):
    """The first pairs of a whole head turn as they would if all did; the others stand still. x: [T, N, H]."""
    result, half = x.copy(), x.shape[-1] // 2
    for pair in range(half):
        rate = theta ** (-pair / half) if pair < share * half else 0.0
        turned = (x[..., pair] + 1j * x[..., half + pair]) * np.exp(1j * rate * np.arange(x.shape[0]))[:, None]
        result[..., pair], result[..., half + pair] = turned.real, turned.imag
    return result


def normed(x, model, dims, scale=None):
    x = x / np.sqrt(np.mean(x**2, axis=dims, keepdims=True) + model.normalization_layer_epsilon)
    return x if scale is None else x * (scale + model.norm_scale_offset)


def expected_output(attention, x, kind, model):
    """Head by head and token by token, in float64."""
    weights = in_float64(attention)
    shares = kind == "full" and model.share_kv_projections
    q, k, v = (
        np.einsum("td,dnh->tnh", x, weights[f"{name}/kernel"]) + weights.get(f"{name}/bias", 0.0)
        for name in ("query", "key", "key" if shares else "value")
    )
    if model.use_v_norm:
        v = normed(v, model, -1)
    if model.use_qk_norm and model.qk_norm_type != "l2":
        dims = -1 if model.qk_norm_type == "head" else (-2, -1)
        q, k = (normed(y, model, dims, weights[f"{name}_norm/scale"]) for name, y in (("query", q), ("key", k)))
    if kind != "nope":
        if model.rope_type == "proportional":
            q, k = (turned_in_proportion(y, model.partial_rotary_factor) for y in (q, k))
        else:
            q, k = (rotated(y, model.rope_interleave, model.partial_rotary_factor) for y in (q, k))
        if model.use_qk_norm and model.qk_norm_type == "l2":
            q, k = (normed(y, model, -1) for y in (q, k))
    elif model.temperature_tuning:
        steps = np.floor((np.arange(LENGTH) + 1) / model.temperature_tuning_floor)
        q = q * (1 + model.temperature_tuning_scale * np.log(1 + steps))[:, None, None]
    result = np.zeros((LENGTH, x.shape[1])) + weights.get("out/bias", 0.0)
    group = q.shape[1] // k.shape[1]
    for t in range(LENGTH):
        first = {"local": max(0, t - 2), "chunked": t // 3 * 3}.get(kind, 0)
        for n in range(q.shape[1]):
            scores = k[first : t + 1, n // group] @ q[t, n] / np.sqrt(model.query_pre_attn_scalar or q.shape[2])
            if model.attn_logits_soft_cap:
                scores = model.attn_logits_soft_cap * np.tanh(scores / model.attn_logits_soft_cap)
            chances = np.exp(scores)
            total = chances.sum() + (np.exp(weights["sinks"][n]) if model.attention_sink else 0)
            context = (chances / total) @ v[first : t + 1, n // group]
            if model.attention_output_gate:
                gate = x[t] @ weights["gate/kernel"][:, n] + (weights["gate/bias"][n] if model.attention_bias else 0)
                context = context / (1 + np.exp(-gate))
            result[t] += context @ weights["out/kernel"][n]
    return result


KINDS = ("attention_pattern=local,chunked", "sliding_window_size=3", "chunk_attn_window_size=3")
GLOBAL = (
    "attention_pattern=local,full", "sliding_window_size=3", "global_head_dim=24", "global_num_kv_heads=1",
    "share_kv_projections=true",
)  # fmt: skip
CASES = {
    "full": ("full", ["num_kv_heads=4"]),
    "head_dim": ("full", ["head_dim=24"]),
    "local": ("local", ["num_kv_heads=1", *KINDS]),
    "chunked": ("chunked", KINDS),
    "nope": ("nope", ["attention_pattern=full,nope"]),
    "temperature": (
        "nope",
        [
            "attention_pattern=full,nope",
            "temperature_tuning=true",
            "temperature_tuning_floor=2",
            "temperature_tuning_scale=0.7",
        ],
    ),
    "biases": ("full", ["attention_bias=true", "attention_out_bias=true"]),
    "out bias": ("full", ["attention_out_bias=true"]),
    "norm of heads": ("full", ["use_qk_norm=true"]),
    "norm of heads, offset": ("full", ["use_qk_norm=true", "norm_scale_offset=1"]),
    "norm of projections": ("full", ["use_qk_norm=true", "qk_norm_type=projection"]),
    "norm without scale": ("full", ["use_qk_norm=true", "qk_norm_type=l2"]),
    "norm without scale, nope": ("nope", ["attention_pattern=full,nope", "use_qk_norm=true", "qk_norm_type=l2"]),
    "scalar": ("full", ["query_pre_attn_scalar=3"]),
    "soft cap": ("full", ["attn_logits_soft_cap=0.5"]),
    "sinks": ("full", ["attention_sink=true"]),
    "gate": ("full", ["attention_output_gate=true"]),
    "gate with a bias": ("full", ["attention_output_gate=true", "attention_bias=true"]),
    "interleaved": ("full", ["rope_interleave=true"]),
    "partial": ("full", ["partial_rotary_factor=0.5"]),
    "proportional": ("full", ["rope_type=proportional", "partial_rotary_factor=0.5"]),
    "norm of values": ("full", ["use_v_norm=true"]),
    "keys are values": ("full", GLOBAL),
    "keys are values, normed": (
        "full", [*GLOBAL, "use_v_norm=true", "use_qk_norm=true", "attention_bias=true", "query_pre_attn_scalar=1"],
    ),
    "not of a local layer": ("local", [*GLOBAL, "use_v_norm=true"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_against_numpy(case, tiny_config):
    kind, overrides = CASES[case]
    config = tiny_config("normalization_layer_epsilon=0.1", *overrides)
    attention = filled(Attention(LayerSpec(kind, "dense"), config.model, config.compute, rngs=None))
    positions, segments = np.arange(LENGTH)[None], np.ones((1, LENGTH), np.int32)
    turns = rotations(rotary_tables(config.model), positions)
    x = np.random.default_rng(0).normal(size=(LENGTH, 64))
    context = AttentionContext(positions, segments, positions, segments, turns, None)
    found, cache = run(attention, x[None].astype(np.float32), context, None)
    expected = expected_output(attention, x, kind, config.model)
    np.testing.assert_allclose(found[0], expected, atol=5e-5)
    assert cache is None


def test_no_weight_is_made_that_was_not_asked_for(tiny_config):
    config = tiny_config()
    attention = Attention(LayerSpec("full", "dense"), config.model, config.compute, rngs=None)
    names = {"/".join(path) for path, _ in nnx.to_flat_state(nnx.state(attention))}
    assert names == {f"{name}/kernel" for name in ("query", "key", "value", "out")}


def test_a_shared_projection_is_one_weight(tiny_config):
    config = tiny_config(*GLOBAL)
    weights = {}
    for kind in ("full", "local"):
        attention = Attention(LayerSpec(kind, "dense"), config.model, config.compute, rngs=None)
        weights[kind] = {path[0]: leaf.shape for path, leaf in nnx.to_flat_state(nnx.state(attention))}
    assert weights["full"] == {"query": (64, 4, 24), "key": (64, 1, 24), "out": (4, 24, 64)}
    assert weights["local"]["value"] == weights["local"]["key"] == (64, 2, 16)


def test_a_cache_has_the_heads_of_its_kind(tiny_config):
    config = tiny_config(*GLOBAL)
    for kind, heads in (("full", (1, 24)), ("local", (2, 16))):
        arguments = (LayerSpec(kind, "dense"), config.model, config.compute, 3, 5)
        cache = jax.eval_shape(lambda arguments=arguments: Attention.init_cache(*arguments))
        assert cache.key.shape == cache.value.shape == (3, 5, *heads)
