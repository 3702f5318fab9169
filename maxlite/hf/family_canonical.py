"""One form for every architecture: keys that have no effect at their default, patterns as short as they can be."""

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

from maxlite.config.layers import has_experts, layer_specs
from maxlite.config.load import load_config, package_roots
from maxlite.config.schema import Config, ModelConfig

_LOCAL = ("sliding_window_size", "local_rope_max_timescale")
_FULL = ("global_num_kv_heads", "global_head_dim", "share_kv_projections")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_GDN = (
    "gdn_conv_kernel_dim",
    "gdn_num_key_heads",
    "gdn_num_value_heads",
    "gdn_key_head_dim",
    "gdn_value_head_dim",
)
_TEMPERATURE = ("temperature_tuning", "temperature_tuning_floor", "temperature_tuning_scale")
_SWIGLUOAI = ("mlp_activations_limit", "glu_alpha")
_EXPERTS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_mlp_dim",
    "shared_expert_mlp_dim",
    "shared_expert_gate",
    "routed_score_func",
    "norm_topk_prob",
    "routed_scaling_factor",
    "routed_bias",
    "router_bias",
    "scaled_router",
    "n_routing_groups",
    "topk_routing_group",
    "router_group_score",
    "scale_expert_input",
)
# rope_type -> the keys that it uses.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("rope_factor",),
    "llama3": (
        "rope_factor",
        "rope_low_freq_factor",
        "rope_high_freq_factor",
        "original_max_position_embeddings",
    ),
    "proportional": ("rope_factor",),
    "yarn": (
        "rope_factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "rope_mscale_all_dim",
        "rope_truncate",
        "rope_attention_factor",
    ),
}


@cache
def default_config() -> Config:
    """Returns the config of base.yml, whose model is a plain Llama: what a family does not mention is as there."""
    return load_config(
        str(next(root / "base.yml" for root in package_roots() if (root / "base.yml").is_file())), (), {}
    )


def canonical(model: ModelConfig) -> ModelConfig:
    """Returns the same architecture in the one form that stands for all that compute the same."""
    specs = layer_specs(model)
    attention = [spec.attention for spec in specs]
    num_dense, mlp_pattern = fold_mlp([spec.mlp for spec in specs])
    changes: dict[str, Any] = {
        "attention_pattern": shortest_pattern(attention),
        "mlp_pattern": mlp_pattern,
        "num_dense_layers": num_dense,
    }
    for name, other in (("global_num_kv_heads", model.num_kv_heads), ("global_head_dim", model.head_dim)):
        if getattr(model, name) == other:
            changes[name] = None
    if model.query_pre_attn_scalar == model.head_dim and model.global_head_dim in (None, model.head_dim):
        changes["query_pre_attn_scalar"] = None
    if model.rope_type == "default" and model.local_rope_max_timescale == model.rope_max_timescale:
        changes["local_rope_max_timescale"] = None
    off = default_config().model
    changes.update({name: getattr(off, name) for name in _without_effect(model, set(attention))})
    return dataclasses.replace(model, **changes)


def shortest_pattern(kinds: Sequence[str]) -> tuple[str, ...]:
    """Returns the shortest pattern that, repeated over the layers, gives `kinds`."""
    return _repeating(kinds, 0)


def fold_mlp(kinds: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """Returns (num_dense_layers, mlp_pattern) that give `kinds`, with the shortest pattern."""
    leading = next((layer for layer, kind in enumerate(kinds) if kind != "dense"), 0)
    choices = [(0, _repeating(kinds, 0)), (leading, _repeating(kinds, leading))]
    return min(choices, key=lambda choice: len(choice[1]))


def _repeating(kinds: Sequence[str], start: int) -> tuple[str, ...]:
    """The shortest pattern that, indexed by the number of the layer, gives `kinds` from layer `start` on."""
    for period in range(1, len(kinds) + 1):
        pattern: dict[int, str] = {}
        if all(pattern.setdefault(layer % period, kinds[layer]) == kinds[layer] for layer in range(start, len(kinds))):
            # A place of the pattern that only the leading layers reach may hold anything.
            return tuple(pattern.get(place, kinds[place]) for place in range(period))
    raise AssertionError("a pattern as long as the layers always fits")


def _without_effect(model: ModelConfig, attention: set[str]) -> set[str]:
    names: set[str] = set()
    routed = has_experts(model)
    chunked = ("chunk_attn_window_size",)
    owners = (("full", _FULL), ("local", _LOCAL), ("chunked", chunked), ("mla", _LATENT), ("gated_delta_net", _GDN))
    for kind, keys in owners:
        names |= set(keys) if kind not in attention else set()
    if "nope" not in attention or not model.temperature_tuning:
        names |= set(_TEMPERATURE)
    if not model.use_qk_norm:
        names.add("qk_norm_type")
    if model.mlp_activation != "swigluoai":
        names |= set(_SWIGLUOAI)
    if not routed:
        names |= set(_EXPERTS)
    elif model.n_routing_groups == 1:
        names |= {"topk_routing_group", "router_group_score"}
    if routed and model.shared_expert_mlp_dim is None:
        names.add("shared_expert_gate")
    used = ROPE_KEYS[model.rope_type]
    return names | {name for keys in ROPE_KEYS.values() for name in keys if name not in used}
