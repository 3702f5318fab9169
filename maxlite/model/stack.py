"""Layer groups: stacked parameters, the scan over them, and remat. All lifted transforms live here.

The parameters of a group are stacked over its repeats, one array a weight. For decoding they may instead come
as a tuple of the repeats' arrays (`unstack`): slicing a stacked array inside a loop copies each layer's weights
for every token.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from maxlite.config.compute_schema import ComputeConfig
from maxlite.config.layers import LayerGroup
from maxlite.config.schema import ModelConfig
from maxlite.model.block import Block
from maxlite.model.equip import equip
from maxlite.model.pipeline import build_pipeline_schedule, run_pipeline
from maxlite.model.remat import kept_names, rematerialize
from maxlite.nn.attention import AttentionContext
from maxlite.ops.router import RouterStats
from maxlite.parallel.sharding import axis_size, current_execution, live_axes

# What each routed block of a pattern did, by its name.
Stats = dict[str, RouterStats]


class Pattern(nnx.Module):
    """The blocks of one repeat, in order."""

    def __init__(
        self, name: str, group: LayerGroup, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs | None
    ):
        """Makes block_0, block_1, ... of the group of this name, their products equipped as `compute` says."""
        self.num_blocks = len(group.pattern)
        for position, spec in enumerate(group.pattern):
            setattr(self, f"block_{position}", Block(spec, model, compute, rngs=rngs))
        equip(self, name, compute, rngs=rngs)

    def __call__(self, x: jax.Array, context: AttentionContext, cache: Any) -> tuple[jax.Array, Any, Stats]:
        """x: [B, T, D]; cache: a LayerCache for each block by name, or None. Returns them and the routers' stats."""
        caches, stats = {}, {}
        for name in [f"block_{position}" for position in range(self.num_blocks)]:
            x, caches[name], routed = getattr(self, name)(x, context, None if cache is None else cache[name])
            if routed is not None:
                stats[name] = routed
        return x, (None if cache is None else caches), stats


class Stack(nnx.Module):
    """A group of layers: `repeats` runs through its pattern, each with its own weights."""

    def __init__(
        self, name: str, group: LayerGroup, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs | None
    ):
        """Makes the stacked weights, or without `rngs` their shapes."""

        @nnx.split_rngs(splits=group.repeats)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make_pattern(rngs: nnx.Rngs) -> Pattern:
            return Pattern(name, group, model, compute, rngs=rngs)

        if rngs is None:
            self.layers = _stacked(Pattern(name, group, model, compute, rngs=None), group.repeats)
        else:
            self.layers = make_pattern(rngs)
        self.repeats = group.repeats
        self.kept = kept_names(compute)
        self.unroll = 1 if compute.scan_layers else group.repeats

    def __call__(self, x: jax.Array, context: AttentionContext, cache: Any) -> tuple[jax.Array, Any, Stats]:
        """x: [B, T, D]; cache: stacked over the repeats like the weights (or a tuple), or None.

        Returns: x, the cache, and the routers' stats by block, stacked over the repeats; none with a cache.
        """
        graphdef, state = nnx.split(self.layers)
        params = nnx.to_pure_dict(state)

        def run_pattern(x: jax.Array, params: Any, context: AttentionContext, cache: Any) -> Any:
            return nnx.merge(graphdef, params)(x, context, cache)

        if _is_unstacked(params):
            new_cache = []
            for repeat in range(self.repeats):
                x, layer_cache, _ = run_pattern(x, _pick(params, repeat), context, cache[repeat] if cache else None)
                new_cache.append(layer_cache)
            return x, (tuple(new_cache) if cache else None), {}
        stages = axis_size(live_axes("layers"))
        if stages > 1 and cache is None:
            return self._run_stages(run_pattern, stages, params, x, context)
        # XLA drops a loop of one turn, and would then merge the second computation with the first.
        looped = self.unroll == 1 and self.repeats > 1
        body = rematerialize(run_pattern, self.kept, inside_scan=looped)

        def step(x: jax.Array, xs: tuple[Any, Any]) -> tuple[jax.Array, tuple[Any, Stats]]:
            x, cache, stats = body(x, xs[0], context, xs[1])
            return x, (cache, stats)

        x, (cache, stats) = jax.lax.scan(step, x, (params, cache), unroll=self.unroll)
        return x, cache, stats

    def _run_stages(
        self, run_pattern: Callable[..., Any], stages: int, params: Any, x: jax.Array, context: AttentionContext
    ) -> tuple[jax.Array, None, Stats]:
        def run_without_cache(x: jax.Array, params: Any, context: AttentionContext) -> tuple[jax.Array, Stats]:
            x, _, stats = run_pattern(x, params, context, None)
            return x, stats

        execution = current_execution()
        schedule = build_pipeline_schedule(stages, self.repeats, execution.microbatches, execution.layers_per_stage)
        remat = functools.partial(rematerialize, kept=self.kept, inside_scan=True)
        x, stats = run_pipeline(run_without_cache, params, x, context, schedule, remat)
        return x, None, stats


def unstack(params: dict[str, Any], repeats: dict[str, int]) -> dict[str, Any]:
    """Turns the stacked weights of each group in `repeats` into tuples of one array a repeat."""
    return {
        name: jax.tree.map(lambda weight: tuple(weight[i] for i in range(repeats[name])), tree)  # noqa: B023
        if name in repeats
        else tree
        for name, tree in params.items()
    }


def take_apart(params: dict[str, Any], repeats: dict[str, int]) -> dict[str, Any]:
    """As `unstack`, outside of a compiled function: each stacked weight is given up as soon as it is taken apart."""

    def apart(weight: jax.Array, count: int) -> tuple[jax.Array, ...]:
        parts = _slices(weight, count)
        jax.block_until_ready(parts)
        weight.delete()
        return parts

    return {
        name: jax.tree.map(lambda weight: apart(weight, repeats[name]), tree) if name in repeats else tree  # noqa: B023
        for name, tree in params.items()
    }


@functools.partial(jax.jit, static_argnums=1)
def _slices(weight: jax.Array, count: int) -> tuple[jax.Array, ...]:
    return tuple(weight[index] for index in range(count))


def _stacked(pattern: Pattern, repeats: int) -> Pattern:
    """Shapes of one repeat -> shapes of all of them."""
    graphdef, state = nnx.split(pattern)
    return nnx.merge(
        graphdef, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((repeats, *leaf.shape), leaf.dtype), state)
    )


def _is_unstacked(params: dict[str, Any]) -> bool:
    first = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, tuple))[0]
    return isinstance(first, tuple)


def _pick(params: dict[str, Any], repeat: int) -> dict[str, Any]:
    return jax.tree.map(lambda weights: weights[repeat], params, is_leaf=lambda node: isinstance(node, tuple))
