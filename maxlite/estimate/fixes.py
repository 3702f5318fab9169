"""What makes a step that does not fit smaller: keys to change, bytes that they save, seconds that they cost."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from maxlite.config.layers import LayerSpec, attention_head_dim, attention_kv_heads, layer_specs
from maxlite.config.schema import Config, ModelConfig
from maxlite.model.remat import kept_names
from maxlite.parallel.sharding import mesh_axes, num_parts
from maxlite.train.batches import pipeline_microbatches
from maxlite.train.setup import Setup
from maxlite.train.state import device_bytes

# Between a device and its host, over PCIe: bytes per second, about.
HOST_BANDWIDTH = 16e9
_NUM_FIXES = 3
# A fix that saves less of what is missing is no fix.
_LEAST_SHARE = 0.02


class Need(NamedTuple):
    """needed, available, temporaries: bytes on a device. compute, gather: seconds of a step that computing takes, and
    that gathering all parameters once takes."""

    needed: float
    available: float
    temporaries: float
    compute: float
    gather: float


@dataclasses.dataclass(frozen=True)
class Fix:
    """keys: as one types them. saves: bytes on a device; seconds: a step, both estimated. enough: fits by it alone."""

    keys: str
    saves: float
    seconds: float
    note: str
    enough: bool = False


def cheapest_fixes(config: Config, setup: Setup, need: Need) -> list[Fix]:
    """Returns the three cheapest, by the seconds that they add to a step; more hardware comes last."""
    missing = max(need.needed - need.available, 1)
    hardware = Fix("twice the devices in fsdp", _state_bytes(setup) / 2, need.gather, "a larger slice, or more slices")
    found = sorted(_fixes(config, setup, need), key=lambda fix: (fix.seconds, -fix.saves))
    ranked = [fix for fix in (*found, hardware) if fix.saves >= _LEAST_SHARE * missing][:_NUM_FIXES]
    return [dataclasses.replace(fix, enough=fix.saves >= missing) for fix in ranked]


def _fixes(config: Config, setup: Setup, need: Need) -> Iterator[Fix]:
    yield from _optimizer_fixes(config, setup, need)
    yield from _activation_fixes(config, setup, need)
    data = setup.mesh.shape["data"]
    if data > 1:
        yield Fix(
            "ici_data_parallelism=1 dcn_data_parallelism=1 ici_fsdp_parallelism=-1",
            _state_bytes(setup) * (1 - 1 / data),
            3 * need.gather,
            "parameters, gradients and optimizer are split over those devices instead of copied",
        )


def _state_bytes(setup: Setup) -> int:
    """Of a device: parameters, optimizer state and gradients."""
    return device_bytes(setup.abstract) + device_bytes(setup.abstract_gradients)


def _optimizer_fixes(config: Config, setup: Setup, need: Need) -> Iterator[Fix]:
    parameters, moments = device_bytes(setup.abstract.params), device_bytes(setup.abstract.opt_state)
    data = setup.mesh.shape["data"]
    optimizer = config.optimizer
    # Scalars alone are no moments.
    if moments < parameters / 4:
        return
    if optimizer.opt_type == "adamw" and "bfloat16" not in (optimizer.mu_dtype, config.compute.weight_dtype):
        # Of two moments, both float32, the first is half.
        yield Fix("mu_dtype=bfloat16", moments / 4, 0.0, "the first moment in half the bytes")
    if data > 1 and not config.parallel.shard_optimizer_over_data:
        saved = moments * (1 - 1 / data)
        yield Fix("shard_optimizer_over_data=true", saved, need.gather, "ZeRO-1: updated parameters are gathered")
    if not optimizer.optimizer_memory_host_offload:
        seconds = 2 * moments / HOST_BANDWIDTH
        yield Fix("optimizer_memory_host_offload=true", moments, seconds, "moments travel to the host and back")


def _activation_fixes(config: Config, setup: Setup, need: Need) -> Iterator[Fix]:
    gradients = device_bytes(setup.abstract_gradients)
    activations = max(need.temporaries - gradients, 0)
    parts = config.train.gradient_accumulation_steps
    here = setup.rows // num_parts(mesh_axes("batch", setup.rules), setup.mesh) // parts
    policy = config.compute.remat_policy
    if policy != "full":
        saved = min(kept_bytes(config, setup), activations)
        yield Fix("remat_policy=full", saved, need.compute / 3, f"now {policy}: layers are computed twice")
    if here % (2 * pipeline_microbatches(config.parallel, setup.mesh)) == 0:
        yield Fix(
            f"gradient_accumulation_steps={2 * parts}",
            activations / 2 - (gradients if parts == 1 else 0),
            3 * need.gather,
            "the same batch and losses in smaller parts",
        )
        rows = config.data.per_device_batch_size
        yield Fix(f"per_device_batch_size={rows / 2:g}", activations / 2, need.compute / 20, "half the batch")
    length = config.data.max_target_length
    tiles = config.compute.num_vocab_tiling
    if 0 < tiles < length:
        logits = 2 * 4 * here * length * config.model.vocab_size / tiles
        shards = num_parts(mesh_axes("vocab", setup.rules), setup.mesh)
        yield Fix(
            f"num_vocab_tiling={2 * tiles}", logits / shards / 2, need.compute / 100, "smaller parts of the logits"
        )


def kept_bytes(config: Config, setup: Setup) -> float:
    """Bytes on a device that `remat_policy` keeps beside the layers' inputs, for the backward pass."""
    compute = setup.model.compute
    kept = kept_names(compute)
    names = None if kept is None else set(kept.saved)
    width = 0
    for spec in layer_specs(config.model):
        widths = tensor_widths(config.model, spec)
        # Without a policy norms, activations of the MLP and rotated heads are kept too.
        width += 2 * sum(widths.values()) if names is None else sum(widths.get(name, 0) for name in names)
    rules, mesh = setup.rules, setup.mesh
    rows = setup.rows / config.train.gradient_accumulation_steps / num_parts(mesh_axes("batch", rules), mesh)
    tokens = rows * config.data.max_target_length / num_parts(mesh_axes("length", rules), mesh)
    shards = num_parts(mesh_axes("activation_mlp", rules), mesh) * num_parts(mesh_axes("layers", rules), mesh)
    return tokens * width / shards * (4 if compute.dtype == "float32" else 2)


def tensor_widths(model: ModelConfig, spec: LayerSpec) -> dict[str, int]:
    """Numbers a token that a layer makes under each name that a policy can keep."""
    mixers = {"mla": _latent_widths, "gated_delta_net": _delta_widths}
    mixer = mixers.get(spec.attention)
    widths = _attention_widths(model, spec.attention) if mixer is None else mixer(model)
    return {**widths, "out_proj": model.emb_dim, **_mlp_widths(model, spec.mlp)}


def _attention_widths(model: ModelConfig, kind: str) -> dict[str, int]:
    head_dim = attention_head_dim(model, kind)
    queries, keys = model.num_query_heads * head_dim, attention_kv_heads(model, kind) * head_dim
    gate = {"gate_proj": queries} if model.attention_output_gate else {}
    return {"query_proj": queries, "key_proj": keys, "value_proj": keys, "context": queries, **gate}


def _latent_widths(model: ModelConfig) -> dict[str, int]:
    """Of latent attention: keys and values of every head, and the latents that they and the queries come from."""
    rotary, heads = model.qk_rope_head_dim or 0, model.num_query_heads
    queries, values = heads * ((model.qk_nope_head_dim or 0) + rotary), heads * (model.v_head_dim or 0)
    latents = {"kv_wa_proj": (model.kv_lora_rank or 0) + rotary}
    if model.q_lora_rank is not None:
        latents["query_wa_proj"] = model.q_lora_rank
    return {"query_proj": queries, "key_proj": queries, "value_proj": values, "context": values, **latents}


def _delta_widths(model: ModelConfig) -> dict[str, int]:
    """Of the gated delta rule; with the gate go two numbers for each head of values: its step and its beta."""
    heads = model.gdn_num_value_heads or 0
    keys, values = (
        (model.gdn_num_key_heads or 0) * (model.gdn_key_head_dim or 0),
        heads * (model.gdn_value_head_dim or 0),
    )
    return {"query_proj": keys, "key_proj": keys, "value_proj": values, "gate_proj": values + 2 * heads}


def _mlp_widths(model: ModelConfig, kind: str) -> dict[str, int]:
    """The dense MLP beside experts and the one that serves every token have the same names."""
    experts = model.num_experts_per_tok if kind != "dense" else 0
    hidden = [model.mlp_dim] if kind != "moe" else []
    if experts and model.shared_expert_mlp_dim is not None:
        hidden.append(model.shared_expert_mlp_dim)
    widths = {}
    if hidden:
        widths |= {"mlpwi_0": sum(hidden), "mlpwi_1": sum(hidden), "mlpwo": len(hidden) * model.emb_dim}
    if experts:
        routed = experts * (model.moe_mlp_dim or 0)
        widths |= {"moe_mlpwi_0": routed, "moe_mlpwi_1": routed, "moe_mlpwo": experts * model.emb_dim}
    return widths
