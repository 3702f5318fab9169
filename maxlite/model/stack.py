"""Layer groups: stacked parameters, the scan over them, and remat. All lifted transforms live here.

The parameters of a group are stacked over its repeats, one array a weight. For decoding they may instead come
as a tuple of the repeats' arrays (`unstack`): slicing a stacked array inside a loop copies each layer's weights
for every token.
"""

import functools
from typing import Any

import jax
from flax import nnx

from maxlite.config.layers import LayerGroup
from maxlite.config.schema import ComputeConfig, ModelConfig
from maxlite.model.block import Block
from maxlite.model.remat import rematerialize
from maxlite.nn.attention import AttentionContext


class Pattern(nnx.Module):
    """The blocks of one repeat, in order."""

    def __init__(self, group: LayerGroup, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs | None):
        """Makes block_0, block_1, ..."""
        self.num_blocks = len(group.pattern)
        for position, spec in enumerate(group.pattern):
            setattr(self, f"block_{position}", Block(spec, model, compute, rngs=rngs))

    def __call__(self, x: jax.Array, context: AttentionContext, cache: Any) -> tuple[jax.Array, Any]:
        """x: [B, T, D]; cache: a LayerCache for each block by name, or None."""
        caches = {}
        for name in [f"block_{position}" for position in range(self.num_blocks)]:
            x, caches[name] = getattr(self, name)(x, context, None if cache is None else cache[name])
        return x, (None if cache is None else caches)


class Stack(nnx.Module):
    """A group of layers: `repeats` runs through its pattern, each with its own weights."""

    def __init__(self, group: LayerGroup, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs | None):
        """Makes the stacked weights, or without `rngs` their shapes."""

        @nnx.split_rngs(splits=group.repeats)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make_pattern(rngs: nnx.Rngs) -> Pattern:
            return Pattern(group, model, compute, rngs=rngs)

        if rngs is None:
            self.layers = _stacked(Pattern(group, model, compute, rngs=None), group.repeats)
        else:
            self.layers = make_pattern(rngs)
        self.repeats = group.repeats
        self.remat_policy = compute.remat_policy
        self.unroll = 1 if compute.scan_layers else group.repeats

    def __call__(self, x: jax.Array, context: AttentionContext, cache: Any) -> tuple[jax.Array, Any]:
        """x: [B, T, D]; cache: stacked over the repeats like the weights (or a tuple), or None."""
        graphdef, state = nnx.split(self.layers)
        params = nnx.to_pure_dict(state)

        def run_pattern(x: jax.Array, params: Any, cache: Any) -> tuple[jax.Array, Any]:
            return nnx.merge(graphdef, params)(x, context, cache)

        if _is_unstacked(params):
            new_cache = []
            for repeat in range(self.repeats):
                x, layer_cache = run_pattern(x, _pick(params, repeat), cache[repeat] if cache else None)
                new_cache.append(layer_cache)
            return x, (tuple(new_cache) if cache else None)
        body = rematerialize(run_pattern, self.remat_policy, inside_scan=self.unroll == 1)
        return jax.lax.scan(lambda x, xs: body(x, *xs), x, (params, cache), unroll=self.unroll)


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
