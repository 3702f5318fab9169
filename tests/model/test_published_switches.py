"""What sets each family apart, in the YAMLs and in their tiny variants (smoke=true): switches, rotary tables, routers.

Nothing in the tables is computed by maxlite, and the functions at the end follow the papers, one number at a time.
"""

from functools import cache

import numpy as np
import pytest

from maxlite.config.load import load_config, model_names
from maxlite.config.schema import Config
from maxlite.nn.rotary import rope_scaling, rotary_tables
from maxlite.ops.router import RoutingRule, route

# In all tables the key is a beginning of the model's name; of several the longest counts.
THETAS = {
    "llama2": 1e4, "llama": 5e5, "smollm2": 1e5, "smollm2-1.7b": 1.3e5, "gemma": 1e4, "gemma3": 1e6, "gemma4": 1e6,
    "mistral-7b-v0.1": 1e4, "mistral": 1e6, "mistral-small": 1e8, "ministral": 1e8, "mixtral": 1e6,
    "qwen": 1e6, "qwen3-4b-2507": 5e6, "qwen3-30b-a3b-2507": 1e7, "qwen3-235b-a22b-2507": 5e6, "qwen3-coder": 1e7,
    "qwen3-next": 1e7, "qwen3.5": 1e7,
    "deepseek": 1e4, "kimi": 5e4, "gpt-oss": 1.5e5, "olmo": 5e5, "olmoe": 1e4,
}  # fmt: skip
# Longest sequence.
POSITIONS = {
    "llama2": 4096, "llama3-": 8192, "llama3.": 131072, "llama4-17b-16e": 262144,
    "llama4-17b-16e-instruct": 10_485_760, "llama4-17b-128e": 1_048_576, "smollm2": 8192,
    "gemma": 8192, "gemma3-270m": 32768, "gemma3-1b": 32768, "gemma3": 131072, "gemma4": 262144,
    "mistral-7b": 32768, "mistral-nemo": 128_000, "mistral-small": 32768, "ministral": 131072, "mistral-large": 131072,
    "mixtral-8x7b": 32768, "mixtral-8x22b": 65536,
    "qwen2.5": 131072, "qwen2.5-0.5b": 32768, "qwen2.5-3b": 32768, "qwen2-": 131072, "qwen1.5": 8192,
    "qwen3": 40960, "qwen3-4b-2507": 262144, "qwen3-30b-a3b-2507": 262144, "qwen3-235b-a22b-2507": 262144,
    "qwen3-coder": 262144, "qwen3-next": 262144, "qwen3.5": 262144, "deepseek": 163840, "kimi": 131072,
    "gpt-oss": 131072,
    "olmo2": 4096, "olmo3": 65536, "olmoe": 4096,
}  # fmt: skip
EPSILONS = {
    "llama": 1e-5, "smollm2": 1e-5, "gemma": 1e-6, "mi": 1e-5, "qwen": 1e-6, "qwen2.5-14b": 1e-5, "qwen2.5-32b": 1e-5,
    "qwen2.5-72b": 1e-5, "deepseek": 1e-6, "kimi": 1e-6, "gpt-oss": 1e-5, "olmo": 1e-6, "olmoe": 1e-5,
}  # fmt: skip
TIED = ("gemma", "smollm2", "llama3.2", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen3-0.6b", "qwen3-1.7b",
        "qwen3-4b")  # fmt: skip
# What sets a family apart from a Llama, which has none of it.
GEMMA = {"mlp_activation": "gelu_tanh", "norm_scale_offset": 1.0, "scale_embeddings": True}
GEMMA2 = GEMMA | {"use_post_norms": True, "attn_logits_soft_cap": 50.0, "final_logits_soft_cap": 30.0}
GEMMA3 = GEMMA | {"use_post_norms": True, "use_qk_norm": True}
GEMMA4 = {
    "mlp_activation": "gelu_tanh", "scale_embeddings": True, "use_post_norms": True, "use_qk_norm": True,
    "use_v_norm": True, "share_kv_projections": True, "query_pre_attn_scalar": 1.0, "final_logits_soft_cap": 30.0,
    "use_layer_scalar": True, "partial_rotary_factor": 0.25,
}  # fmt: skip
LLAMA4 = {
    "rope_interleave": True, "temperature_tuning": True, "scale_expert_input": True, "routed_score_func": "sigmoid",
    "norm_topk_prob": False,
}  # fmt: skip
QWEN2_MOE = {"attention_bias": True, "norm_topk_prob": False, "shared_expert_gate": True}
QWEN3_NEXT = {
    "use_qk_norm": True, "attention_output_gate": True, "norm_scale_offset": 1.0, "partial_rotary_factor": 0.25,
    "shared_expert_gate": True,
}  # fmt: skip
DEEPSEEK2 = {"rope_interleave": True, "norm_topk_prob": False}
DEEPSEEK3 = {"rope_interleave": True, "routed_score_func": "sigmoid", "routed_bias": True}
GPT_OSS = {
    "attention_bias": True, "attention_out_bias": True, "attention_sink": True, "mlp_bias": True, "router_bias": True,
    "mlp_activation": "swigluoai",
}  # fmt: skip
OLMO2 = {"use_qk_norm": True, "qk_norm_type": "projection", "use_pre_norms": False, "use_post_norms": True}
SWITCHES = {
    "llama": {}, "smollm2": {}, "mistral": {}, "ministral": {}, "mixtral": {},
    "llama4-17b-16e": LLAMA4 | {"use_qk_norm": True, "qk_norm_type": "l2"},
    "llama4-17b-128e": LLAMA4,
    "gemma-": GEMMA,
    "gemma2": GEMMA2 | {"query_pre_attn_scalar": 256.0},
    "gemma2-27b": GEMMA2 | {"query_pre_attn_scalar": 144.0},
    "gemma3": GEMMA3 | {"query_pre_attn_scalar": 256.0},
    "gemma3-27b": GEMMA3 | {"query_pre_attn_scalar": 168.0},
    "gemma4": GEMMA4,
    "gemma4-26b": GEMMA4 | {"scaled_router": True},
    "qwen2.5": {"attention_bias": True},
    "qwen2-": QWEN2_MOE,
    "qwen1.5": QWEN2_MOE,
    "qwen3": {"use_qk_norm": True},
    "qwen3-next": QWEN3_NEXT,
    "qwen3.5": QWEN3_NEXT,
    "deepseek2-lite": DEEPSEEK2,
    "deepseek2": DEEPSEEK2 | {"routed_scaling_factor": 16.0, "n_routing_groups": 8, "topk_routing_group": 3},
    "deepseek3": DEEPSEEK3 | {
        "routed_scaling_factor": 2.5, "n_routing_groups": 8, "topk_routing_group": 4, "router_group_score": "top2_sum",
    },
    "kimi": DEEPSEEK3 | {"routed_scaling_factor": 2.827},
    "gpt-oss": GPT_OSS,
    "olmo2": OLMO2,
    "olmo3": OLMO2,
    "olmoe": {"use_qk_norm": True, "qk_norm_type": "projection", "norm_topk_prob": False},
}  # fmt: skip
# The keys above, as they are in a Llama.
LLAMA = {
    "attention_bias": False, "attention_out_bias": False, "use_qk_norm": False, "qk_norm_type": "head",
    "query_pre_attn_scalar": None, "attn_logits_soft_cap": None, "attention_sink": False, "temperature_tuning": False,
    "attention_output_gate": False,
    "temperature_tuning_floor": 8192, "temperature_tuning_scale": 0.1,
    "mlp_activation": "silu", "mlp_activations_limit": 7.0, "glu_alpha": 1.702, "mlp_bias": False,
    "shared_expert_gate": False, "routed_score_func": "softmax", "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "use_v_norm": False, "share_kv_projections": False, "use_layer_scalar": False, "scaled_router": False,
    "routed_bias": False, "router_bias": False, "n_routing_groups": 1, "topk_routing_group": 1,
    "router_group_score": "max", "scale_expert_input": False,
    "norm_scale_offset": 0.0, "use_pre_norms": True, "use_post_norms": False, "scale_embeddings": False,
    "final_logits_soft_cap": None, "rope_interleave": False, "partial_rotary_factor": 1.0,
}  # fmt: skip
# Numbers that smoke=true makes smaller, as it does sizes.
SMALLER = ("n_routing_groups", "topk_routing_group", "temperature_tuning_floor")

# proportional: share of the pairs that turns. linear: factor. llama3: factor, low, high, original length. yarn: factor,
# original length, fast, slow, whole pairs.
SCALINGS = {
    "llama3.1": ("llama3", 8, 1, 4, 8192),
    "llama3.2": ("llama3", 32, 1, 4, 8192),
    "llama3.3": ("llama3", 8, 1, 4, 8192),
    "llama4-17b-16e": ("llama3", 8, 1, 4, 8192),
    "llama4-17b-16e-instruct": ("llama3", 16, 1, 1, 8192),
    "gemma3-4b": ("linear", 8),
    "gemma3-12b": ("linear", 8),
    "gemma3-27b": ("linear", 8),
    "gemma4": ("proportional", 0.25),
    "deepseek": ("yarn", 40, 4096, 32, 1, True),
    "kimi": ("yarn", 32, 4096, 1, 1, True),
    "gpt-oss": ("yarn", 32, 4096, 32, 1, False),
    "olmo3": ("yarn", 8, 8192, 32, 1, True),
}
# Base of local layers where it is their own; they are not scaled then.
LOCAL_THETAS = {"gemma3": 1e4, "gemma4": 1e4, "olmo3": 5e5}
# What yarn makes of cosine and sine, and of the scores of latent attention.
ROTATION_FACTORS = {"gpt-oss": 1.3466, "olmo3": 1.2079}
SOFTMAX_FACTORS = {"deepseek2": 1.590, "deepseek3": 1.874, "kimi": 1.813}


def of_family(table, name, default=None):
    keys = [key for key in table if name.startswith(key)]
    return table[max(keys, key=len)] if keys else default


@cache
def load(name: str, *overrides: str) -> Config:
    return load_config("base.yml", [f"model={name}", *overrides], {})


@pytest.mark.parametrize("size", ["full", "tiny"])
@pytest.mark.parametrize("name", model_names())
def test_switches(name, size):
    model = load(name, "smoke=true").model if size == "tiny" else load(name).model
    expected = LLAMA | of_family(SWITCHES, name)
    if size == "tiny":
        expected = {key: value for key, value in expected.items() if key not in SMALLER}
        assert (model.n_routing_groups > 1) == (load(name).model.n_routing_groups > 1)
        assert model.topk_routing_group < model.n_routing_groups or model.n_routing_groups == 1
    assert {key: getattr(model, key) for key in expected} == expected
    assert model.logits_via_embedding == any(name.startswith(beginning) for beginning in TIED)
    assert model.normalization_layer_epsilon == of_family(EPSILONS, name)
    assert model.max_position_embeddings == of_family(POSITIONS, name)


@pytest.mark.parametrize("size", ["full", "tiny"])
@pytest.mark.parametrize("name", model_names())
def test_rotary_tables(name, size):
    model = load(name, "smoke=true").model if size == "tiny" else load(name).model
    tables = rotary_tables(model)
    assert tables.keys() == set(model.attention_pattern) - {"nope", "gated_delta_net"}
    for kind, table in tables.items():
        width = (model.global_head_dim or model.head_dim) if kind == "full" else model.head_dim
        # Of a proportional rotation all pairs have a rate, some of them none.
        share = 1 if model.rope_type == "proportional" else model.partial_rotary_factor
        dim = model.qk_rope_head_dim if kind == "mla" else int(width * share)
        theta, scaling = of_family(THETAS, name), of_family(SCALINGS, name)
        factor = of_family(ROTATION_FACTORS, name, 1.0)
        if kind == "local" and of_family(LOCAL_THETAS, name) is not None:
            theta, scaling, factor = of_family(LOCAL_THETAS, name), None, 1.0
        np.testing.assert_allclose(table.inverse_frequencies, frequencies(dim, theta, scaling), rtol=1e-6)
        assert table.factor == pytest.approx(factor, abs=5e-5)


@pytest.mark.parametrize("name", ["deepseek2-lite-16b", "deepseek2-236b", "deepseek3-671b", "kimi-k2-1t"])
def test_yarn_also_sharpens_the_scores_of_latent_attention(name):
    scaling = rope_scaling(load(name).model)
    assert scaling.softmax_factor == pytest.approx(of_family(SOFTMAX_FACTORS, name), abs=5e-4)


def frequencies(dim: int, theta: float, scaling: tuple | None) -> list[float]:
    """Radians a position of each pair of features, one at a time, as the papers write them."""
    kind, *numbers = scaling or ("default",)
    rates = {"default": unscaled, "linear": linear, "llama3": llama3, "yarn": yarn, "proportional": proportional}
    rate = rates[kind]
    return [rate(pair, dim, theta, *numbers) for pair in range(dim // 2)]


def unscaled(pair, dim, theta):
    return 1 / theta ** (2 * pair / dim)


def proportional(pair, dim, theta, share):
    return unscaled(pair, dim, theta) if pair < share * dim / 2 else 0


def linear(pair, dim, theta, factor):
    return unscaled(pair, dim, theta) / factor


def llama3(pair, dim, theta, factor, low, high, original):
    rate = unscaled(pair, dim, theta)
    wavelength = 2 * np.pi / rate
    if wavelength > original / low:
        return rate / factor
    if wavelength < original / high:
        return rate
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * rate / factor + smooth * rate


def yarn(pair, dim, theta, factor, original, fast, slow, whole_pairs):
    # The pair that turns so often in the original length: theta^(2 pair/dim) = original / (2 pi turns).
    first, last = (np.log(original / (2 * np.pi * turns)) / np.log(theta) * dim / 2 for turns in (fast, slow))
    if whole_pairs:
        first, last = np.floor(first), np.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    # Where both are one, everything up to that pair is kept and everything after it is stretched.
    stretched = float(pair > first) if first == last else np.interp(pair, (first, last), (0, 1))
    return unscaled(pair, dim, theta) * (1 - stretched + stretched / factor)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


def best(scores, count):
    return np.argsort(-scores)[:count]


def after_choice(logits, bias, model):
    experts = best(logits, model.num_experts_per_tok)
    return experts, softmax(logits[experts])


def before_choice(logits, bias, model):
    experts = best(logits, model.num_experts_per_tok)
    return experts, softmax(logits)[experts]


def one_gate(logits, bias, model):
    expert = np.argmax(logits)
    return [expert], sigmoid(logits[[expert]])


def deepseek2_groups(logits, bias, model):
    scores = softmax(logits)
    groups = np.split(np.arange(scores.size), model.n_routing_groups)
    kept = best(np.array([scores[group].max() for group in groups]), model.topk_routing_group)
    allowed = np.concatenate([groups[group] for group in kept])
    experts = allowed[best(scores[allowed], model.num_experts_per_tok)]
    return experts, 16 * scores[experts]


def deepseek3_groups(logits, bias, model, factor=2.5):
    scores = sigmoid(logits)
    groups = np.split(np.arange(scores.size), model.n_routing_groups)
    kept = best(np.array([np.sort((scores + bias)[group])[-2:].sum() for group in groups]), model.topk_routing_group)
    allowed = np.concatenate([groups[group] for group in kept])
    experts = allowed[best((scores + bias)[allowed], model.num_experts_per_tok)]
    return experts, factor * scores[experts] / scores[experts].sum()


def kimi(logits, bias, model):
    return deepseek3_groups(logits, bias, model, factor=2.827)


ROUTERS = {
    "gemma4-26b-a4b": after_choice,
    "llama4-17b-16e": one_gate, "llama4-17b-16e-instruct": one_gate, "llama4-17b-128e": one_gate,
    "mixtral-8x7b": after_choice, "mixtral-8x22b": after_choice,
    "qwen2-57b-a14b": before_choice, "qwen1.5-moe-a2.7b": before_choice,
    "qwen3-30b-a3b": after_choice, "qwen3-30b-a3b-2507": after_choice, "qwen3-235b-a22b": after_choice,
    "qwen3-235b-a22b-2507": after_choice, "qwen3-coder-480b-a35b": after_choice,
    "qwen3-next-80b-a3b": after_choice, "qwen3.5-35b-a3b": after_choice, "qwen3.5-397b-a17b": after_choice,
    "deepseek2-lite-16b": before_choice, "deepseek2-236b": deepseek2_groups, "deepseek3-671b": deepseek3_groups,
    "kimi-k2-1t": kimi, "gpt-oss-20b": after_choice, "gpt-oss-120b": after_choice, "olmoe-1b-7b": before_choice,
}  # fmt: skip


@pytest.mark.parametrize("name", ROUTERS)
def test_routers(name):
    model = load(name, "smoke=true").model
    rule = RoutingRule(
        model.num_experts_per_tok, model.routed_score_func, model.norm_topk_prob, model.routed_scaling_factor,
        model.n_routing_groups, model.topk_routing_group, model.router_group_score,
    )  # fmt: skip
    random = np.random.default_rng(0)
    logits = random.normal(size=(32, model.num_experts)).astype(np.float32)
    bias = random.normal(size=model.num_experts).astype(np.float32)
    weights, experts = route(rule, logits, bias if model.routed_bias else None)[:2]
    for token, row in enumerate(logits):
        expected_experts, expected_weights = ROUTERS[name](row.astype(float), bias.astype(float), model)
        np.testing.assert_array_equal(experts[token], expected_experts)
        np.testing.assert_allclose(weights[token], expected_weights, rtol=1e-5)
