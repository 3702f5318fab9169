import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlite.config.layers import LayerSpec
from maxlite.nn import mla
from maxlite.nn.attention import AttentionContext
from maxlite.nn.cache import write_slots
from maxlite.nn.mla import LatentCache, MultiHeadLatentAttention
from maxlite.ops.kv_quantization import mixed, mixed_numbers, unmixed
from tests.nn.layers import filled, in_float64, new_run, run, weights_of

BATCH, LENGTH, DIM, HEADS = 2, 9, 32, 4
QUERY_RANK, RANK, CONTENT, ROPE, VALUE = 12, 10, 8, 6, 5
SIZES = (
    f"emb_dim={DIM}", f"num_query_heads={HEADS}", f"num_kv_heads={HEADS}", f"head_dim={CONTENT + ROPE}",
    f"kv_lora_rank={RANK}", f"qk_nope_head_dim={CONTENT}", f"qk_rope_head_dim={ROPE}", f"v_head_dim={VALUE}",
    "attention_pattern=mla", "rope_interleave=true", "normalization_layer_epsilon=0.3",
)  # fmt: skip
LOW_RANK = (f"q_lora_rank={QUERY_RANK}",)
BIASED = ("attention_bias=true", "attention_out_bias=true")
# Two documents and padding in the first row, padding on the left in the second; positions begin anew.
SEGMENTS = np.asarray([[1, 1, 1, 1, 2, 2, 2, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1]], np.int32)
POSITIONS = np.asarray([[0, 1, 2, 3, 0, 1, 2, 0, 0], [0, 0, 0, 1, 2, 3, 4, 5, 6]], np.int32)
INPUT = np.random.default_rng(0).normal(size=(BATCH, LENGTH, DIM))
THETA = 100.0
SPEC = LayerSpec("mla", "dense")
SCALE = (CONTENT + ROPE) ** -0.5


def build(tiny_config, *overrides, dtype="float32"):
    keys = dict(text.split("=") for text in (*SIZES, *overrides, f"dtype={dtype}"))
    config = tiny_config(*(f"{key}={value}" for key, value in keys.items()))
    return filled(MultiHeadLatentAttention(SPEC, config.model, config.compute, rngs=None)), config


def turns(positions, xp=np):
    """Angles [B, T, Hr/2]."""
    return xp.asarray(positions)[..., None] * THETA ** (-np.arange(0, ROPE, 2) / ROPE)


def context_of(positions, segments, keys=None, index=None):
    """keys: positions and segments of the cache's slots."""
    angles = turns(positions)
    rotations = {"mla": (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))}
    key_positions, key_segments = (positions, segments) if keys is None else keys
    return AttentionContext(
        query_positions=positions, query_segment_ids=segments, key_positions=key_positions,
        key_segment_ids=key_segments, rotations=rotations, index=None if index is None else np.int32(index),
    )  # fmt: skip


def reference(weights, x, scale, *, interleave=True, xp=np):
    """Equations 9-19 of the paper in one dtype, with the norms and biases of the published models."""

    def linear(name, x, equation):
        return xp.einsum(equation, x, weights[f"{name}/kernel"]) + weights.get(f"{name}/bias", 0.0)

    def norm(name, x):
        return x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weights[f"{name}/scale"]

    def pairs(x):
        """The two numbers that turn together, as the axis before the last: [..., Hr] -> [..., Hr/2], [..., Hr/2]."""
        return (x[..., 0::2], x[..., 1::2]) if interleave else (x[..., : ROPE // 2], x[..., ROPE // 2 :])

    if "query/kernel" in weights:
        query = linear("query", x, "btd,dnh->btnh")
    else:
        query = linear("query_b", norm("query_a_norm", linear("query_a", x, "btd,dr->btr")), "btr,rnh->btnh")
    both = linear("key_value_a", x, "btd,dr->btr")
    expanded = linear("key_value_b", norm("key_value_a_norm", both[..., :RANK]), "btr,rnh->btnh")
    scores = xp.einsum("btnh,bsnh->bnts", query[..., :CONTENT], expanded[..., :CONTENT])
    # A turned pair times a turned pair depends on the difference of the angles alone; no rotation is made here.
    angles = turns(POSITIONS, xp)
    difference = angles[:, :, None, :] - angles[:, None, :, :]
    (first, second), (key_first, key_second) = pairs(query[..., CONTENT:]), pairs(both[..., RANK:])
    along = xp.einsum("btnp,bsp,btsp->bnts", first, key_first, xp.cos(difference))
    along += xp.einsum("btnp,bsp,btsp->bnts", second, key_second, xp.cos(difference))
    across = xp.einsum("btnp,bsp,btsp->bnts", second, key_first, xp.sin(difference))
    across -= xp.einsum("btnp,bsp,btsp->bnts", first, key_second, xp.sin(difference))
    scores = (scores + along - across) * scale
    seen = np.tril(np.ones((LENGTH, LENGTH), bool)) & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
    seen = (seen & (SEGMENTS[:, :, None] > 0))[:, None]
    chances = xp.where(seen, xp.exp(scores), 0.0)
    chances = chances / (chances.sum(-1, keepdims=True) + xp.where(seen.any(-1, keepdims=True), 0.0, 1.0))
    return linear("out", xp.einsum("bnts,bsnh->btnh", chances, expanded[..., CONTENT:]), "btnh,nhd->btd")


def found(layer, x=INPUT):
    return run(layer, x.astype(np.float32), context_of(POSITIONS, SEGMENTS), None)[0]


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("overrides", [(), LOW_RANK, LOW_RANK + BIASED], ids=["direct", "low-rank", "biased"])
def test_against_numpy(overrides, interleave, tiny_config):
    layer, _ = build(tiny_config, *overrides, f"rope_interleave={str(interleave).lower()}")
    expected = reference(in_float64(layer), INPUT, SCALE, interleave=interleave)
    np.testing.assert_allclose(found(layer), expected, atol=2e-5)


@pytest.mark.parametrize(
    ("overrides", "scale"),
    [
        (("query_pre_attn_scalar=2.5",), 2.5**-0.5),
        # The factors that DeepSeek-V2-Lite, DeepSeek-V3 and Kimi K2 come to.
        (("rope_type=yarn", "rope_factor=40", "rope_mscale_all_dim=0.707"), SCALE * 1.5896261),
        (("rope_type=yarn", "rope_factor=40", "rope_mscale_all_dim=1"), SCALE * 1.8738542),
        (("rope_type=yarn", "rope_factor=32", "rope_mscale_all_dim=1"), SCALE * 1.8132604),
        (("rope_type=yarn", "rope_factor=40"), SCALE),
        (("rope_type=yarn", "rope_factor=40", "rope_mscale_all_dim=0"), SCALE),
        (("rope_type=linear", "rope_factor=40", "rope_mscale_all_dim=1"), SCALE),
    ],
)
def test_the_scale_is_what_the_keys_come_to(overrides, scale, tiny_config):
    layer, _ = build(tiny_config, *overrides, "original_max_position_embeddings=64")
    assert layer.scale == pytest.approx(scale, rel=1e-6)


def test_scores_are_scaled(tiny_config):
    """By the layer's own scale, also where none of it is the root of a head's width."""
    layer, config = build(
        tiny_config, "rope_type=yarn", "rope_factor=40", "rope_mscale_all_dim=1", "query_pre_attn_scalar=2.5",
        "original_max_position_embeddings=64",
    )  # fmt: skip
    expected = reference(in_float64(layer), INPUT, 2.5**-0.5 * 1.8738542)
    np.testing.assert_allclose(found(layer), expected, atol=2e-5)
    np.testing.assert_allclose(cached_outputs(layer, config, [LENGTH])[0], expected, atol=2e-5)


def test_epsilon_of_the_latent_norms(tiny_config):
    """Latents whose mean square is about 1e-6: an epsilon of 0.3, the config's, would leave nothing of them."""
    layer, _ = build(tiny_config, *LOW_RANK)
    expected = reference(in_float64(layer), INPUT * 1e-3, SCALE)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found(layer, INPUT * 1e-3), expected, atol=2e-5)


# Pieces of few lengths, for each is a program.
PIECES = [4, 1, 4]


def cached_outputs(layer, config, lengths, slots=LENGTH + 4, call=run):
    """Runs the tokens in pieces of these lengths. Returns outputs [B, T, D] and the cache."""
    arguments = (SPEC, config.model, config.compute, BATCH, slots)
    cache = jax.eval_shape(lambda: MultiHeadLatentAttention.init_cache(*arguments))
    # What the slots hold before they are written must not matter, if only their segment is 0.
    cache = jax.tree.map(lambda leaf: np.full(leaf.shape, 1000).astype(leaf.dtype), cache)
    outputs, start = [], 0
    for length in lengths:
        piece = slice(start, start + length)
        positions, segments = (np.zeros((BATCH, slots), np.int32) for _ in range(2))
        positions[:, : piece.stop], segments[:, : piece.stop] = POSITIONS[:, : piece.stop], SEGMENTS[:, : piece.stop]
        context = context_of(POSITIONS[:, piece], SEGMENTS[:, piece], (positions, segments), start)
        output, cache = call(layer, INPUT[:, piece].astype(jnp.dtype(config.compute.dtype)), context, cache)
        outputs.append(np.asarray(output))
        start += length
    return np.concatenate(outputs, axis=1), jax.tree.map(np.asarray, cache)


@pytest.mark.parametrize("lengths", [[LENGTH], PIECES, [4, 1, 1, 1, 1, 1], [1] * LENGTH], ids=str)
@pytest.mark.parametrize("overrides", [(), LOW_RANK + BIASED], ids=["direct", "biased"])
def test_cached_equals_uncached(overrides, lengths, tiny_config):
    layer, config = build(tiny_config, *overrides)
    outputs, cache = cached_outputs(layer, config, lengths)
    np.testing.assert_allclose(outputs, found(layer), atol=2e-5)
    assert isinstance(cache, LatentCache)
    assert cache.latent.shape == (BATCH, LENGTH + 4, RANK) and cache.rope_key.shape == (BATCH, LENGTH + 4, ROPE)
    assert (cache.latent[:, LENGTH:] == 1000).all() and (cache.rope_key[:, LENGTH:] == 1000).all()


def test_cache_holds_normed_latents_and_turned_keys(tiny_config):
    layer, config = build(tiny_config)
    weights = in_float64(layer)
    both = np.einsum("btd,dr->btr", INPUT, weights["key_value_a/kernel"])
    latent = both[..., :RANK] / np.sqrt(np.mean(both[..., :RANK] ** 2, -1, keepdims=True) + 1e-6)
    turned = (both[..., RANK::2] + 1j * both[..., RANK + 1 :: 2]) * np.exp(1j * turns(POSITIONS))
    _, cache = cached_outputs(layer, config, PIECES)
    np.testing.assert_allclose(cache.latent[:, :LENGTH], latent * weights["key_value_a_norm/scale"], atol=2e-5)
    rope_key = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(cache.rope_key[:, :LENGTH], rope_key, atol=2e-5)


def test_cached_step_makes_no_key_for_each_head(tiny_config):
    layer, config = build(tiny_config)
    slots = 23

    def lowered(length, cached):
        tokens = np.zeros((BATCH, length), np.int32)
        keys = (np.zeros((BATCH, slots), np.int32),) * 2 if cached else None
        context = context_of(tokens, tokens, keys, 0 if cached else None)
        arguments = (SPEC, config.model, config.compute, BATCH, slots)
        cache = MultiHeadLatentAttention.init_cache(*arguments) if cached else None
        return (
            jax.jit(lambda x: layer(x, context, cache)[0]).lower(np.zeros((BATCH, length, DIM), np.float32)).as_text()
        )

    assert f"{slots}x{HEADS}x{CONTENT}" in lowered(slots, cached=False)
    assert f"{slots}x{HEADS}x" not in lowered(1, cached=True)


@pytest.mark.parametrize(("dtype", "largest", "error"), [("int8", 127.0, 0.01), ("int4", 7.4999, 0.2)])
def test_latents_and_turned_keys_are_rounded_apart(dtype, largest, error, tiny_config):
    layer, exact_config = build(tiny_config, *LOW_RANK)
    _, exact = cached_outputs(layer, exact_config, PIECES)
    _, config = build(tiny_config, "quantize_kvcache=true", f"kv_quant_dtype={dtype}")
    outputs, cache = cached_outputs(layer, config, PIECES)
    for slots, numbers in zip(cache, exact, strict=True):
        numbers = np.asarray(jax.jit(mixed)(numbers), np.float64)[:, :LENGTH]
        scale = np.abs(numbers).max(-1, keepdims=True) / largest
        np.testing.assert_allclose(slots.scale[:, :LENGTH], scale, rtol=1e-4)
        assert slots.codes.shape == (BATCH, LENGTH + 4, numbers.shape[-1] // (1 if dtype == "int8" else 2))
        read = np.asarray(jax.jit(mixed_numbers, static_argnums=1)(slots, jnp.dtype("float32")))[:, :LENGTH]
        assert (np.abs(read - numbers) <= 0.5001 * scale).all()
    expected = reference(in_float64(layer), INPUT, SCALE)
    assert 0 < np.abs(np.asarray(outputs) - expected).mean() < error * np.abs(expected).mean()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_what_is_read_is_what_was_rounded(dtype, tiny_config, monkeypatch):
    """Two runs: with rounded slots; and with float ones that numbers are rounded on their way to."""
    layer, config = build(tiny_config, "quantize_kvcache=true", f"kv_quant_dtype={dtype}")
    rounded, _ = cached_outputs(layer, config, PIECES)

    def write_rounded(stored, new, index):
        largest, end = {"int8": (127.0, 128), "int4": (7.4999, 8)}[dtype]
        new = mixed(new)
        scale = jnp.max(jnp.abs(new), axis=-1, keepdims=True) / largest
        return write_slots(stored, unmixed(jnp.clip(jnp.round(new / scale), -end, end - 1) * scale), index)

    monkeypatch.setattr(mla, "write_slots", write_rounded)
    layer, config = build(tiny_config)
    expected, _ = cached_outputs(layer, config, PIECES, call=new_run())
    np.testing.assert_allclose(rounded, expected, atol=1e-5)


def test_padding_gives_zeros(tiny_config):
    layer, config = build(tiny_config)
    cached, _ = cached_outputs(layer, config, PIECES)
    for outputs in (found(layer), cached):
        assert (np.asarray(outputs)[SEGMENTS == 0] == 0).all()
        assert (np.abs(np.asarray(outputs)[SEGMENTS > 0]).max(-1) > 0).all()


@pytest.mark.parametrize("overrides", [(), LOW_RANK + BIASED], ids=["direct", "biased"])
def test_gradients_equal_those_of_the_reference(overrides, tiny_config):
    layer, _ = build(tiny_config, *overrides)
    graphdef, state = nnx.split(layer)
    x, pull = INPUT.astype(np.float32), np.random.default_rng(2).normal(size=INPUT.shape)

    def through_layer(state, x):
        return jnp.sum(nnx.merge(graphdef, state)(x, context_of(POSITIONS, SEGMENTS), None)[0] * pull)

    def through_reference(weights, x):
        return jnp.sum(reference(weights, x, SCALE, xp=jnp) * pull)

    state_gradient, x_gradient = jax.jit(jax.grad(through_layer, argnums=(0, 1)))(state, x)
    expected, x_expected = jax.jit(jax.grad(through_reference, argnums=(0, 1)))(weights_of(layer), x)
    gradients = {"/".join(path): leaf.get_raw_value() for path, leaf in nnx.to_flat_state(state_gradient)}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert np.abs(expected[name]).max() > 1e-2, name
        np.testing.assert_allclose(gradient, expected[name], atol=2e-4, err_msg=name)
    np.testing.assert_allclose(x_gradient, x_expected, atol=2e-4)


def test_parameters_and_their_axes(tiny_config):
    layer, _ = build(tiny_config, *LOW_RANK, *BIASED)
    params = {"/".join(path): leaf for path, leaf in nnx.to_flat_state(nnx.state(layer))}
    shapes = {name: (leaf.get_raw_value().shape, leaf.get_metadata()["axes"]) for name, leaf in params.items()}
    assert shapes == {
        "query_a/kernel": ((DIM, QUERY_RANK), ("embed", "q_lora")),
        "query_a/bias": ((QUERY_RANK,), ("q_lora",)),
        "query_a_norm/scale": ((QUERY_RANK,), ("norm",)),
        "query_b/kernel": ((QUERY_RANK, HEADS, CONTENT + ROPE), ("q_lora", "heads", "head_dim")),
        "key_value_a/kernel": ((DIM, RANK + ROPE), ("embed", "kv_lora")),
        "key_value_a/bias": ((RANK + ROPE,), ("kv_lora",)),
        "key_value_a_norm/scale": ((RANK,), ("norm",)),
        "key_value_b/kernel": ((RANK, HEADS, CONTENT + VALUE), ("kv_lora", "heads", "head_dim")),
        "out/kernel": ((HEADS, VALUE, DIM), ("heads", "head_dim", "embed")),
        "out/bias": ((DIM,), ("embed",)),
    }
    direct, _ = build(tiny_config, "attention_bias=true")
    assert weights_of(direct)["query/kernel"].shape == (DIM, HEADS, CONTENT + ROPE)
    assert not [name for name in weights_of(direct) if name.startswith(("query_", "query/bias", "out/bias"))]


def test_bfloat16(tiny_config):
    layer, config = build(tiny_config, *LOW_RANK, dtype="bfloat16")
    expected = reference(in_float64(layer), INPUT, SCALE)
    outputs, cache = cached_outputs(layer, config, PIECES)
    assert cache.latent.dtype == cache.rope_key.dtype == jnp.bfloat16
    for output in (found(layer), outputs):
        assert output.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(output), expected, atol=0.04 * np.abs(expected).max())


YARN = {
    "rope_type": "yarn", "rope_theta": THETA, "factor": 40.0, "mscale": 1.3, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN_KEYS = ("rope_type=yarn", "rope_factor=40", "mscale=1.3", "rope_mscale_all_dim=0.707",
             "original_max_position_embeddings=64")  # fmt: skip
TORCH_CASES = {
    "direct": ("v3", {"q_lora_rank": None}, ()),
    "low-rank": ("v3", {"q_lora_rank": QUERY_RANK}, LOW_RANK),
    "biased": ("v3", {"q_lora_rank": QUERY_RANK, "attention_bias": True}, LOW_RANK + BIASED),
    "halves": ("v3", {"q_lora_rank": QUERY_RANK, "rope_interleave": False}, (*LOW_RANK, "rope_interleave=false")),
    "yarn": ("v3", {"q_lora_rank": QUERY_RANK, "rope_parameters": YARN}, LOW_RANK + YARN_KEYS),
    "v2": ("v2", {"q_lora_rank": None, "attention_bias": True, "rope_parameters": YARN}, BIASED + YARN_KEYS),
}


@pytest.mark.torch
@pytest.mark.parametrize("case", TORCH_CASES)
def test_against_transformers(case, tiny_config):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    version, settings, overrides = TORCH_CASES[case]
    hf, rotary, pairs_of = torch_attention(version, settings)
    layer, _ = build(tiny_config, *overrides)
    weights = {name: torch.tensor(np.asarray(value)) for name, value in weights_of(layer).items()}
    hf.load_state_dict(to_hugging_face(weights), strict=True)
    x = torch.tensor(INPUT, dtype=torch.float32)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    embeddings = rotary(x, positions)
    mask = torch.full((LENGTH, LENGTH), -1e30).triu(1).expand(BATCH, 1, LENGTH, LENGTH)
    with torch.no_grad():
        expected = hf(hidden_states=x, position_embeddings=embeddings, attention_mask=mask)[0].numpy()
    cos, sin = (part.numpy() for part in pairs_of(embeddings))
    context = context_of(positions.numpy().astype(np.int32), None)._replace(rotations={"mla": (cos, sin)})
    np.testing.assert_allclose(run(layer, INPUT.astype(np.float32), context, None)[0], expected, atol=2e-5)


def torch_attention(version, settings):
    """transformers' layer, its rotary embedding, and what takes cosines and sines [B, T, Hr/2] from the latter."""
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    sizes = dict(
        hidden_size=DIM, num_attention_heads=HEADS, num_key_value_heads=HEADS, kv_lora_rank=RANK,
        qk_nope_head_dim=CONTENT, qk_rope_head_dim=ROPE, v_head_dim=VALUE, max_position_embeddings=2560,
        rms_norm_eps=0.3, rope_parameters={"rope_type": "default", "rope_theta": THETA}, attn_implementation="eager",
    )  # fmt: skip
    if version == "v2":
        config = v2.DeepseekV2Config(**{**sizes, **settings})
        attention, rotary = v2.DeepseekV2Attention(config, 0), v2.DeepseekV2RotaryEmbedding(config)
        return attention.eval(), rotary, lambda turn: (turn.real, turn.imag)
    config = v3.DeepseekV3Config(**{**sizes, **settings})
    attention, rotary = v3.DeepseekV3Attention(config, 0), v3.DeepseekV3RotaryEmbedding(config)
    return attention.eval(), rotary, lambda both: [part[..., : ROPE // 2] for part in both]


def to_hugging_face(weights):
    """Matrices as [out, in], heads flattened."""
    names = {
        "query": "q_proj", "query_a": "q_a_proj", "query_a_norm": "q_a_layernorm", "query_b": "q_b_proj",
        "key_value_a": "kv_a_proj_with_mqa", "key_value_a_norm": "kv_a_layernorm", "key_value_b": "kv_b_proj",
        "out": "o_proj",
    }  # fmt: skip
    tensors = {}
    for path, value in weights.items():
        name, kind = path.split("/")
        if kind == "kernel":
            value = value.flatten(0, 1) if name == "out" else value.flatten(1)
            value = value.T
        tensors[f"{names[name]}.{'bias' if kind == 'bias' else 'weight'}"] = value.contiguous()
    return tensors
