"""The layer against loops in numpy float64 for each family's settings; and against transformers' own blocks."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlite.nn.moe import DenseAndMoE, MoE
from tests.nn.layers import in_float64, run, weights_of
from tests.nn.moe_settings import BATCH, DEEPSEEK3, DIM, EXPERTS, GEMMA4, GPT_OSS, HIDDEN, LENGTH, LLAMA4, QWEN2, build

CASES = {"mixtral": (), "gemma4": GEMMA4, "qwen2": QWEN2, "gpt-oss": GPT_OSS, "deepseek3": DEEPSEEK3, "llama4": LLAMA4}
INPUT = np.random.default_rng(0).normal(size=(BATCH, LENGTH, DIM))
IN_FLOAT32 = INPUT.astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def mlp(model, weights, prefix, x, expert=None):
    def linear(name, x):
        kernel, bias = weights[f"{prefix}/{name}/kernel"], weights.get(f"{prefix}/{name}/bias", 0.0)
        return (
            x @ kernel + bias if expert is None else x @ kernel[expert] + (bias if np.isscalar(bias) else bias[expert])
        )

    gate, up = linear("gate", x), linear("up", x)
    if model.mlp_activation == "gelu_tanh":
        return linear("down", 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up)
    if model.mlp_activation == "swigluoai":
        gate, up = np.minimum(gate, 0.7), np.clip(up, -0.7, 0.7)
        return linear("down", gate * sigmoid(1.702 * gate) * (up + 1))
    return linear("down", gate * sigmoid(gate) * up)


def normed(model, x, scale):
    return x / np.sqrt(np.mean(x**2) + model.normalization_layer_epsilon) * scale


def choose(model, weights, x):
    """Experts and weights of one token, as the settings of the cases say."""
    if model.scaled_router:
        x = normed(model, x, weights["router/scale"]) / np.sqrt(DIM)
    logits = x @ weights["router/kernel"] + weights.get("router/bias", 0.0)
    scores = sigmoid(logits) if model.routed_score_func == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    choice = scores + weights.get("selection_bias", 0.0)
    allowed = list(range(EXPERTS))
    if model.n_routing_groups == 4:
        best = np.argsort([-choice[2 * group : 2 * group + 2].sum() for group in range(4)])[:2]
        allowed = [expert for expert in allowed if expert // 2 in best]
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[: model.num_experts_per_tok]
    total = sum(scores[expert] for expert in chosen) if model.norm_topk_prob else 1.0
    factors = weights.get("expert_scale", np.ones(EXPERTS)) * model.routed_scaling_factor
    return [(expert, scores[expert] / total * factors[expert]) for expert in chosen]


def reference(model, weights, inputs):
    weights = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    y = np.zeros_like(inputs)
    for place in np.ndindex(BATCH, LENGTH):
        x = inputs[place]
        for expert, weight in choose(model, weights, x):
            if model.scale_expert_input:
                y[place] += mlp(model, weights, "experts", x * weight, expert)
            else:
                y[place] += mlp(model, weights, "experts", x, expert) * weight
        if "shared/gate/kernel" in weights:
            gate = sigmoid(x @ weights["shared_gate/kernel"]) if "shared_gate/kernel" in weights else 1.0
            y[place] += gate * mlp(model, weights, "shared", x)
    return y


@pytest.mark.parametrize("case", CASES)
def test_against_numpy(case, tiny_config):
    layer, model = build(tiny_config, *CASES[case])
    expected = reference(model, weights_of(layer), INPUT)
    np.testing.assert_allclose(run(layer, IN_FLOAT32, None)[0], expected, atol=2e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case != "mixtral"])
def test_bfloat16(case, tiny_config):
    layer, model = build(tiny_config, *CASES[case], dtype="bfloat16")
    x = INPUT.astype(jnp.bfloat16)
    y, _ = run(layer, x, None)
    assert y.dtype == jnp.bfloat16
    # The router sees the rounded input, so the reference gets it too, and chooses the same experts.
    expected = reference(model, weights_of(layer), np.asarray(x, np.float64))
    assert np.abs(np.asarray(y, np.float64) - expected).max() < 0.02 * np.abs(expected).max()


def test_dense_and_experts_side_by_side(tiny_config):
    layer, model = build(
        tiny_config, *GEMMA4, "mlp_pattern=dense_and_moe", "mlp_dim=20", "use_post_norms=true", kind=DenseAndMoE
    )
    weights = in_float64(layer)
    experts = {name.removeprefix("moe/"): array for name, array in weights.items()}
    expected = np.zeros_like(INPUT)
    for place in np.ndindex(BATCH, LENGTH):
        x = INPUT[place]
        dense = mlp(model, weights, "dense", normed(model, x, weights["dense_norm/scale"]))
        inside = normed(model, x, weights["moe_norm/scale"])
        # The router sees what the norms of neither have touched.
        chosen = choose(model, experts, x)
        routed = sum(weight * mlp(model, experts, "experts", inside, expert) for expert, weight in chosen)
        expected[place] = normed(model, dense, weights["dense_post_norm/scale"])
        expected[place] += normed(model, routed, weights["moe_post_norm/scale"])
    np.testing.assert_allclose(run(layer, IN_FLOAT32, None)[0], expected, atol=2e-5)


def test_parameters(tiny_config):
    layer, _ = build(tiny_config, *GPT_OSS, "routed_bias=true", "shared_expert_mlp_dim=20", "shared_expert_gate=true",
                     "weight_dtype=bfloat16")  # fmt: skip
    weights = weights_of(layer)
    wide, narrow, one = (DIM, HIDDEN), (HIDDEN, DIM), (EXPERTS,)
    assert {name: array.shape for name, array in weights.items()} == {
        "router/kernel": (DIM, EXPERTS), "router/bias": one, "selection_bias": one,
        "experts/gate/kernel": one + wide, "experts/up/kernel": one + wide, "experts/down/kernel": one + narrow,
        "experts/gate/bias": (EXPERTS, HIDDEN), "experts/up/bias": (EXPERTS, HIDDEN),
        "experts/down/bias": (EXPERTS, DIM),
        "shared/gate/kernel": (DIM, 20), "shared/up/kernel": (DIM, 20), "shared/down/kernel": (20, DIM),
        "shared/gate/bias": (20,), "shared/up/bias": (20,), "shared/down/bias": (DIM,), "shared_gate/kernel": (DIM, 1),
    }  # fmt: skip
    assert {name for name, array in weights.items() if array.dtype == jnp.float32} == {"selection_bias"}
    axes = {"/".join(path): leaf.get_metadata()["axes"] for path, leaf in nnx.to_flat_state(nnx.state(layer))}
    assert axes["experts/gate/kernel"] == axes["experts/up/kernel"] == ("exp", "embed", "mlp")
    assert axes["experts/down/kernel"] == ("exp", "mlp", "embed")
    assert axes["experts/down/bias"] == ("exp", "embed")
    assert axes["router/kernel"] == ("embed", "exp")


def test_initial_values(tiny_config):
    config = tiny_config(
        "mlp_pattern=moe", "num_experts=8", "num_experts_per_tok=2", "emb_dim=64", "moe_mlp_dim=256", "mlp_bias=true",
        "routed_bias=true",
    )  # fmt: skip
    state = jax.jit(lambda key: nnx.state(MoE(config.model, config.compute, rngs=nnx.Rngs(params=key))))
    weights = {"/".join(path): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(state(jax.random.key(0)))}
    for name, fan_in in (("router", 64), ("experts/gate", 64), ("experts/down", 256)):
        assert math.isclose(np.std(weights[f"{name}/kernel"]), fan_in**-0.5, rel_tol=0.1)
    assert not weights["experts/gate/bias"].any() and not weights["selection_bias"].any()


BIASED = (*QWEN2, "router_bias=true", "mlp_bias=true")


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.value_and_grad, argnums=(1, 2))
def total(graphdef, params, x):
    return jnp.sum(jnp.sin(nnx.merge(graphdef, params)(x, None)[0]))


def test_gradients_against_differences(tiny_config):
    """Along random directions, of every weight and of the input; experts do not change places on so short a way."""
    layer, model = build(tiny_config, *BIASED)
    _, (gradients, x_gradient) = total(*nnx.split(layer), IN_FLOAT32)
    flat = {"/".join(path): leaf.get_raw_value() for path, leaf in nnx.to_flat_state(gradients)}
    weights = in_float64(layer)
    generator = np.random.default_rng(2)
    for name in (*weights, "input"):
        gradient = x_gradient if name == "input" else flat[name]
        direction = generator.normal(size=gradient.shape)
        direction *= 1e-5 / np.linalg.norm(direction)
        sides = []
        for sign in (1, -1):
            moved = weights if name == "input" else weights | {name: weights[name] + sign * direction}
            inputs = INPUT + sign * direction if name == "input" else INPUT
            sides.append(np.sin(reference(model, moved, inputs)).sum())
        expected = (sides[0] - sides[1]) / 2e-5
        np.testing.assert_allclose(np.sum(gradient * direction) / 1e-5, expected, rtol=1e-3, atol=1e-4)


def test_capacity_that_drops_nothing_changes_nothing(tiny_config):
    layer, _ = build(tiny_config, *BIASED)
    roomy, _ = build(tiny_config, *BIASED, "capacity_factor=8")
    expected, results = total(*nnx.split(layer), IN_FLOAT32), total(*nnx.split(roomy), IN_FLOAT32)
    for left, right in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, atol=2e-5)


def test_what_is_over_capacity_leaves_a_token_with_its_other_experts(tiny_config):
    layer, model = build(tiny_config, "capacity_factor=0.5")
    weights = in_float64(layer)
    room = math.ceil(0.5 * LENGTH * 2 / EXPERTS)
    expected, num_dropped = np.zeros_like(INPUT), 0
    segment_ids = np.ones((BATCH, LENGTH), np.int32)
    segment_ids[1, :2] = 0
    for row in range(BATCH):
        taken = np.zeros(EXPERTS, int)
        for position in np.flatnonzero(segment_ids[row]):
            x = INPUT[row, position]
            for expert, weight in choose(model, weights, x):
                taken[expert] += 1
                num_dropped += taken[expert] > room
                if taken[expert] <= room:
                    expected[row, position] += mlp(model, weights, "experts", x, expert) * weight
    assert num_dropped > 3
    y, stats = run(layer, IN_FLOAT32, segment_ids)
    np.testing.assert_allclose(y, expected, atol=2e-5)
    # What is dropped was chosen all the same.
    assert np.sum(stats.load) == 2 * segment_ids.sum()


@pytest.mark.parametrize("name", ["moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"])
def test_remat_policies_find_the_names(name, tiny_config):
    layer, _ = build(tiny_config)
    program = str(jax.make_jaxpr(lambda x: layer(x, None))(IN_FLOAT32))
    assert program.count(f"name={name}\n") + program.count(f"name={name}]") == 1


# For each kind of model: its block's class, its settings, maxlite's.
TRANSFORMERS = {
    "mixtral": ("MixtralSparseMoeBlock", dict(num_local_experts=8, intermediate_size=HIDDEN), ()),
    "qwen2_moe": (
        "Qwen2MoeSparseMoeBlock",
        dict(num_experts=8, moe_intermediate_size=HIDDEN, shared_expert_intermediate_size=20, num_experts_per_tok=2),
        QWEN2,
    ),
    "qwen3_moe": (
        "Qwen3MoeSparseMoeBlock",
        dict(num_experts=8, moe_intermediate_size=HIDDEN, num_experts_per_tok=2, norm_topk_prob=True),
        (),
    ),
    "olmoe": (
        "OlmoeSparseMoeBlock",
        dict(num_experts=8, intermediate_size=HIDDEN, num_experts_per_tok=2, norm_topk_prob=False),
        ("norm_topk_prob=false",),
    ),
    "deepseek_v2": (
        "DeepseekV2Moe",
        dict(n_routed_experts=8, moe_intermediate_size=HIDDEN, n_shared_experts=2, num_experts_per_tok=3, n_group=4,
             topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=16.0),
        ("norm_topk_prob=false", "routed_scaling_factor=16", "n_routing_groups=4", "topk_routing_group=2",
         "num_experts_per_tok=3", "shared_expert_mlp_dim=24"),
    ),
    "deepseek_v3": (
        "DeepseekV3MoE",
        dict(n_routed_experts=8, moe_intermediate_size=HIDDEN, n_shared_experts=1, num_experts_per_tok=3, n_group=4,
             topk_group=2, routed_scaling_factor=2.5),
        (*DEEPSEEK3, "shared_expert_mlp_dim=12"),
    ),
    "gpt_oss": (
        "GptOssMLP",
        dict(num_local_experts=8, intermediate_size=HIDDEN, num_experts_per_tok=3, swiglu_limit=0.7),
        GPT_OSS,
    ),
    "llama4_text": (
        "Llama4TextMoe",
        dict(num_local_experts=8, intermediate_size=HIDDEN, num_experts_per_tok=1),
        LLAMA4,
    ),
}  # fmt: skip


def tensors_for_transformers(kind, weights):
    """Our weights under their names: gate and up are one tensor there, stored [out, in] but for two families."""
    weights = {name: np.asarray(array) for name, array in weights.items()}
    gate, up, down = (weights[f"experts/{name}/kernel"] for name in ("gate", "up", "down"))
    router, both = weights["router/kernel"].T, np.concatenate([gate, up], axis=-1)
    if kind == "gpt_oss":
        biases = np.stack([weights["experts/gate/bias"], weights["experts/up/bias"]], axis=-1).reshape(EXPERTS, -1)
        return {
            "router.weight": router, "router.bias": weights["router/bias"],
            "experts.gate_up_proj": np.stack([gate, up], axis=-1).reshape(EXPERTS, DIM, -1),
            "experts.gate_up_proj_bias": biases, "experts.down_proj": down,
            "experts.down_proj_bias": weights["experts/down/bias"],
        }  # fmt: skip
    if kind == "llama4_text":
        tensors = {"router.weight": router, "experts.gate_up_proj": both, "experts.down_proj": down}
    else:
        tensors = {
            "gate.weight": router,
            "experts.gate_up_proj": both.swapaxes(1, 2),
            "experts.down_proj": down.swapaxes(1, 2),
        }
    if "selection_bias" in weights:
        tensors["gate.e_score_correction_bias"] = weights["selection_bias"]
    shared = "shared_experts" if kind.startswith("deepseek") else "shared_expert"
    for name in ("gate", "up", "down"):
        if f"shared/{name}/kernel" in weights:
            tensors[f"{shared}.{name}_proj.weight"] = weights[f"shared/{name}/kernel"].T
    if "shared_gate/kernel" in weights:
        tensors["shared_expert_gate.weight"] = weights["shared_gate/kernel"].T
    return tensors


@pytest.mark.torch
@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_against_transformers(kind, tiny_config):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    name, settings, overrides = TRANSFORMERS[kind]
    layer, _ = build(tiny_config, *overrides)
    config = transformers.AutoConfig.for_model(kind, hidden_size=DIM, num_attention_heads=4, **settings)
    file = kind.removesuffix("_text")
    module = getattr(__import__(f"transformers.models.{file}.modeling_{file}", fromlist=["x"]), name)(config).eval()
    tensors = tensors_for_transformers(kind, weights_of(layer))
    module.load_state_dict({key: torch.tensor(np.ascontiguousarray(array)) for key, array in tensors.items()})
    with torch.no_grad():
        expected = module(torch.tensor(INPUT, dtype=torch.float32))
    expected = expected[0] if isinstance(expected, tuple) else expected
    ours = run(layer, IN_FLOAT32, None)[0]
    np.testing.assert_allclose(ours, expected.numpy().reshape(INPUT.shape), rtol=1e-5, atol=2e-5)
