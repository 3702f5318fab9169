"""Routing against loops in numpy, written from each family's own rule; and against transformers itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.ops.router import RoutingRule, route, router_stats, updated_bias

TOKENS, EXPERTS = 40, 16

routed = jax.jit(route, static_argnums=0)


def softmax(x):
    e = np.exp(x - np.max(x))
    return e / e.sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def best(scores, k):
    return list(np.argsort(-np.asarray(scores), kind="stable")[:k])


def mixtral(logits, bias):
    """Softmax over all, the two best, renormalized. Qwen3-MoE too."""
    p = softmax(logits)
    chosen = best(p, 2)
    return chosen, p[chosen] / p[chosen].sum()


def qwen2(logits, bias):
    """As it was before renormalization. OLMoE too."""
    p = softmax(logits)
    chosen = best(p, 3)
    return chosen, p[chosen]


def gpt_oss(logits, bias):
    """Softmax over the chosen logits only."""
    chosen = best(logits, 4)
    return chosen, softmax(logits[chosen])


def llama4(logits, bias):
    chosen = best(logits, 1)
    return chosen, sigmoid(logits[chosen])


def deepseek2_lite(logits, bias):
    p = softmax(logits)
    chosen = best(p, 3)
    return chosen, p[chosen] * 1.5


def deepseek2(logits, bias):
    """Groups of four by their best expert; two groups stay."""
    p = softmax(logits)
    groups = best([max(p[4 * g : 4 * g + 4]) for g in range(4)], 2)
    allowed = [e for e in range(16) if e // 4 in groups]
    chosen = [allowed[i] for i in best(p[allowed], 3)]
    return chosen, p[chosen] * 16.0


def deepseek3(logits, bias):
    """Groups of four by the sum of their two best; chosen with the bias, weighed without."""
    s = sigmoid(logits)
    biased = s + bias
    groups = best([np.sort(biased[4 * g : 4 * g + 4])[-2:].sum() for g in range(4)], 2)
    allowed = [e for e in range(16) if e // 4 in groups]
    chosen = [allowed[i] for i in best(biased[allowed], 5)]
    return chosen, s[chosen] / s[chosen].sum() * 2.5


FAMILIES = {
    "mixtral": (mixtral, RoutingRule(2, "softmax", norm_topk_prob=True)),
    "qwen2": (qwen2, RoutingRule(3, "softmax")),
    "gpt-oss": (gpt_oss, RoutingRule(4, "softmax", norm_topk_prob=True)),
    "llama4": (llama4, RoutingRule(1, "sigmoid")),
    "deepseek2-lite": (deepseek2_lite, RoutingRule(3, "softmax", scaling_factor=1.5)),
    "deepseek2": (deepseek2, RoutingRule(3, "softmax", scaling_factor=16.0, num_groups=4, topk_group=2)),
    "deepseek3": (deepseek3, RoutingRule(5, "sigmoid", True, 2.5, 4, 2, "top2_sum")),
}


def random_logits(seed=0):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(TOKENS, EXPERTS)) * 2, generator.normal(size=EXPERTS) * 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_against_numpy(family):
    reference, rule = FAMILIES[family]
    logits, bias = random_logits()
    # A bias so low that every biased score is negative: experts outside the kept groups stay out all the same.
    biases = (bias, bias - 5.0) if family == "deepseek3" else (None,)
    for bias in biases:
        given = None if bias is None else bias.astype(np.float32)
        weights, experts, _ = jax.tree.map(np.asarray, tuple(routed(rule, logits.astype(np.float32), given)))
        assert (weights.dtype, experts.dtype) == (jnp.float32, jnp.int32)
        for token in range(TOKENS):
            expected_experts, expected_weights = reference(logits[token], bias)
            assert experts[token].tolist() == expected_experts
            np.testing.assert_allclose(weights[token], expected_weights, rtol=1e-5)


def test_the_bias_chooses_and_does_not_weigh():
    rule = RoutingRule(2, "sigmoid")
    logits = np.array([[3, 2, 1, 0]], np.float32)
    weights, experts, _ = routed(rule, logits, np.array([0, 0, 0, 9], np.float32))
    assert experts.tolist() == [[3, 0]]
    np.testing.assert_allclose(weights, [[0.5, sigmoid(3.0)]], rtol=1e-6)


@pytest.mark.parametrize("family", ["mixtral", "qwen2", "deepseek3"])
def test_gradient_against_differences(family):
    reference, rule = FAMILIES[family]
    logits, bias = random_logits(1)
    bias = bias if family == "deepseek3" else np.zeros(EXPERTS)
    cotangent = np.random.default_rng(2).normal(size=(TOKENS, rule.num_experts_per_tok))

    def total(logits, bias):
        return jnp.sum(route(rule, logits, bias)[0] * cotangent)

    given = logits.astype(np.float32), bias.astype(np.float32)
    gradient, bias_gradient = (np.asarray(array) for array in jax.jit(jax.grad(total, (0, 1)))(*given))
    np.testing.assert_array_equal(bias_gradient, 0)
    for token in range(3):
        chosen = reference(logits[token], bias)[0]
        for expert in range(EXPERTS):
            sides = []
            for step in (1e-5, -1e-5):
                at = logits[token].copy()
                at[expert] += step
                still_chosen, weights = reference(at, bias)
                assert still_chosen == chosen
                sides.append(np.sum(weights * cotangent[token]))
            np.testing.assert_allclose(gradient[token, expert], (sides[0] - sides[1]) / 2e-5, atol=1e-5)


def test_scores_that_are_all_zero_give_zeros():
    weights, *_ = routed(RoutingRule(2, "sigmoid", norm_topk_prob=True), np.full((1, 4), -200, np.float32))
    np.testing.assert_array_equal(weights, 0)


def test_every_expert_may_be_chosen():
    weights, experts, _ = routed(RoutingRule(EXPERTS, "softmax"), random_logits()[0].astype(np.float32))
    assert (np.sort(experts, axis=1) == np.arange(EXPERTS)).all()
    np.testing.assert_allclose(np.sum(weights, axis=1), 1.0, rtol=1e-5)


@functools.partial(jax.jit, static_argnums=0)
def stats_of(rule, logits, real):
    return router_stats(route(rule, logits), real)


def stats_by_loops(logits, rule, real):
    """The Switch Transformer's equations 4 to 6, row by row, over real tokens."""
    load, balance = np.zeros(EXPERTS), 0.0
    for row, row_is_real in zip(logits, real, strict=True):
        tokens = row[row_is_real]
        if not len(tokens):
            continue
        scores = np.stack([softmax(token) if rule.score_func == "softmax" else sigmoid(token) for token in tokens])
        chosen = [best(token, rule.num_experts_per_tok) for token in scores]
        counts = np.bincount(np.concatenate(chosen), minlength=EXPERTS)
        means = np.mean(scores / scores.sum(axis=1, keepdims=True), axis=0)
        load += counts
        balance += len(tokens) * EXPERTS * np.sum(counts / len(tokens) * means)
    return load, balance


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_stats_count_real_tokens_row_by_row(score_func):
    rule = RoutingRule(3, score_func)
    logits = random_logits()[0].reshape(4, TOKENS // 4, EXPERTS)
    real = np.ones(logits.shape[:2], bool)
    real[1, 6:] = real[2] = real[3, :2] = False
    stats = stats_of(rule, logits.astype(np.float32), real)
    load, balance = stats_by_loops(logits, rule, real)
    np.testing.assert_array_equal(stats.load, load)
    np.testing.assert_allclose(stats.balance, balance, rtol=1e-6)


def test_balance_is_the_number_of_choices_when_even_and_grows_when_uneven():
    even = np.log(np.eye(4, dtype=np.float32) * 9 + 1)[None]
    uneven = np.broadcast_to(even[:, :1], even.shape)
    rule, real = RoutingRule(1, "softmax"), np.ones((1, 4), bool)
    np.testing.assert_allclose(stats_of(rule, even, real).balance, 4 * 1.0, rtol=1e-6)
    np.testing.assert_allclose(stats_of(rule, uneven, real).balance, 4 * 4 * 10 / 13, rtol=1e-6)


def test_balance_pulls_down_the_scores_of_crowded_experts():
    logits = np.zeros((1, 6, 4), np.float32)
    logits[:, :, 2] = 1.0

    def balance(logits):
        return stats_of(RoutingRule(1, "softmax"), logits, np.ones((1, 6), bool)).balance

    gradient = np.asarray(jax.jit(jax.grad(balance))(logits))
    assert (gradient[..., 2] > 0).all() and (gradient[..., (0, 1, 3)] < 0).all()


def test_bias_moves_by_the_rate_towards_the_mean_load():
    bias = jnp.asarray([[0.5, 0.0, -1.0], [0.0, 0.0, 0.0]])
    load = jnp.asarray([[6.0, 3.0, 0.0], [4.0, 4.0, 4.0]])
    expected = [[0.4, 0.0, -0.9], [0.0, 0.0, 0.0]]
    np.testing.assert_allclose(updated_bias(bias, load, 0.1), expected, rtol=1e-6)


# For each kind of model: the router's class, settings, and the rule that it should equal.
TRANSFORMERS = {
    "mixtral": ("MixtralTopKRouter", dict(num_local_experts=16, num_experts_per_tok=2), FAMILIES["mixtral"][1]),
    "qwen2_moe": ("Qwen2MoeTopKRouter", dict(num_experts=16, num_experts_per_tok=3), FAMILIES["qwen2"][1]),
    "qwen3_moe": (
        "Qwen3MoeTopKRouter",
        dict(num_experts=16, num_experts_per_tok=2, norm_topk_prob=True),
        FAMILIES["mixtral"][1],
    ),
    "olmoe": ("OlmoeTopKRouter", dict(num_experts=16, num_experts_per_tok=3), FAMILIES["qwen2"][1]),
    "gpt_oss": ("GptOssTopKRouter", dict(num_local_experts=16, num_experts_per_tok=4), FAMILIES["gpt-oss"][1]),
    "deepseek_v2": (
        "DeepseekV2TopkRouter",
        dict(n_routed_experts=16, num_experts_per_tok=3, routed_scaling_factor=1.5, topk_method="greedy"),
        FAMILIES["deepseek2-lite"][1],
    ),
    "deepseek_v2 groups": (
        "DeepseekV2TopkRouter",
        dict(n_routed_experts=16, num_experts_per_tok=3, routed_scaling_factor=16.0, n_group=4, topk_group=2,
             topk_method="group_limited_greedy"),
        FAMILIES["deepseek2"][1],
    ),
    "deepseek_v3": (
        "DeepseekV3TopkRouter",
        dict(n_routed_experts=16, num_experts_per_tok=5, n_group=4, topk_group=2),
        FAMILIES["deepseek3"][1],
    ),
}  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize("case", TRANSFORMERS)
def test_against_transformers(case):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    name, settings, rule = TRANSFORMERS[case]
    kind = case.split()[0]
    config = transformers.AutoConfig.for_model(kind, hidden_size=EXPERTS, num_attention_heads=4, **settings)
    module = getattr(__import__(f"transformers.models.{kind}.modeling_{kind}", fromlist=["x"]), name)(config)
    logits, bias = random_logits(3)
    state = {key: torch.zeros_like(value) for key, value in module.state_dict().items()}
    state["weight"] = torch.eye(EXPERTS)
    biased = "e_score_correction_bias" in state
    if biased:
        state["e_score_correction_bias"] = torch.tensor(bias, dtype=torch.float32)
    module.load_state_dict(state)
    with torch.no_grad():
        _, expected, expected_experts = module(torch.tensor(logits, dtype=torch.float32))
    weights, experts, _ = route(
        rule, jnp.asarray(logits, jnp.float32), jnp.asarray(bias, jnp.float32) if biased else None
    )
    # transformers does not promise an order of the chosen.
    order, expected_order = np.argsort(experts, axis=1), np.argsort(expected_experts.numpy(), axis=1)
    np.testing.assert_array_equal(
        np.take_along_axis(np.asarray(experts), order, 1),
        np.take_along_axis(expected_experts.numpy(), expected_order, 1),
    )
    np.testing.assert_allclose(
        np.take_along_axis(np.asarray(weights), order, 1),
        np.take_along_axis(expected.numpy(), expected_order, 1),
        rtol=1e-5,
    )
