"""Which tensors of a model remat_policy=custom may name, and the refusal of those that the model does not have."""

from collections.abc import Iterator

from maxlite.config.compute_schema import LAYER_INPUT, REMAT_TENSORS
from maxlite.config.layers import layer_specs
from maxlite.config.schema import Config, ModelConfig

_DENSE = ("mlpwi_0", "mlpwi_1", "mlpwo")
_MOE = ("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo")


def remat_tensors(model: ModelConfig) -> tuple[str, ...]:
    """Returns the names that occur in the layers of this model, in the order of REMAT_TENSORS."""
    found: set[str] = set()
    for spec in layer_specs(model):
        found.update(_attention_tensors(model, spec.attention))
        found.update(_mlp_tensors(model, spec.mlp))
    return tuple(name for name in REMAT_TENSORS if name in found)


def check_remat(config: Config) -> Iterator[str]:
    """A tensor that remat_policy=custom keeps occurs in the model."""
    if config.compute.remat_policy != "custom":
        return
    present = remat_tensors(config.model)
    for name in REMAT_TENSORS:
        place = getattr(config.compute, name)
        if place != "remat" and name not in present:
            yield (
                f"{name}={place}: no layer of this model has such a tensor; there are "
                f"{', '.join((LAYER_INPUT, *present))}. Set {name}=remat."
            )


def _attention_tensors(model: ModelConfig, kind: str) -> tuple[str, ...]:
    common = ("query_proj", "key_proj", "value_proj", "out_proj")
    if kind == "gated_delta_net":
        return (*common, "gate_proj")
    if kind == "mla":
        latents = ("kv_wa_proj",) if model.q_lora_rank is None else ("query_wa_proj", "kv_wa_proj")
        return (*common, "context", *latents)
    return (*common, "context", "gate_proj") if model.attention_output_gate else (*common, "context")


def _mlp_tensors(model: ModelConfig, kind: str) -> tuple[str, ...]:
    if kind == "dense":
        return _DENSE
    has_dense = kind == "dense_and_moe" or model.shared_expert_mlp_dim is not None
    return (*_DENSE, *_MOE) if has_dense else _MOE
