"""Which experts a token goes to, and with what weights."""

import dataclasses

import jax
import jax.numpy as jnp

# DeepSeek V3 adds it to the sum that it divides by, so that scores which are all zero give zeros.
LEAST_SUM = 1e-20


@dataclasses.dataclass(frozen=True)
class RoutingRule:
    """How scores become a choice of experts; fields mean what the model keys of the same name mean."""

    num_experts_per_tok: int
    score_func: str
    norm_topk_prob: bool = False
    scaling_factor: float = 1.0
    num_groups: int = 1
    topk_group: int = 1
    group_score: str = "max"


def route(rule: RoutingRule, logits: jax.Array, selection_bias: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Chooses experts by score plus bias, and weighs them by score alone, differentiably.

    logits: [T, E] float32.
    selection_bias: [E] float32; it decides who is chosen and nothing else.
    Returns: weights [T, k] float32 and expert ids [T, k] int32, best first.
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
    return weights * rule.scaling_factor, experts


def _within_best_groups(rule: RoutingRule, choice: jax.Array) -> jax.Array:
    """[T, E] -> [T, E] with -inf outside the best groups, E being cut into equal groups (DeepSeek V2 and V3)."""
    if rule.topk_group == rule.num_groups:
        return choice
    grouped = choice.reshape(choice.shape[0], rule.num_groups, -1)
    if rule.group_score == "max":
        group_scores = jnp.max(grouped, axis=-1)
    else:
        group_scores = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    best = jax.lax.top_k(group_scores, rule.topk_group)[1]
    kept = jnp.any(best[:, :, None] == jnp.arange(rule.num_groups), axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(choice.shape)
