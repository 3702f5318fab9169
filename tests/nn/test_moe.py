"""The layer against loops in numpy float64 for each family's settings; and against transformers' own blocks."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

from maxlite.nn.moe import DenseAndMoE, MoE
from maxlite.parallel.sharding import partition_spec, use_mesh

BATCH, LENGTH, DIM, HIDDEN, EXPERTS = 2, 9, 16, 12, 8
SIZES = (
    "mlp_pattern=moe", f"emb_dim={DIM}", f"num_experts={EXPERTS}", f"moe_mlp_dim={HIDDEN}", "num_experts_per_tok=2",
)  # fmt: skip
GPT_OSS = (
    "mlp_activation=swigluoai", "mlp_bias=true", "router_bias=true", "mlp_activations_limit=0.7", "glu_alpha=1.702",
    "num_experts_per_tok=3",
)  # fmt: skip
DEEPSEEK3 = (
    "routed_score_func=sigmoid", "routed_bias=true", "routed_scaling_factor=2.5", "n_routing_groups=4",
    "topk_routing_group=2", "router_group_score=top2_sum", "shared_expert_mlp_dim=10", "num_experts_per_tok=3",
)  # fmt: skip
LLAMA4 = (
    "routed_score_func=sigmoid", "norm_topk_prob=false", "scale_expert_input=true", "shared_expert_mlp_dim=12",
    "num_experts_per_tok=1",
)  # fmt: skip
QWEN2 = ("norm_topk_prob=false", "shared_expert_mlp_dim=20", "shared_expert_gate=true")
GEMMA4 = ("scaled_router=true", "mlp_activation=gelu_tanh", "num_experts_per_tok=3", "normalization_layer_epsilon=0.1")
CASES = {"mixtral": (), "gemma4": GEMMA4, "qwen2": QWEN2, "gpt-oss": GPT_OSS, "deepseek3": DEEPSEEK3, "llama4": LLAMA4}
INPUT = np.random.default_rng(0).normal(size=(BATCH, LENGTH, DIM))


def build(tiny_config, *overrides, dtype="float32", kind=MoE):
    """The layer with noise in every weight: biases of zeros would hide mistakes."""
    keys = dict(text.split("=") for text in (*SIZES, *overrides, f"dtype={dtype}"))
    config = tiny_config(*(f"{key}={value}" for key, value in keys.items()))
    layer = kind(config.model, config.compute, rngs=nnx.Rngs(params=jax.random.key(0)))
    graphdef, state = nnx.split(layer)
    generator = np.random.default_rng(1)
    state = jax.tree.map(lambda leaf: leaf + jnp.asarray(generator.normal(size=leaf.shape) * 0.2, leaf.dtype), state)
    return nnx.merge(graphdef, state), config.model


def weights_of(layer):
    """{"experts/gate/kernel": array, ...}."""
    return {"/".join(path): leaf.get_raw_value() for path, leaf in nnx.to_flat_state(nnx.state(layer))}


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
    np.testing.assert_allclose(layer(jnp.asarray(INPUT, jnp.float32)), expected, atol=2e-5)


@pytest.mark.parametrize("case", CASES)
def test_bfloat16(case, tiny_config):
    layer, model = build(tiny_config, *CASES[case], dtype="bfloat16")
    x = jnp.asarray(INPUT, jnp.bfloat16)
    y = layer(x)
    assert y.dtype == jnp.bfloat16
    # The router sees the rounded input, so the reference gets it too, and chooses the same experts.
    expected = reference(model, weights_of(layer), np.asarray(x, np.float64))
    assert np.abs(np.asarray(y, np.float64) - expected).max() < 0.02 * np.abs(expected).max()


def test_dense_and_experts_side_by_side(tiny_config):
    layer, model = build(
        tiny_config, *GEMMA4, "mlp_pattern=dense_and_moe", "mlp_dim=20", "use_post_norms=true", kind=DenseAndMoE
    )
    weights = {name: np.asarray(array, np.float64) for name, array in weights_of(layer).items()}
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
    np.testing.assert_allclose(layer(jnp.asarray(INPUT, jnp.float32)), expected, atol=2e-5)


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
    weights = weights_of(MoE(config.model, config.compute, rngs=nnx.Rngs(params=jax.random.key(0))))
    for name, fan_in in (("router", 64), ("experts/gate", 64), ("experts/down", 256)):
        assert math.isclose(np.std(weights[f"{name}/kernel"]), fan_in**-0.5, rel_tol=0.1)
    assert not weights["experts/gate/bias"].any() and not weights["selection_bias"].any()


def total(graphdef, params, x):
    return jnp.sum(jnp.sin(nnx.merge(graphdef, params)(x)))


def test_gradients_against_differences(tiny_config):
    """Along random directions, of every weight and of the input; experts do not change places on so short a way."""
    layer, model = build(tiny_config, *QWEN2, "router_bias=true", "mlp_bias=true")
    graphdef, state = nnx.split(layer)
    x = jnp.asarray(INPUT, jnp.float32)
    gradients, x_gradient = jax.grad(total, (1, 2))(graphdef, state, x)
    flat = {"/".join(path): leaf.get_raw_value() for path, leaf in nnx.to_flat_state(gradients)}
    weights = {name: np.asarray(array, np.float64) for name, array in weights_of(layer).items()}
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


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 2, 1)])
def test_on_a_mesh(shape, tiny_config):
    rules = tiny_config().parallel.logical_axis_rules
    layer, _ = build(tiny_config, *GPT_OSS, "shared_expert_mlp_dim=20", "routed_bias=true")
    graphdef, state = nnx.split(layer)
    x = jnp.asarray(INPUT.repeat(2, axis=0), jnp.float32)
    expected = jax.jit(jax.value_and_grad(total, (1, 2)), static_argnums=0)(graphdef, state, x)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(shape), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    with use_mesh(mesh, rules):
        placed = jax.tree.map(
            lambda leaf: leaf.replace(
                jax.device_put(
                    leaf.get_raw_value(), NamedSharding(mesh, partition_spec(leaf.get_metadata()["axes"], rules))
                )
            ),
            state,
            is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
        )
        batch = jax.device_put(x, NamedSharding(mesh, partition_spec(("batch", "length", "activation_embed"), rules)))
        results = jax.jit(jax.value_and_grad(total, (1, 2)), static_argnums=0)(graphdef, placed, batch)
    for left, right in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, atol=2e-5)


@pytest.mark.parametrize("name", ["moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"])
def test_remat_policies_find_the_names(name, tiny_config):
    layer, _ = build(tiny_config)
    program = str(jax.make_jaxpr(lambda x: layer(x))(jnp.asarray(INPUT, jnp.float32)))
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
    ours = layer(jnp.asarray(INPUT, jnp.float32))
    np.testing.assert_allclose(ours, expected.numpy().reshape(INPUT.shape), rtol=1e-5, atol=2e-5)
