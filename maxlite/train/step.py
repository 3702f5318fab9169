"""The loss, the compiled training step and the evaluation step: pure functions of (state, batch)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxlite.config.schema import OptimizerConfig, TrainConfig
from maxlite.data.batch import Batch
from maxlite.model.build import Model
from maxlite.ops.loss import chunked_cross_entropy
from maxlite.train.optimizer import Schedule
from maxlite.train.state import TrainState

# Float32 logits of one tile stay below this, when num_vocab_tiling=0 leaves the choice to us: small enough for a
# last-level cache on a CPU, and nothing beside the weights elsewhere.
AUTO_TILE_BYTES = 64 << 20


class LossSums(NamedTuple):
    """Sums over real targets: of cross entropy, of z-loss, and their number (all float32 scalars)."""

    lm_loss: jax.Array
    z_loss: jax.Array
    weight: jax.Array


LossFunction = Callable[[Any, Batch, jax.Array], LossSums]


def build_loss(model: Model, num_tiles: int, z_loss_multiplier: float) -> LossFunction:
    """Returns `loss(params, batch, scale)`: the sums over the batch, each target's loss times `scale`."""

    def loss(params: Any, batch: Batch, scale: jax.Array) -> LossSums:
        hidden = model.apply(params, batch.inputs, batch.positions, batch.segment_ids).hidden
        lm_loss, z_loss = chunked_cross_entropy(
            hidden,
            model.unembedding(params),
            batch.targets,
            batch.loss_mask * scale,
            num_tiles=num_tiles,
            z_loss_multiplier=z_loss_multiplier,
            soft_cap=model.config.final_logits_soft_cap,
        )
        return LossSums(lm_loss, z_loss, jnp.sum(batch.loss_mask))

    return loss


def automatic_tiles(shape: tuple[int, int], vocab_size: int) -> int:
    """Returns the fewest tiles that keep the logits of one below AUTO_TILE_BYTES: a power of two, at most T.

    shape: rows and length of what one device has at once.
    """
    rows, length = shape
    tiles = 1
    while tiles * 2 <= length and rows * length * vocab_size * 4 > AUTO_TILE_BYTES * tiles:
        tiles *= 2
    return tiles


def build_train_step(
    loss: LossFunction,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Schedule,
    train: TrainConfig,
    clip: OptimizerConfig,
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns `step(state, batch) -> (state, metrics)`, to be compiled with the state donated.

    Losses and gradients are those of the mean over all real targets of the batch, however it is cut into
    micro-batches: the number of targets is known before the first of them runs.
    """
    micro_batches = train.gradient_accumulation_steps
    threshold = clip.gradient_clipping_threshold

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        weight = jnp.sum(batch.loss_mask)
        scale = 1.0 / jnp.maximum(weight, 1.0)
        sums, gradients = _gradients(loss, state.params, batch, scale, micro_batches)
        raw_norm = _norm(gradients)
        norm = raw_norm if threshold == 0 else jnp.minimum(raw_norm, threshold)
        # A norm of 0 leaves nothing to scale; NaN and inf go through, to be seen in the loss.
        factor = norm / jnp.where(raw_norm == 0, 1.0, raw_norm)
        gradients = jax.tree.map(lambda g, p: (g * factor).astype(p.dtype), gradients, state.params)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params, has_targets=weight > 0)
        params = optax.apply_updates(state.params, updates)
        loss_value = sums.lm_loss + sums.z_loss
        metrics = {
            "loss": loss_value,
            "lm_loss": sums.lm_loss,
            "z_loss": sums.z_loss,
            "total_weights": weight,
            "raw_grad_norm": raw_norm,
            "grad_norm": norm,
            "param_norm": _norm(params),
            "current_learning_rate": schedule(state.step),
        }
        return TrainState(state.step + 1, params, opt_state), metrics

    return train_step


def _norm(tree: Any) -> jax.Array:
    """Global L2 norm, its sum in float32 whatever the dtype."""
    return optax.tree.norm(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree))


def _gradients(
    loss: LossFunction, params: Any, batch: Batch, scale: jax.Array, micro_batches: int
) -> tuple[LossSums, Any]:
    def total(params: Any, batch: Batch) -> tuple[jax.Array, LossSums]:
        sums = loss(params, batch, scale)
        return sums.lm_loss + sums.z_loss, sums

    gradient = jax.grad(total, has_aux=True)
    if micro_batches == 1:
        gradients, sums = gradient(params, batch)
        return sums, gradients

    def accumulate(carry: Any, micro_batch: Batch) -> tuple[Any, None]:
        gradients, sums = gradient(params, micro_batch)
        # Sums of many small terms are kept in float32 even where the weights are not.
        added = jax.tree.map(lambda total, new: total + new.astype(total.dtype), carry, (sums, gradients))
        return added, None

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
    start = (LossSums(*[jnp.float32(0)] * 3), zeros)
    (sums, gradients), _ = jax.lax.scan(accumulate, start, _split_rows(batch, micro_batches))
    return sums, gradients


def _split_rows(batch: Batch, micro_batches: int) -> Batch:
    """[B, T] -> [micro_batches, B / micro_batches, T]; every n-th row together, so that no row changes its device."""
    return jax.tree.map(lambda x: x.reshape(-1, micro_batches, x.shape[1]).swapaxes(0, 1), batch)


def build_eval_step(loss: LossFunction) -> Callable[[Any, Batch], LossSums]:
    """Returns `step(params, batch)`: the sums over the batch, to be added up over batches on the host."""

    def eval_step(params: Any, batch: Batch) -> LossSums:
        return loss(params, batch, jnp.float32(1))

    return eval_step
