"""What rounding costs on text: perplexity, and how far the rounded model's distributions are from the float model's."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxlite.config.schema import Config
from maxlite.data.batch import Batch
from maxlite.metrics.rates import perplexity
from maxlite.model.build import Model, Params
from maxlite.ops.loss import chunked_cross_entropy
from maxlite.ops.soft_cap import soft_capped
from maxlite.parallel.sharding import split_rows
from maxlite.train.eval_setup import EvalSetup
from maxlite.train.step import automatic_tiles


class Side(NamedTuple):
    """A model with its parameters, stacked and on the mesh."""

    model: Model
    params: Params


class TextSums(NamedTuple):
    """Sums over real targets: of both models' cross entropy in nats, of the divergence in nats, and of agreement.

    divergence: Kullback-Leibler, of the rounded model's next token from the float model's (that one's is the mean).
    agreed: targets for which both find the same token the likeliest.
    """

    whole_loss: Any
    stored_loss: Any
    divergence: Any
    agreed: Any
    targets: Any


class TextReport(NamedTuple):
    """What both models make of held-out text.

    divergence: mean, nats a target. agreement: share of 1.
    """

    targets: int
    whole_perplexity: float
    stored_perplexity: float
    divergence: float
    agreement: float


def build_text_step(
    config: Config, setup: EvalSetup, whole: Model, stored: Model
) -> Callable[[tuple[Params, Params], Batch], TextSums]:
    """Returns the compiled `step((whole params, stored params), batch) -> TextSums`, to be called in the setup's mesh.

    Its cross entropies are the numbers of `maxlite eval`.
    """
    micro_batches = config.train.gradient_accumulation_steps
    sizes = setup.rows // micro_batches, config.data.max_target_length
    # Two models' logits, their logarithms and probabilities at once, where a loss has one.
    tiles = config.compute.num_vocab_tiling or 4 * automatic_tiles(sizes, config.model.vocab_size)

    def sums(params: tuple[Params, Params], batch: Batch) -> TextSums:
        hidden, matrices, losses = [], [], []
        for model, own in zip((whole, stored), params, strict=True):
            hidden.append(model.apply(own, batch.inputs, batch.positions, batch.segment_ids).hidden)
            matrices.append(model.unembedding(own))
            losses.append(_loss(model, hidden[-1], matrices[-1], batch, tiles))
        soft_cap = whole.config.final_logits_soft_cap
        divergence, agreed = _compare(hidden, matrices, batch.loss_mask, tiles, soft_cap)
        return TextSums(losses[0], losses[1], divergence, agreed, jnp.sum(batch.loss_mask))

    def step(params: tuple[Params, Params], batch: Batch) -> TextSums:
        if micro_batches == 1:
            return sums(params, batch)
        parts = jax.tree.map(lambda rows: split_rows(rows, micro_batches), batch)
        return jax.tree.map(lambda part: jnp.sum(part, axis=0), jax.lax.map(lambda part: sums(params, part), parts))

    # Every process reads the sums.
    return jax.jit(step, out_shardings=NamedSharding(setup.mesh, PartitionSpec()))


def text_report(sums: TextSums) -> TextReport:
    """sums: over all batches, float64, of at least one target."""
    targets = float(sums.targets)
    return TextReport(
        targets=round(targets),
        whole_perplexity=perplexity(float(sums.whole_loss) / targets),
        stored_perplexity=perplexity(float(sums.stored_loss) / targets),
        divergence=float(sums.divergence) / targets,
        agreement=float(sums.agreed) / targets,
    )


def on_host(sums: Any) -> Any:
    """Returns a tree of sums in float64: adding up many batches loses nothing to the size of one."""
    return jax.tree.map(lambda value: np.asarray(value, np.float64), sums)


def _loss(model: Model, hidden: jax.Array, unembedding: jax.Array, batch: Batch, tiles: int) -> jax.Array:
    soft_cap = model.config.final_logits_soft_cap
    loss, _ = chunked_cross_entropy(
        hidden, unembedding, batch.targets, batch.loss_mask, num_tiles=tiles, soft_cap=soft_cap
    )
    return loss


def _compare(
    hidden: list[jax.Array], matrices: list[jax.Array], weights: jax.Array, tiles: int, soft_cap: float | None
) -> tuple[jax.Array, jax.Array]:
    """hidden: two of [B, T, D]; matrices: two of [D, V]; weights: [B, T]. Returns the sums of divergence and agreed."""

    def add_tile(total: tuple[jax.Array, jax.Array], tile: tuple[jax.Array, ...]) -> tuple[Any, None]:
        *parts, factors = tile
        logits = [_logits(part, matrix, soft_cap) for part, matrix in zip(parts, matrices, strict=True)]
        whole, stored = (jax.nn.log_softmax(part, axis=-1) for part in logits)
        divergence = jnp.sum(jnp.exp(whole) * (whole - stored), axis=-1)
        agreed = jnp.argmax(logits[0], axis=-1) == jnp.argmax(logits[1], axis=-1)
        return (total[0] + jnp.sum(divergence * factors), total[1] + jnp.sum(agreed * factors)), None

    zeros = jnp.float32(0), jnp.float32(0)
    cut = tuple(_tiled(part, tiles) for part in (*hidden, weights))
    return jax.lax.scan(add_tile, zeros, cut)[0]


def _logits(hidden: jax.Array, matrix: jax.Array, soft_cap: float | None) -> jax.Array:
    logits = jnp.einsum("BTD,DV->BTV", hidden, matrix.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return soft_capped(logits, soft_cap)


def _tiled(tokens: jax.Array, tiles: int) -> jax.Array:
    """[B, T, ...] -> [tiles, B, T / tiles, ...], padded with zeros: tokens that do not count."""
    length = tokens.shape[1]
    width = -(-length // min(tiles, length))
    count = -(-length // width)
    padding = [(0, 0), (0, width * count - length)] + [(0, 0)] * (tokens.ndim - 2)
    parts = jnp.pad(tokens, padding).reshape(tokens.shape[0], count, width, *tokens.shape[2:])
    return jnp.moveaxis(parts, 1, 0)
