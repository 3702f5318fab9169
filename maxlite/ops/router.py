"""Which experts a token goes to, with what weights, and how evenly the tokens fall."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

# DeepSeek V3 adds it to the sum that it divides by, so that scores which are all zero give zeros.
LEAST_SUM = 1e-20


@dataclasses.dataclass(frozen=True)
class RoutingRule:
    """How scores become a choice of experts; fields mean what the model's keys mean.

    Keys of other names: routed_score_func is score_func here, routed_scaling_factor scaling_factor, n_routing_groups
    num_groups, topk_routing_group topk_group, and router_group_score group_score.
    """

    num_experts_per_tok: int
    score_func: str
    norm_topk_prob: bool = False
    scaling_factor: float = 1.0
    num_groups: int = 1
    topk_group: int = 1
    group_score: str = "max"


class Routing(NamedTuple):
    """What each token chose.

    weights: [..., k] float32, best first, differentiable.
    experts: [..., k] int32.
    scores: [..., E] float32, of all experts, without any bias; softmax or sigmoid.
    """

    weights: jax.Array
    experts: jax.Array
    scores: jax.Array


class RouterStats(NamedTuple):
    """How evenly a layer's real tokens fall on its experts, over all devices; sums, so that batches can be added.

    load: [E] float32, choices of each expert.
    balance: float32, the load-balance loss of each row times its real tokens, summed over rows (`router_stats`).
    """

    load: jax.Array
    balance: jax.Array


def route(rule: RoutingRule, logits: jax.Array, selection_bias: jax.Array | None = None) -> Routing:
    """Chooses experts by score plus bias, and weighs them by score alone, differentiably.

    logits: [..., E] float32.
    selection_bias: [E] float32; it decides who is chosen and nothing else.
    """
    assert logits.dtype == jnp.float32, f"router logits are {logits.dtype}"
    scores = jax.nn.softmax(logits, axis=-1) if rule.score_func == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if selection_bias is None else scores + selection_bias
    # Only the order of the choice counts, and an order has no gradient.
    choice = _within_best_groups(rule, jax.lax.stop_gradient(choice))
    experts = jax.lax.top_k(choice, rule.num_experts_per_tok)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if rule.norm_topk_prob:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + LEAST_SUM)
    return Routing(weights * rule.scaling_factor, experts, scores)


def _within_best_groups(rule: RoutingRule, choice: jax.Array) -> jax.Array:
    """[..., E] with -inf outside the best groups, E being cut into equal groups (DeepSeek V2 and V3)."""
    if rule.topk_group == rule.num_groups:
        return choice
    grouped = choice.reshape(*choice.shape[:-1], rule.num_groups, -1)
    if rule.group_score == "max":
        group_scores = jnp.max(grouped, axis=-1)
    else:
        group_scores = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    best = jax.lax.top_k(group_scores, rule.topk_group)[1]
    kept = jnp.any(best[..., None] == jnp.arange(rule.num_groups), axis=-2)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)


def router_stats(
    routing: Routing, real: jax.Array, *, row_axes: tuple[str, ...] = (), length_axes: tuple[str, ...] = ()
) -> RouterStats:
    """Load, and the load-balance loss of the Switch Transformer (arXiv:2101.03961), of tokens [B, T].

    A row of n real tokens has the loss E x sum_e f_e P_e: f_e is the choices of expert e divided by n, P_e the mean of
    the scores, divided by their sum. It is k when all is even. Taken row by row it does not depend on how rows are put
    together into batches, or where they lie.

    routing: [B, T, ...].
    real: [B, T] bool, False where a token is padding.
    row_axes, length_axes: mesh axes over which rows, or the tokens of a row, lie on other devices too.
    """
    num_experts = routing.scores.shape[-1]
    weight = real.astype(jnp.float32)
    chosen = jnp.sum(routing.experts[..., None] == jnp.arange(num_experts), axis=-2, dtype=jnp.float32)
    shares = routing.scores / (jnp.sum(routing.scores, axis=-1, keepdims=True) + LEAST_SUM)
    sums = [
        jnp.sum(weight, axis=1),
        jnp.einsum("BT,BTE->BE", weight, chosen),
        jnp.einsum("BT,BTE->BE", weight, shares, precision=jax.lax.Precision.HIGHEST),
    ]
    if length_axes:
        sums = jax.lax.psum(sums, length_axes)
    tokens, load, score = sums
    # A row without real tokens has nothing to divide.
    balance = num_experts * jnp.sum(jnp.sum(load * score, axis=1) / jnp.maximum(tokens, 1.0))
    stats = RouterStats(jax.lax.stop_gradient(jnp.sum(load, axis=0)), balance)
    return jax.lax.psum(stats, row_axes) if row_axes else stats


def updated_bias(bias: jax.Array, load: jax.Array, rate: float) -> jax.Array:
    """The selection bias after a step: up for experts with less than the mean load, down for others.

    This balances without a loss (Wang et al. 2024, arXiv:2408.15664; DeepSeek V3).

    bias, load: [..., E] float32.
    rate: how far a bias moves.
    """
    return bias + rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
