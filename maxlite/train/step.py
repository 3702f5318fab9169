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
from maxlite.parallel.sharding import split_rows
from maxlite.train.optimizer import Schedule
from maxlite.train.router_bias import with_updated_biases
from maxlite.train.state import TrainState
from maxlite.train.trained import Divided, divided, joined, trained_part

# Float32 logits of one tile stay below this, when num_vocab_tiling=0 leaves the choice to us: small enough for a
# last-level cache on a CPU, and nothing beside the weights elsewhere.
AUTO_TILE_BYTES = 64 << 20
# Metrics of a step on a mixture, [S]: the sum of each source's cross entropy in nats, and the number of its targets.
SOURCE_LOSSES, SOURCE_TARGETS = "source_losses", "source_targets"


class LossSums(NamedTuple):
    """Sums over a batch, float32: of its real targets' cross entropy, z-loss and number, and of its real tokens.

    balance: the experts' load-balance loss of every real token, averaged over the routed layers; 0 without experts.
    loads: group -> block -> [R, E], the choices that each expert got.
    source_losses, source_targets: [S], the share of each of a mixture's sources in lm_loss and targets; None without.
    """

    lm_loss: jax.Array
    z_loss: jax.Array
    balance: jax.Array
    targets: jax.Array
    tokens: jax.Array
    loads: dict[str, dict[str, jax.Array]]
    source_losses: jax.Array | None = None
    source_targets: jax.Array | None = None


class Scales(NamedTuple):
    """Factors of what is summed over targets and over tokens: one over their number gives means."""

    target: jax.Array
    token: jax.Array


LossFunction = Callable[[Any, Batch, Scales], LossSums]


def build_loss(model: Model, num_tiles: int, z_loss_multiplier: float, num_sources: int | None = None) -> LossFunction:
    """Returns `loss(params, batch, scales)`: sums over the batch, each target's and token's loss times its scale.

    num_sources: of a mixture, whose batches have source_ids; None without.
    """

    def loss(params: Any, batch: Batch, scales: Scales) -> LossSums:
        output = model.apply(params, batch.inputs, batch.positions, batch.segment_ids)
        lm_loss, z_loss = chunked_cross_entropy(
            output.hidden,
            model.unembedding(params),
            batch.targets,
            batch.loss_mask * scales.target,
            num_tiles=num_tiles,
            z_loss_multiplier=z_loss_multiplier,
            soft_cap=model.config.final_logits_soft_cap,
            source_ids=batch.source_ids,
            num_sources=num_sources,
        )
        balances = [stats.balance for blocks in output.stats.values() for stats in blocks.values()]
        layers = max(sum(balance.shape[0] for balance in balances), 1)
        return LossSums(
            lm_loss if num_sources is None else jnp.sum(lm_loss),
            z_loss,
            sum((jnp.sum(balance) for balance in balances), jnp.float32(0)) / layers * scales.token,
            jnp.sum(batch.loss_mask),
            _num_tokens(batch),
            {group: {name: stats.load for name, stats in blocks.items()} for group, blocks in output.stats.items()},
            None if num_sources is None else lm_loss,
            None if num_sources is None else _source_targets(batch, num_sources),
        )

    return loss


def _num_tokens(batch: Batch) -> jax.Array:
    return jnp.sum(batch.segment_ids != 0, dtype=jnp.float32)


def _source_targets(batch: Batch, num_sources: int) -> jax.Array:
    is_of = batch.source_ids == jnp.arange(num_sources, dtype=jnp.int32)[:, None, None]
    return jnp.sum(jnp.where(is_of, batch.loss_mask, 0.0), axis=(1, 2))


def automatic_tiles(shape: tuple[int, int], vocab_size: int) -> int:
    """Returns the fewest tiles that keep the logits of one below AUTO_TILE_BYTES: a power of two, at most T.

    shape: rows and length of what one device has at once.
    """
    rows, length = shape
    tiles = 1
    while tiles * 2 <= length and rows * length * vocab_size * 4 > AUTO_TILE_BYTES * tiles:
        tiles *= 2
    return tiles


class Placement(NamedTuple):
    """What the step works on and where, as trees of shardings; None leaves it to the partitioner.

    gradients: like what trains. moments: like the optimizer's state, on the devices, if it rests elsewhere.
    trainable: bools like the parameters, which of them train; None: all.
    """

    gradients: Any = None
    moments: Any = None
    trainable: Any = None


def build_train_step(
    loss: LossFunction,
    optimizer: optax.GradientTransformationExtraArgs,
    schedule: Schedule,
    train: TrainConfig,
    clip: OptimizerConfig,
    placement: Placement = Placement(),  # noqa: B008  (immutable)
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns `step(state, batch) -> (state, metrics)`, to be compiled with the state donated.

    Losses and gradients are those of the mean over all real targets of the batch (for the load-balance loss: over all
    real tokens), however it is cut into micro-batches: their number is known before the first of them runs.
    Parameters that do not train have no gradients and no moments, and come out as they went in.
    """
    threshold = clip.gradient_clipping_threshold

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        targets = jnp.sum(batch.loss_mask)
        scales = Scales(1.0 / jnp.maximum(targets, 1.0), 1.0 / jnp.maximum(_num_tokens(batch), 1.0))
        trainable = jax.tree.map(lambda _: True, state.params) if placement.trainable is None else placement.trainable
        params = divided(state.params, trainable)
        sums, gradients = _gradients(loss, params, batch, scales, train, placement)
        raw_norm = _norm(gradients)
        norm = raw_norm if threshold == 0 else jnp.minimum(raw_norm, threshold)
        # A norm of 0 leaves nothing to scale; NaN and inf go through, to be seen in the loss.
        factor = norm / jnp.where(raw_norm == 0, 1.0, raw_norm)
        gradients = jax.tree.map(lambda g, p: (g * factor).astype(p.dtype), gradients, params.trained)
        moments = state.opt_state
        if placement.moments is not None:
            moments = jax.device_put(moments, placement.moments)
        updates, moments = optimizer.update(gradients, moments, params.trained, has_targets=targets > 0)
        trained = optax.apply_updates(params.trained, updates)
        new_params = joined(trained, params.frozen)
        if train.routed_bias_update_rate:
            new_params = with_updated_biases(new_params, sums.loads, train.routed_bias_update_rate)
        metrics = {
            "loss": _total(sums, train),
            "lm_loss": sums.lm_loss,
            "z_loss": sums.z_loss,
            "total_weights": targets,
            "raw_grad_norm": raw_norm,
            "grad_norm": norm,
            "param_norm": _norm(trained_part(new_params, trainable)),
            "current_learning_rate": schedule(state.step),
            **_routing_metrics(sums),
        }
        if sums.source_losses is not None and sums.source_targets is not None:
            metrics[SOURCE_LOSSES] = sums.source_losses / scales.target
            metrics[SOURCE_TARGETS] = sums.source_targets
        return TrainState(state.step + 1, new_params, moments), metrics

    return train_step


def _total(sums: LossSums, train: TrainConfig) -> jax.Array:
    return sums.lm_loss + sums.z_loss + train.load_balance_loss_weight * sums.balance


def _routing_metrics(sums: LossSums) -> dict[str, jax.Array]:
    """Of a model with experts: their balance loss, and the largest load of one over the mean load of its layer's."""
    loads = jax.tree.leaves(sums.loads)
    if not loads:
        return {}
    largest = [jnp.max(jnp.max(load, axis=-1) / jnp.maximum(jnp.mean(load, axis=-1), 1e-9)) for load in loads]
    return {"moe_lb_loss": sums.balance, "moe/expert_load_max_over_mean": jnp.max(jnp.stack(largest))}


def _norm(tree: Any) -> jax.Array:
    """Global L2 norm, its sum in float32 whatever the dtype."""
    return optax.tree.norm(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree))


def _gradients(
    loss: LossFunction, params: Divided, batch: Batch, scales: Scales, train: TrainConfig, placement: Placement
) -> tuple[LossSums, Any]:
    def total(trained: Any, batch: Batch) -> tuple[jax.Array, LossSums]:
        sums = loss(joined(trained, params.frozen), batch, scales)
        return _total(sums, train), sums

    def gradient(trained: Any, batch: Batch) -> tuple[LossSums, Any]:
        gradients, sums = jax.grad(total, has_aux=True)(trained, batch)
        return sums, gradients if placement.gradients is None else jax.lax.with_sharding_constraint(
            gradients, placement.gradients
        )

    micro_batches = train.gradient_accumulation_steps
    if micro_batches == 1:
        return gradient(params.trained, batch)

    def accumulate(carry: Any, micro_batch: Batch) -> tuple[Any, None]:
        # Sums of many small terms are kept in float32 even where the weights are not.
        new = gradient(params.trained, micro_batch)
        return jax.tree.map(lambda total, new: total + new.astype(total.dtype), carry, new), None

    parts = _split_batch(batch, micro_batches)
    shapes = jax.eval_shape(gradient, params.trained, jax.tree.map(lambda part: part[0], parts))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), shapes)
    return jax.lax.scan(accumulate, zeros, parts)[0]


def _split_batch(batch: Batch, micro_batches: int) -> Batch:
    return jax.tree.map(lambda rows: split_rows(rows, micro_batches), batch)


def build_eval_step(loss: LossFunction, micro_batches: int = 1) -> Callable[[Any, Batch], LossSums]:
    """Returns `step(params, batch)`: the sums over the batch, to be added up over batches on the host.

    micro_batches: as in training, so that an evaluation needs no more memory at once than a step.
    """

    def sums(params: Any, batch: Batch) -> LossSums:
        return loss(params, batch, Scales(jnp.float32(1), jnp.float32(1)))

    def eval_step(params: Any, batch: Batch) -> LossSums:
        if micro_batches == 1:
            return sums(params, batch)
        parts = jax.lax.map(lambda part: sums(params, part), _split_batch(batch, micro_batches))
        return jax.tree.map(lambda part: jnp.sum(part, axis=0), parts)

    return eval_step
