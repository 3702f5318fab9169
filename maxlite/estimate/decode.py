"""The two programs of decoding, compiled for a full cache; nothing runs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlite.config.schema import Config
from maxlite.decode.generate import BatchShape, Programs, padded_length
from maxlite.decode.model import build_decode_model, compiler_options, rules_for_rows
from maxlite.decode.sampling import build_sampler
from maxlite.errors import ConfigError
from maxlite.estimate.compile import CompiledProgram, Target, compile_traced
from maxlite.model.build import Model
from maxlite.parallel.mesh import build_mesh
from maxlite.parallel.sharding import use_mesh
from maxlite.train.state import device_bytes


@dataclasses.dataclass(frozen=True)
class DecodeWork:
    """prefill, step: compiled. rows: of all devices, one new token each a step. prompt_tokens: of a prefill.

    cache: bytes on a device, of the tokens and all that layers remember of them.
    """

    mesh: Mesh
    model: Model
    params: Any
    rows: int
    prompt_tokens: int
    cache: int
    prefill: CompiledProgram
    step: CompiledProgram


def compile_decode(config: Config, target: Target) -> DecodeWork:
    """Compiles prefill and step for per_device_batch_size rows a device of max_target_length tokens.

    Raises:
        ConfigError: the devices or the length do not fit.
    """
    mesh = build_mesh(config.parallel, list(target.devices))
    platform = target.devices[0].platform
    model = build_decode_model(config, platform)
    options = compiler_options(model, platform)
    rows = max(1, round(config.data.per_device_batch_size * mesh.size))
    rules = rules_for_rows(config, mesh, rows)
    params = _unstacked(model, model.shardings(mesh, rules))
    shape = _shape(config, rows)
    programs = Programs(model, build_sampler(config.decode), (), shape)
    everywhere = NamedSharding(mesh, PartitionSpec())
    with use_mesh(mesh, rules, config.compute.matmul_precision):
        integers = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=everywhere)
        prompts = jax.ShapeDtypeStruct((rows, shape.prompt_length), jnp.int32, sharding=everywhere)
        traced = jax.jit(programs.prefill).trace(params, prompts, integers, integers)
        prefill = compile_traced("prefill", traced, target, options)
        state = _state(prefill, everywhere)
        placed = jax.tree.map(lambda leaf: leaf.sharding, state)
        step = jax.jit(programs.step, donate_argnums=1, out_shardings=(placed, None))
        count = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
        compiled = compile_traced("decode_step", step.trace(params, state, count), target, options)
    return DecodeWork(
        mesh, model, params, rows, rows * shape.prompt_length, device_bytes(state.cache), prefill, compiled
    )


def _state(prefill: CompiledProgram, everywhere: NamedSharding) -> Any:
    """The state between two tokens, placed as prefill leaves it; copied to all devices where prefill does not fit."""
    info = prefill.lowered.out_info
    if prefill.compiled is None:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere), info)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        info,
        prefill.compiled.output_shardings,
    )


def _shape(config: Config, rows: int) -> BatchShape:
    """As long a prompt as leaves room for max_new_tokens, and both fill the cache."""
    length = config.data.max_target_length
    room = length - min(config.decode.max_new_tokens, length // 2)
    prompt = max((size for size in range(1, room + 1) if padded_length(size) == size), default=0)
    if prompt == 0:
        raise ConfigError(f"max_target_length={length} is too short to estimate decoding; give 32 or more.")
    return BatchShape(rows, prompt, length - prompt)


def _unstacked(model: Model, shardings: Any) -> Any:
    """Abstract parameters, one array a layer, each placed as its stack is without the stack's dimension."""
    shapes = jax.eval_shape(model.unstack, model.abstract_params)

    def placed(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        node = shardings
        taken_apart = False
        for key in path:
            if isinstance(node, NamedSharding):
                taken_apart = True
            else:
                node = node[key.key]
        spec = PartitionSpec(*node.spec[1:]) if taken_apart else node.spec
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(node.mesh, spec))

    return jax.tree_util.tree_map_with_path(placed, shapes)
