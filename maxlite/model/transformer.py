"""The decoder: embedding, layer groups, final norm. One forward for training, prefill and decoding."""

from typing import NamedTuple

import jax
from flax import nnx

from maxlite.config.compute_schema import ComputeConfig
from maxlite.config.layers import layer_groups
from maxlite.config.schema import ModelConfig
from maxlite.model.equip import Product, products_of
from maxlite.model.stack import Stack, Stats
from maxlite.nn.attention import AttentionContext
from maxlite.nn.cache import Cache, write_tokens
from maxlite.nn.embedding import Embedding, OutputMatrix
from maxlite.nn.norm import RMSNorm
from maxlite.nn.rotary import rotary_tables, rotations
from maxlite.parallel.sharding import constrain


class Output(NamedTuple):
    """hidden: [B, T, D] after the final norm; cache: with these tokens in it, or None.

    stats: group -> block -> what its routers did, stacked over the group's repeats.
    """

    hidden: jax.Array
    cache: Cache | None
    stats: dict[str, Stats]


class Transformer(nnx.Module):
    """A decoder-only transformer."""

    def __init__(self, model: ModelConfig, compute: ComputeConfig, *, rngs: nnx.Rngs | None):
        """Makes all weights."""
        groups = layer_groups(model)
        self.group_names = tuple(f"group_{index}" for index in range(len(groups)))
        self.embedding = Embedding(model, compute, rngs=rngs)
        for name, group in zip(self.group_names, groups, strict=True):
            setattr(self, name, Stack(name, group, model, compute, rngs=rngs))
        self.final_norm = RMSNorm((model.emb_dim,), ("norm",), model, compute, rngs=rngs)
        if not model.logits_via_embedding:
            self.output = OutputMatrix(model, compute, rngs=rngs)
        self.tied = model.logits_via_embedding
        # A tuple, because what is static in a module must be hashable.
        self.rotary_tables = tuple(rotary_tables(model).items())

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array | None, cache: Cache | None
    ) -> Output:
        """tokens, positions, segment_ids: [B, T] int32."""
        turns = rotations(dict(self.rotary_tables), positions)
        index = None if cache is None else cache.index
        if cache is None:
            context = AttentionContext(positions, segment_ids, positions, segment_ids, turns, index)
        else:
            assert segment_ids is not None, "a cache marks empty slots by segment id 0"
            cache = write_tokens(cache, positions, segment_ids)
            keys = (cache.positions, cache.segment_ids)
            context = AttentionContext(positions, segment_ids, *keys, turns, index)
        x, layers, stats = self.embedding(tokens), {}, {}
        for name in self.group_names:
            x, layers[name], stats[name] = getattr(self, name)(
                x, context, None if cache is None else cache.layers[name]
            )
        hidden = constrain(self.final_norm(x), "batch", "norm_length", "activation_embed")
        return Output(hidden, None if cache is None else cache._replace(layers=layers), stats)

    def products(self) -> tuple[Product, ...]:
        """Returns the products of all layers, group by group."""
        stacks = [(name, getattr(self, name)) for name in self.group_names]
        return tuple(product for name, stack in stacks for product in products_of(stack.layers, name, stack.repeats))

    def unembedding(self) -> jax.Array:
        """Returns the matrix from hidden states to logits: [D, V]."""
        return self.embedding.matrix() if self.tied else self.output.matrix()
