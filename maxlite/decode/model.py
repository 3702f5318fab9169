"""The model as decoding has it, and where its tensors lie."""

import dataclasses

from jax.sharding import Mesh

from maxlite.config.schema import Config, LogicalAxisRules
from maxlite.model.build import Model, build_model, resolve_dtype
from maxlite.parallel.sharding import fitting_rules, mesh_axes, num_parts


def build_decode_model(config: Config, platform: str | None = None) -> Model:
    """Returns the model; platform: of the devices that it will run on, None is the default device's."""
    # Weights are cast once, when they are read, and not again for every token; unless another dtype was asked for.
    dtype = resolve_dtype(config.compute.dtype, platform)
    weight_dtype = config.compute.weight_dtype if config.was_given("weight_dtype") else dtype
    compute = dataclasses.replace(config.compute, dtype=dtype, weight_dtype=weight_dtype)
    return build_model(config.model, compute, platform)


def rules_for_rows(config: Config, mesh: Mesh, num_rows: int) -> LogicalAxisRules:
    """Returns the rules of decoding: layers lie on all stages, since a token goes through them one after the other.

    Rows that their mesh axes do not divide are copied to all devices.
    """
    rules = (("layers", ()), *fitting_rules(config.parallel.logical_axis_rules, mesh, config.model.vocab_size))
    return rules if num_rows % num_parts(mesh_axes("batch", rules), mesh) == 0 else (("batch", ()), *rules)
