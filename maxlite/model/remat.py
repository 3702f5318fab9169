"""What the backward pass keeps of each layer, and where, by MaxText's policy names (docs/remat.md)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.compute_schema import LAYER_INPUT, REMAT_POLICY_NAMES, REMAT_TENSORS, ComputeConfig
from maxlite.parallel.devices import HOST_MEMORY

# Latent attention has latents besides: narrow, and the way to all heads. A gate is as wide as the queries.
_QKV = ("query_proj", "key_proj", "value_proj", "query_wa_proj", "kv_wa_proj", "gate_proj")
_MLP_IN = ("mlpwi_0", "mlpwi_1", "moe_mlpwi_0", "moe_mlpwi_1")
_MLP_OUT = ("mlpwo", "moe_mlpwo")
_MATMULS = (*_QKV, "out_proj", *_MLP_IN, *_MLP_OUT)
# What quantization makes of tensors on their way into a product; without quantization nothing has this name.
_QUANTIZED = ("quantization",)

# Names of the tensors that stay on the device; everything else is computed again.
SAVED_NAMES: dict[str, tuple[str, ...]] = {
    "full": (),
    "minimal": _MATMULS,
    "minimal_with_context": (*_MATMULS, "context"),
    "minimal_with_quantization": (*_MATMULS, *_QUANTIZED),
    "minimal_with_context_and_quantization": (*_MATMULS, "context", *_QUANTIZED),
    "save_dot_except_mlp": (*_QKV, "out_proj"),
    "save_dot_except_mlpwi": (*_QKV, "out_proj", *_MLP_OUT),
    "save_dot_with_context_except_mlp": (*_QKV, "context", "out_proj"),
    "save_qkv_proj": _QKV,
    "save_out_proj": ("out_proj",),
}
# Names of the tensors that wait in the host's memory.
OFFLOADED_NAMES: dict[str, tuple[str, ...]] = {
    "qkv_proj_offloaded": _QKV,
    "minimal_offloaded": _MATMULS,
}
assert set(REMAT_POLICY_NAMES) == {"none", "custom", *SAVED_NAMES, *OFFLOADED_NAMES}


class KeptNames(NamedTuple):
    """Names of the tensors that stay on the device, and of those that wait in the host's memory."""

    saved: tuple[str, ...]
    offloaded: tuple[str, ...]


def kept_names(compute: ComputeConfig) -> KeptNames | None:
    """Returns what `remat_policy` keeps beside a layer's input; None is everything."""
    policy = compute.remat_policy
    if policy == "none":
        return None
    if policy != "custom":
        return KeptNames(SAVED_NAMES.get(policy, ()), OFFLOADED_NAMES.get(policy, ()))

    def placed(place: str) -> tuple[str, ...]:
        return tuple(name for name in REMAT_TENSORS if getattr(compute, name) == place)

    # On the device the input is kept as it comes; by its name it would be kept a second time.
    inputs = (LAYER_INPUT,) if compute.decoder_layer_input == "offload" else ()
    return KeptNames(placed("device"), (*inputs, *placed("offload")))


def rematerialize(block: Callable[..., Any], kept: KeptNames | None, *, inside_scan: bool) -> Callable[..., Any]:
    """Wraps `block` so that its backward pass keeps only the tensors of these names; None keeps everything.

    block: its first argument is the layer's input [B, T, D].
    inside_scan: it is the body of a loop that runs more than once. The loop itself then keeps XLA from merging the
        second computation with the first, so the barriers that would prevent that are left out: they cost time.
    """
    if kept is None:
        return block
    saved, offloaded = kept

    def named(x: jax.Array, *others: Any) -> Any:
        return block(checkpoint_name(x, LAYER_INPUT), *others)

    policies = jax.checkpoint_policies
    if offloaded:
        rule = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(saved),
            names_which_can_be_offloaded=list(offloaded),
            offload_src="device",
            offload_dst=HOST_MEMORY,
        )
    else:
        rule = policies.save_only_these_names(*saved)
    return jax.checkpoint(named, policy=rule, prevent_cse=not inside_scan)
