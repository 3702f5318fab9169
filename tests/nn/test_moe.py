"""The layer against loops in numpy float64 for each family's settings; and against transformers' own blocks."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

from maxlite.nn.moe import DenseAndMoE, MoE
from maxlite.parallel.sharding import partition_spec, use_mesh
from maxlite.parallel.topology import build_topology, without_compile_cache
from tests.nn.layers import filled, in_float64, run, weights_of

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
IN_FLOAT32 = INPUT.astype(np.float32)


def build(tiny_config, *overrides, dtype="float32", kind=MoE):
    keys = dict(text.split("=") for text in (*SIZES, *overrides, f"dtype={dtype}"))
    config = tiny_config(*(f"{key}={value}" for key, value in keys.items()))
    return filled(kind(config.model, config.compute, rngs=None)), config.model


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


# One layer for several tests, by which what they expect comes from one program.
COMMON = (*GPT_OSS, "norm_topk_prob=false", "shared_expert_mlp_dim=20", "shared_expert_gate=true")
# Name: degrees, settings.
MESHES = {
    "expert": ({"expert": 8}, GPT_OSS),
    "expert, fsdp": ({"expert": 4, "fsdp": 2}, DEEPSEEK3),
    "expert, tensor, fsdp": ({"expert": 2, "tensor": 2, "fsdp": 2}, COMMON),
    "context, expert, data": ({"context": 2, "expert": 2, "data": 2}, COMMON),
    "fsdp, context, tensor": ({"fsdp": 2, "context": 2, "tensor": 2}, (*GEMMA4, "mlp_bias=true")),
    "scaled inputs": ({"expert": 2, "tensor": 2}, LLAMA4),
    "all to one expert": ({"expert": 4, "tensor": 2}, ("router_bias=true", "num_experts_per_tok=1")),
    "capacity": ({"expert": 2, "tensor": 2, "data": 2}, (*DEEPSEEK3, "capacity_factor=0.75")),
}
AXES = ("data", "stage", "fsdp", "context", "expert", "tensor")


def mesh_of(degrees, devices=None):
    shape = [degrees.get(axis, 1) for axis in AXES]
    devices = np.array((devices or jax.devices())[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 6)


def placed_on(mesh, rules, state, *leading):
    """Each weight where its logical axes say, with `leading` ones in front."""

    def place(leaf):
        spec = partition_spec((*leading, *leaf.get_metadata()["axes"]), rules)
        return leaf.replace(jax.device_put(leaf.get_raw_value(), NamedSharding(mesh, spec)))

    return jax.tree.map(place, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def packed(generator, num_rows=8, length=12):
    """x [B, T, D], and segment ids [B, T] with padding, one row being padding alone."""
    segment_ids = np.ones((num_rows, length), np.int32)
    segment_ids[1, 7:] = segment_ids[3] = segment_ids[6, 10:] = 0
    segment_ids[2, 5:] = 2
    return generator.normal(size=(num_rows, length, DIM)).astype(np.float32), segment_ids


def assert_equal(results, expected):
    for left, right in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, np.max(np.abs(right)))
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-5 * scale)


def loss(graphdef, state, x, segment_ids):
    y, stats = nnx.merge(graphdef, state)(x, segment_ids)
    return jnp.sum(jnp.sin(y)) + 0.3 * stats.balance, (y, stats)


def with_gradients(loss):
    """A program of its own: one that was traced without a mesh must not serve with it."""
    return jax.jit(jax.value_and_grad(loss, (1, 2), has_aux=True), static_argnums=0)


on_one_device = with_gradients(loss)
# The others are run by CI.
QUICK = ("expert, tensor, fsdp", "context, expert, data")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MESHES])
def test_on_a_mesh(name, tiny_config):
    degrees, overrides = MESHES[name]
    rules = tiny_config().parallel.logical_axis_rules
    layer, _ = build(tiny_config, *overrides)
    graphdef, state = nnx.split(layer)
    if name == "all to one expert":
        state["router"]["bias"] = state["router"]["bias"].replace(np.float32(99 * (np.arange(EXPERTS) == 5)))
    x, segment_ids = packed(np.random.default_rng(3))
    expected = on_one_device(graphdef, state, x, segment_ids)
    assert np.sum(expected[0][1][1].load) == np.sum(segment_ids != 0) * layer.rule.num_experts_per_tok
    mesh = mesh_of(degrees)
    with use_mesh(mesh, rules):
        placed = placed_on(mesh, rules, state)
        batch = jax.device_put(x, NamedSharding(mesh, partition_spec(("batch", "length", "activation_embed"), rules)))
        results = with_gradients(loss)(graphdef, placed, batch, segment_ids)
    assert_equal(results, expected)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3)])
def test_rows_and_lengths_that_a_mesh_does_not_divide(shape, tiny_config):
    rules = tiny_config().parallel.logical_axis_rules
    layer, _ = build(tiny_config, *GPT_OSS)
    graphdef, state = nnx.split(layer)
    x = np.random.default_rng(3).normal(size=(*shape, DIM)).astype(np.float32)
    expected = run(layer, x, None)
    mesh = mesh_of({"expert": 2, "context": 2, "tensor": 2})
    with use_mesh(mesh, rules):
        placed = placed_on(mesh, rules, state)
        results = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x, None))(placed, x)
    assert_equal(results, expected)


def test_within_checkpoints_of_stages(tiny_config):
    """Two layers at a time, each on its own rows; and each of them alone."""
    rules = tiny_config().parallel.logical_axis_rules
    graphdef, first = nnx.split(build(tiny_config, *COMMON)[0])
    second = jax.tree.map(lambda leaf: 0.5 * leaf, first)
    x, segment_ids = packed(np.random.default_rng(3))
    alone = [on_one_device(graphdef, first, x, segment_ids), on_one_device(graphdef, second, x[::-1], segment_ids)]
    (total, made), (gradients, x_gradients) = jax.tree.map(lambda *leaves: np.stack(leaves), *alone)
    expected = (total.sum(), made), (gradients, x_gradients[0] + x_gradients[1, ::-1])

    def staged(graphdef, stacked, x, segment_ids):
        layer = jax.checkpoint(functools.partial(loss, graphdef))
        totals, made = jax.vmap(layer, (0, 0, None), spmd_axis_name="stage")(
            stacked, jnp.stack([x, x[::-1]]), segment_ids
        )
        return jnp.sum(totals), made

    mesh = mesh_of({"expert": 2, "tensor": 2, "stage": 2})
    with use_mesh(mesh, rules):
        placed = placed_on(mesh, rules, jax.tree.map(lambda *leaves: np.stack(leaves), first, second), "layers")
        results = with_gradients(staged)(graphdef, placed, x, segment_ids)
    assert_equal(results, expected)


@pytest.mark.slow
def test_within_checkpoints_of_a_scan(tiny_config):
    rules = tiny_config().parallel.logical_axis_rules
    graphdef, first = nnx.split(build(tiny_config, *GPT_OSS)[0])
    stacked = jax.tree.map(lambda leaf: np.stack([leaf, 0.5 * leaf]), first)
    x, segment_ids = packed(np.random.default_rng(3))

    def scanned(graphdef, stacked, x, segment_ids):
        def block(x, state):
            y, stats = nnx.merge(graphdef, state)(x, segment_ids)
            return x + jnp.tanh(y), stats

        y, stats = jax.lax.scan(jax.checkpoint(block, prevent_cse=False), x, stacked)
        return jnp.sum(jnp.sin(y)) + jnp.sum(stats.balance), (y, stats)

    expected = with_gradients(scanned)(graphdef, stacked, x, segment_ids)
    mesh = mesh_of({"expert": 2, "tensor": 2, "fsdp": 2})
    with use_mesh(mesh, rules):
        placed = placed_on(mesh, rules, stacked, "layers")
        results = with_gradients(scanned)(graphdef, placed, x, segment_ids)
    assert_equal(results, expected)


@pytest.mark.tpu
def test_compiled_for_tpus(tiny_config):
    """Experts, their width and their input's width cut: a ragged exchange, and no layer's kernel outside its turn."""
    config = tiny_config(
        "mlp_pattern=moe", "emb_dim=256", "num_experts=8", "moe_mlp_dim=512", "num_experts_per_tok=2", "dtype=bfloat16"
    )
    rules, layers = config.parallel.logical_axis_rules, 3
    graphdef, state = nnx.split(MoE(config.model, config.compute, rngs=None))
    mesh = mesh_of({"fsdp": 2, "expert": 2, "tensor": 2}, build_topology("v5e-8", 1).devices)

    def loss(state, x):
        def block(x, state):
            y, stats = nnx.merge(graphdef, state)(x, None)
            return x + y, stats

        y, stats = jax.lax.scan(jax.checkpoint(block, prevent_cse=False), x, state)
        return jnp.sum(y.astype(jnp.float32)) + jnp.sum(stats.balance)

    def stacked(leaf):
        spec = partition_spec(("layers", *leaf.get_metadata()["axes"]), rules)
        shape = leaf.get_raw_value()
        return leaf.replace(
            jax.ShapeDtypeStruct((layers, *shape.shape), shape.dtype, sharding=NamedSharding(mesh, spec))
        )

    with use_mesh(mesh, rules), without_compile_cache():
        state = jax.tree.map(stacked, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        sharding = NamedSharding(mesh, partition_spec(("batch", "norm_length", None), rules))
        x = jax.ShapeDtypeStruct((8, 128, 256), jnp.bfloat16, sharding=sharding)
        program = jax.jit(jax.grad(loss)).lower(state, x).compile().as_text()
    # There and home, in the forward pass, again, and in the backward pass.
    assert len(re.findall(r" ragged-all-to-all(?:-start)?\(", program)) == 6
    # E/2, D/2, F/2 of a kernel lie here; D is gathered. Rounded kernels of all layers would stand in front.
    assert "bf16[4,256,256]" in program
    assert not re.search(r"bf16\[3,4,(128|256),(128|256)\]", program)


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
