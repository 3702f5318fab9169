"""Mixture of experts (Shazeer et al. 2017, arXiv:1701.06538): each token goes to a few of many gated MLPs.

On a mesh each device routes its own tokens, sends them to the devices that hold their experts, multiplies what came
with its part of the experts' hidden width, and sends the results home. With `capacity_factor` null every expert's
tokens are kept, however unevenly they fall.
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from maxlite.config.compute_schema import ComputeConfig
from maxlite.config.schema import ModelConfig
from maxlite.nn.experts import Experts, Placement, Weights, build_placement
from maxlite.nn.linear import NarrowLinear
from maxlite.nn.mlp import GatedMLP
from maxlite.nn.norm import RMSNorm, rms_normalize
from maxlite.nn.param import param
from maxlite.ops.dispatch import capacity, dropless, group_by_capacity, with_capacity
from maxlite.ops.router import RouterStats, RoutingRule, route, router_stats
from maxlite.parallel.sharding import constrain, per_device

# A tree of RouterStats' form, whose leaves are names of dimensions.
_STATS_AXES: Any = RouterStats(cast(Any, (None,)), cast(Any, ()))


class Router(nnx.Module):
    """Logits of all experts, in float32 whatever the dtype: rounding would change who is chosen."""

    def __init__(self, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs | None):
        """Makes the kernel [D, E], with router_bias the bias [E], and with scaled_router the scale [D] of its input."""
        shape, dtype = (model.emb_dim, model.num_experts), compute.weight_dtype
        self.kernel = param(rngs, shape, ("embed", "exp"), dtype=dtype, fan_in=model.emb_dim)
        self.use_bias = model.router_bias
        if self.use_bias:
            self.bias = param(rngs, (model.num_experts,), ("exp",), dtype=dtype, value=0.0)
        self.use_scale, self.epsilon = model.scaled_router, model.normalization_layer_epsilon
        if self.use_scale:
            self.scale = param(rngs, (model.emb_dim,), ("norm",), dtype=dtype, value=1.0)

    def weights(self) -> Weights:
        """Returns the weights in float32, for `__call__` on each device."""
        weights = {"kernel": self.kernel[...]}
        if self.use_bias:
            weights["bias"] = self.bias[...]
        if self.use_scale:
            weights["scale"] = self.scale[...]
        return {name: array.astype(jnp.float32) for name, array in weights.items()}

    def __call__(self, x: jax.Array, weights: Weights) -> jax.Array:
        """x: [B, T, D]. Returns: [B, T, E] float32."""
        x = x.astype(jnp.float32)
        if self.use_scale:
            x = rms_normalize(x, self.epsilon) * weights["scale"] * x.shape[-1] ** -0.5
        logits = jnp.einsum("BTD,DE->BTE", x, weights["kernel"], precision=jax.lax.Precision.HIGHEST)
        return logits + weights["bias"] if self.use_bias else logits


class MoE(nnx.Module):
    """Routed experts, their outputs added with the router's weights, plus the shared expert if there is one."""

    def __init__(self, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs | None):
        """Makes the router, the experts, and what the shared_expert keys, routed_bias and scaled_router ask for."""
        self.dtype = jnp.dtype(compute.dtype)
        self.num_experts, self.scale_input = model.num_experts, model.scale_expert_input
        self.capacity_factor = compute.capacity_factor
        self.rule = RoutingRule(
            model.num_experts_per_tok,
            model.routed_score_func,
            model.norm_topk_prob,
            model.routed_scaling_factor,
            model.n_routing_groups,
            model.topk_routing_group,
            model.router_group_score,
        )
        self.router = Router(model, compute, rngs=rngs)
        self.use_selection_bias = model.routed_bias
        if model.routed_bias:
            # Small differences between scores decide, so it keeps float32 whatever the weights have.
            self.selection_bias = param(rngs, (model.num_experts,), ("exp",), dtype="float32", value=0.0)
        self.use_expert_scale = model.scaled_router
        if self.use_expert_scale:
            self.expert_scale = param(rngs, (model.num_experts,), ("exp",), dtype=compute.weight_dtype, value=1.0)
        self.experts = Experts(model, compute, rngs=rngs)
        self.use_shared, self.use_shared_gate = model.shared_expert_mlp_dim is not None, model.shared_expert_gate
        if model.shared_expert_mlp_dim is not None:
            self.shared = GatedMLP(model, compute, model.shared_expert_mlp_dim, rngs=rngs)
        if model.shared_expert_gate:
            self.shared_gate = NarrowLinear("BTD,DO->BTO", (model.emb_dim, 1), ("embed", "norm"), compute, rngs=rngs)

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None, router_input: jax.Array | None = None
    ) -> tuple[jax.Array, RouterStats]:
        """Computes padding too, but neither counts it nor keeps room for it where room is limited.

        x: [B, T, D].
        segment_ids: [B, T] int32, 0 where a token is padding; None where none is.
        router_input: as x, what experts are chosen by if it is not x.
        Returns: [B, T, D], and how evenly the real tokens fell.
        """
        placement = build_placement(*x.shape[:2])
        real = jnp.ones(x.shape[:2], bool) if segment_ids is None else segment_ids != 0
        length = "norm_length" if placement.sequence else "length"
        tokens, routing = ("batch", length, None), self._routing()
        routing_axes = {name: (None,) * array.ndim for name, array in routing.items()}
        weights, weight_axes = self.experts.weights()
        routed = per_device(
            functools.partial(self._on_each_device, placement),
            (tokens, tokens, ("batch", length), routing_axes, weight_axes),
            (tokens, _STATS_AXES),
        )
        chosen_by = None if router_input is None else router_input.astype(self.dtype)
        y, stats = routed(x.astype(self.dtype), chosen_by, real, routing, weights)
        if not self.use_shared:
            return y, stats
        x = constrain(x, "batch", "length", "activation_embed")
        shared = self.shared(x)
        if self.use_shared_gate:
            shared = shared * jax.nn.sigmoid(self.shared_gate(x))
        return y + shared, stats

    def _routing(self) -> Weights:
        """Float32 weights that every device has whole."""
        weights = self.router.weights()
        if self.use_selection_bias:
            weights["selection_bias"] = self.selection_bias[...]
        if self.use_expert_scale:
            weights["expert_scale"] = self.expert_scale[...].astype(jnp.float32)
        return weights

    def _on_each_device(
        self,
        placement: Placement,
        x: jax.Array,
        chosen_by: jax.Array | None,
        real: jax.Array,
        routing: Weights,
        weights: dict[str, Weights],
    ) -> tuple[jax.Array, RouterStats]:
        """x, chosen_by: [B, T, D], real: [B, T], each a device's own. Returns: its [B, T, D]; stats of all."""
        logits = self.router(x if chosen_by is None else chosen_by, routing)
        selection = route(self.rule, logits, routing.get("selection_bias"))
        stats = router_stats(selection, real, row_axes=placement.rows, length_axes=placement.length)
        factors, choices = selection.weights, selection.experts
        if self.use_expert_scale:
            factors = factors * routing["expert_scale"][choices]
        if placement.sequence:
            x, factors, choices, real = jax.lax.all_gather(
                (x, factors, choices, real), placement.sequence, axis=1, tiled=True
            )
        y = self._mixed(placement, x, factors, choices, real, weights)
        if placement.sequence:
            y = jax.lax.psum_scatter(y, placement.sequence, scatter_dimension=1, tiled=True)
        elif placement.hidden:
            y = jax.lax.psum(y, placement.hidden)
        return y, stats

    def _mixed(
        self,
        placement: Placement,
        x: jax.Array,
        factors: jax.Array,
        choices: jax.Array,
        real: jax.Array,
        weights: dict[str, Weights],
    ) -> jax.Array:
        """x: [B, T, D]; factors and choices: [B, T, k]. Returns: [B, T, D], each token's results added up."""
        # Factors are float32, and so is what they multiply; the sum over a token's experts too.
        factors, shape = factors[..., None], (*factors.shape, x.shape[-1])
        if self.scale_input:
            slots = (x[:, :, None].astype(jnp.float32) * factors).astype(self.dtype)
        else:
            slots = jnp.broadcast_to(x[:, :, None], shape)
        run = functools.partial(self.experts, weights=weights, placement=placement)
        slots = slots.reshape(-1, x.shape[-1])
        if self.capacity_factor is None:
            y = dropless(run, slots, choices, self.num_experts, placement.experts)
        else:
            room = capacity(self.capacity_factor, x.shape[1], choices.shape[-1], self.num_experts)
            places = group_by_capacity(choices, real, self.num_experts, room)
            y = with_capacity(run, slots, places, self.num_experts, placement.experts)
        y = y.reshape(shape).astype(jnp.float32)
        return jnp.sum(y if self.scale_input else y * factors, axis=2).astype(self.dtype)


class DenseAndMoE(nnx.Module):
    """A dense MLP and experts side by side (Gemma 4), each between norms of its own; the router sees x as it is."""

    def __init__(self, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs | None):
        """Makes both, and two norms [D] for each."""

        def norm() -> RMSNorm:
            return RMSNorm((model.emb_dim,), ("norm",), model, compute, rngs=rngs)

        self.dense_norm, self.dense_post_norm = norm(), norm()
        self.dense = GatedMLP(model, compute, model.mlp_dim, rngs=rngs)
        self.moe_norm, self.moe_post_norm = norm(), norm()
        self.moe = MoE(model, compute, rngs=rngs)

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None) -> tuple[jax.Array, RouterStats]:
        """x: [B, T, D]; segment_ids: [B, T] int32 or None, as of `MoE`. Returns: [B, T, D], and the experts' stats."""
        whole = constrain(self.dense_norm(x), "batch", "length", "activation_embed")
        dense = self.dense_post_norm(self.dense(whole))
        routed, stats = self.moe(self.moe_norm(x), segment_ids, router_input=x)
        return dense + self.moe_post_norm(routed), stats
