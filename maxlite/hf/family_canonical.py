"""One form for every architecture: keys that have no effect at their default, patterns as short as they can be."""

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

from maxlite.config.key_groups import (
    EXPERT_SIZES,
    FULL_LAYERS,
    GDN_SIZES,
    MLA_SIZES,
    ROPE_KEYS,
    ROUTER,
    SWIGLUOAI,
    TEMPERATURE,
)
from maxlite.config.layers import has_experts, layer_specs
from maxlite.config.load import load_config, package_roots
from maxlite.config.schema import Config, ModelConfig

_LOCAL = ("sliding_window_size", "local_rope_max_timescale")


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
    latent = (*MLA_SIZES, "q_lora_rank")
    owners = (
        ("full", FULL_LAYERS),
        ("local", _LOCAL),
        ("chunked", chunked),
        ("mla", latent),
        ("gated_delta_net", GDN_SIZES),
    )
    for kind, keys in owners:
        names |= set(keys) if kind not in attention else set()
    if "nope" not in attention or not model.temperature_tuning:
        names |= {"temperature_tuning", *TEMPERATURE}
    if not model.use_qk_norm:
        names.add("qk_norm_type")
    if model.mlp_activation != "swigluoai":
        names |= set(SWIGLUOAI)
    if not routed:
        names |= {*EXPERT_SIZES, *ROUTER, "router_group_score"}
    elif model.n_routing_groups == 1:
        names |= {"topk_routing_group", "router_group_score"}
    if routed and model.shared_expert_mlp_dim is None:
        names.add("shared_expert_gate")
    used = ROPE_KEYS[model.rope_type]
    return names | {name for keys in ROPE_KEYS.values() for name in keys if name not in used}
