"""What the backward pass keeps of each layer, by MaxText's policy names (docs/remat.md)."""

from collections.abc import Callable
from typing import Any

import jax

from maxlite.config.schema import REMAT_POLICY_NAMES

# Latent attention has latents besides: narrow, and the way to all heads. A gate is as wide as the queries.
_QKV = ("query_proj", "key_proj", "value_proj", "query_wa_proj", "kv_wa_proj", "gate_proj")
_MLP_IN = ("mlpwi_0", "mlpwi_1", "moe_mlpwi_0", "moe_mlpwi_1")
_MLP_OUT = ("mlpwo", "moe_mlpwo")
_MATMULS = (*_QKV, "out_proj", *_MLP_IN, *_MLP_OUT)

# Names of the tensors that stay on the device; everything else is computed again.
SAVED_NAMES: dict[str, tuple[str, ...]] = {
    "full": (),
    "minimal": _MATMULS,
    "minimal_with_context": (*_MATMULS, "context"),
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
assert set(REMAT_POLICY_NAMES) == {"none", *SAVED_NAMES, *OFFLOADED_NAMES}


def rematerialize(block: Callable[..., Any], policy: str, *, inside_scan: bool) -> Callable[..., Any]:
    """Wraps `block` so that its backward pass keeps only what `policy` names.

    Inside a scan the loop itself keeps XLA from merging the second computation with the first, so the
    barriers that would prevent that are left out: they cost time.
    """
    if policy == "none":
        return block
    policies = jax.checkpoint_policies
    if policy in OFFLOADED_NAMES:
        rule = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(OFFLOADED_NAMES[policy]),
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        rule = policies.save_only_these_names(*SAVED_NAMES[policy])
    return jax.checkpoint(block, policy=rule, prevent_cse=not inside_scan)
