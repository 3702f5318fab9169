"""Mixture of experts (Shazeer et al. 2017, arXiv:1701.06538): each token goes to a few of many gated MLPs.

Every expert's tokens are kept, however unevenly they fall. On a mesh every device computes all tokens, with its
share of the hidden width.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import ComputeConfig, ModelConfig
from maxlite.nn.linear import Linear
from maxlite.nn.mlp import GatedMLP, build_gate
from maxlite.nn.norm import RMSNorm, rms_normalize
from maxlite.nn.param import param
from maxlite.ops.experts import Grouping, from_experts, group_by_expert, grouped_bias, grouped_product, to_experts
from maxlite.ops.router import RoutingRule, route
from maxlite.parallel.sharding import constrain


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

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [T, D]. Returns: [T, E] float32."""
        x = x.astype(jnp.float32)
        if self.use_scale:
            x = rms_normalize(x, self.epsilon) * self.scale[...].astype(jnp.float32) * x.shape[-1] ** -0.5
        kernel = self.kernel[...].astype(jnp.float32)
        logits = jnp.einsum("TD,DE->TE", x, kernel, precision=jax.lax.Precision.HIGHEST)
        return logits + self.bias[...].astype(jnp.float32) if self.use_bias else logits


class ExpertLinear(nnx.Module):
    """Rows sorted by expert times each one's matrix, and perhaps plus its bias."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        axes: tuple[str, str],
        compute: ComputeConfig,
        *,
        use_bias: bool,
        rngs: nnx.Rngs | None,
    ):
        """Makes the kernel of `shape` [E, in, out], the last two named `axes`, and the bias [E, out]."""
        dtype = compute.weight_dtype
        self.kernel = param(rngs, shape, ("exp", *axes), dtype=dtype, fan_in=shape[1])
        self.use_bias = use_bias
        if use_bias:
            self.bias = param(rngs, (shape[0], shape[2]), ("exp", axes[1]), dtype=dtype, value=0.0)
        self.dtype = jnp.dtype(compute.dtype)
        # Where the kernel lies as it is used: gathered, but for the hidden width.
        self.placed = (None, *("activation_mlp" if axis == "mlp" else None for axis in axes))

    def __call__(self, rows: jax.Array, grouping: Grouping) -> jax.Array:
        """rows: [R, in]. Returns: [R, out] in the compute dtype."""
        kernel = constrain(self.kernel[...].astype(self.dtype), *self.placed)
        y = grouped_product(rows, kernel, grouping)
        if self.use_bias:
            y = y + grouped_bias(self.bias[...].astype(self.dtype), grouping)
        return constrain(y, None, self.placed[2])


class Experts(nnx.Module):
    """num_experts gated MLPs of the same sizes, stacked."""

    def __init__(self, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs | None):
        """Makes gate and up [E, D, F] and down [E, F, D]."""
        assert model.moe_mlp_dim is not None
        wide, narrow = (model.emb_dim, model.moe_mlp_dim), (model.moe_mlp_dim, model.emb_dim)
        count, bias = model.num_experts, model.mlp_bias
        self.join = build_gate(model)
        self.gate = ExpertLinear((count, *wide), ("embed", "mlp"), compute, use_bias=bias, rngs=rngs)
        self.up = ExpertLinear((count, *wide), ("embed", "mlp"), compute, use_bias=bias, rngs=rngs)
        self.down = ExpertLinear((count, *narrow), ("mlp", "embed"), compute, use_bias=bias, rngs=rngs)

    def __call__(self, slots: jax.Array, grouping: Grouping) -> jax.Array:
        """slots: [M, D], what each choice of each token goes in with. Returns: [M, D]."""
        rows = to_experts(slots, grouping)
        gate = checkpoint_name(self.gate(rows, grouping), "moe_mlpwi_0")
        up = checkpoint_name(self.up(rows, grouping), "moe_mlpwi_1")
        y = checkpoint_name(self.down(self.join(gate, up), grouping), "moe_mlpwo")
        return from_experts(y, grouping)


class MoE(nnx.Module):
    """Routed experts, their outputs added with the router's weights, plus the shared expert if there is one."""

    def __init__(self, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs | None):
        """Makes the router, the experts, and what the shared_expert keys, routed_bias and scaled_router ask for."""
        self.dtype = jnp.dtype(compute.dtype)
        self.num_experts, self.scale_input = model.num_experts, model.scale_expert_input
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
            self.shared_gate = Linear("BTD,DO->BTO", (model.emb_dim, 1), ("embed", "norm"), compute, rngs=rngs)

    def __call__(self, x: jax.Array, router_input: jax.Array | None = None) -> jax.Array:
        """x: [B, T, D]; router_input: the same, what experts are chosen by if it is not x. Returns: [B, T, D]."""
        flat, chosen_by = (a.reshape(-1, x.shape[-1]) for a in (x, x if router_input is None else router_input))
        y = self._routed(flat.astype(self.dtype), chosen_by.astype(self.dtype)).reshape(x.shape)
        y = constrain(y, "batch", "length", "activation_embed")
        if not self.use_shared:
            return y
        shared = self.shared(x)
        if self.use_shared_gate:
            shared = shared * jax.nn.sigmoid(self.shared_gate(x))
        return y + shared

    def _routed(self, x: jax.Array, chosen_by: jax.Array) -> jax.Array:
        """x, chosen_by: [T, D]. Returns: [T, D]."""
        x, chosen_by = constrain(x, None, None), constrain(chosen_by, None, None)
        weights, experts = route(
            self.rule, self.router(chosen_by), self.selection_bias[...] if self.use_selection_bias else None
        )
        if self.use_expert_scale:
            weights = weights * self.expert_scale[...].astype(jnp.float32)[experts]
        grouping = group_by_expert(experts, self.num_experts)
        # Weights are float32, and so is what they multiply; the sum over a token's experts too.
        factors, shape = weights[:, :, None], (*weights.shape, x.shape[-1])
        if self.scale_input:
            slots = (x[:, None].astype(jnp.float32) * factors).astype(self.dtype)
            y = self.experts(slots.reshape(-1, x.shape[-1]), grouping).reshape(shape).astype(jnp.float32)
        else:
            slots = jnp.broadcast_to(x[:, None], shape).reshape(-1, x.shape[-1])
            y = self.experts(slots, grouping).reshape(shape).astype(jnp.float32) * factors
        return jnp.sum(y, axis=1).astype(self.dtype)


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

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [B, T, D]. Returns: [B, T, D]."""
        dense = self.dense_post_norm(self.dense(self.dense_norm(x)))
        return dense + self.moe_post_norm(self.moe(self.moe_norm(x), router_input=x))
