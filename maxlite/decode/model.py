"""The model as decoding has it, and where its tensors lie."""

import dataclasses
import math

import jax
from jax.sharding import Mesh

from maxlite.config.layers import layer_specs
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


def compiler_options(model: Model, platform: str | None = None) -> dict[str, str | bool]:
    """Returns options for programs of one array a layer; platform: as build_decode_model has it.

    Where kernels are in few bits, the scheduler of CPUs would begin with the floats of all layers, which wait for
    nothing, and hold them together.
    """
    in_few_bits = any(product.equipment.stored is not None for product in model.products)
    on_cpu = (platform or jax.default_backend()) == "cpu"
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if in_few_bits and on_cpu else {}


def rules_for_rows(config: Config, mesh: Mesh, num_rows: int) -> LogicalAxisRules:
    """Returns the rules of decoding, where a step has one token a row and goes through the layers one after the other.

    So all stages have all layers, and rows are not cut over their length. Rows that their mesh axes do not divide are
    copied to all devices.
    """
    whole = (("layers", ()), ("length", ()), ("norm_length", ()))
    rules = (*whole, *fitting_rules(config.parallel.logical_axis_rules, mesh, config.model.vocab_size))
    return rules if num_rows % num_parts(mesh_axes("batch", rules), mesh) == 0 else (("batch", ()), *rules)


def describe_cache(model: Model, rows: int, length: int) -> str:
    """Returns one line: what the cache of so many slots a row is rounded to, and its bytes over all devices."""
    compute = model.compute
    plain = dataclasses.replace(model, compute=dataclasses.replace(compute, quantize_kvcache=False))
    share = "a scale for each head and token" if compute.kv_quant_axis == "dkv" else "a scale for each token"
    line = (
        f"Cache: {rows} x {length} tokens, keys and values in {compute.kv_quant_dtype} with {share}: "
        f"{_cache_bytes(model, rows, length) / 1e6:,.3g} MB instead of {_cache_bytes(plain, rows, length) / 1e6:,.3g}"
    )
    kinds = {spec.attention for spec in layer_specs(model.config)}
    return line + ("; what gated_delta_net remembers stays as it is" if "gated_delta_net" in kinds else "")


def _cache_bytes(model: Model, rows: int, length: int) -> int:
    layers = jax.eval_shape(lambda: model.init_cache(rows, length)).layers
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(layers))
