"""The model as decoding has it, and where its tensors lie."""

import dataclasses

from jax.sharding import Mesh

from maxlite.config.schema import ComputeConfig, Config, LogicalAxisRules
from maxlite.model.build import Model, build_model, resolve_dtype
from maxlite.parallel.sharding import fitting_rules, mesh_axes, num_parts


def build_decode_model(config: Config, platform: str | None = None) -> Model:
    """Returns the model; platform: of the devices that it will run on, None is the default device's."""
    # Weights are cast once, when they are read, and not again for every token; unless another dtype was asked for.
    dtype = resolve_dtype(config.compute.dtype, platform)
    weight_dtype = config.compute.weight_dtype if config.was_given("weight_dtype") else dtype
    compute = dataclasses.replace(config.compute, dtype=dtype, weight_dtype=weight_dtype)
    return build_model(config.model, without_drops(compute), platform)


def without_drops(compute: ComputeConfig) -> ComputeConfig:
    """Tokens are dropped in training alone: here a prompt's text would depend on those beside it."""
    return dataclasses.replace(compute, capacity_factor=None)


def rules_for_rows(config: Config, mesh: Mesh, num_rows: int) -> LogicalAxisRules:
    """Returns the rules of decoding, where a step has one token a row and goes through the layers one after the other.

    So all stages have all layers, and rows are not cut over their length. Rows that their mesh axes do not divide are
    copied to all devices.
    """
    whole = (("layers", ()), ("length", ()), ("norm_length", ()))
    rules = (*whole, *fitting_rules(config.parallel.logical_axis_rules, mesh, config.model.vocab_size))
    return rules if num_rows % num_parts(mesh_axes("batch", rules), mesh) == 0 else (("batch", ()), *rules)
