"""The layers of a group as stages of a pipeline: micro-batches follow one another through the mesh axis of `layers`.

The schedule is circular (Narayanan et al. 2021, arXiv:2104.04473, interleaved stages): in round r stage s runs the
repeats of the layer pattern from (r * stages + s) * layers_per_stage on. At each tick all stages work, each on another
micro-batch, as one computation with a leading dimension of stages that lies along their mesh axis; then every stage
hands its result to the next. What the last one hands back to the first waits there for the next round.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from maxlite.parallel.sharding import constrain, live_axes, split_rows

_ROWS = ("batch", "norm_length", "activation_embed")


class PipelineSchedule(NamedTuple):
    """stages: parts of the mesh; microbatches: parts of the batch; layers_per_stage: repeats a stage and round."""

    stages: int
    microbatches: int
    layers_per_stage: int

    def rounds(self, repeats: int) -> int:
        """Returns how often a micro-batch goes through all stages, for a group of so many repeats."""
        rounds, rest = divmod(repeats, self.stages * self.layers_per_stage)
        assert rest == 0 and rounds > 0, f"{self} does not divide {repeats} repeats"
        assert rounds == 1 or self.microbatches >= self.stages, f"{self}: a round begins before the last one ends"
        return rounds

    def ticks(self, repeats: int) -> int:
        """Returns how many times each stage runs."""
        return self.microbatches * self.rounds(repeats) + self.stages - 1

    def bubble(self, repeats: int) -> float:
        """Returns the share of a stage's ticks in which it has nothing to do."""
        return (self.stages - 1) / self.ticks(repeats)


def build_pipeline_schedule(
    stages: int, repeats: int, microbatches: int | None, layers_per_stage: int | None
) -> PipelineSchedule:
    """Returns the schedule of a group of layers; None stands for as many micro-batches as stages, and for one round."""
    return PipelineSchedule(stages, microbatches or stages, layers_per_stage or repeats // stages)


def run_pipeline(
    run_pattern: Callable[[jax.Array, Any, Any], tuple[jax.Array, Any]],
    params: Any,
    x: jax.Array,
    context: Any,
    schedule: PipelineSchedule,
    rematerialize: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> tuple[jax.Array, Any]:
    """Runs all repeats of a layer pattern on x: [B, T, D].

    run_pattern: (x, params of one repeat, context) -> (x, stats: pytree of arrays or None); not rematerialized yet.
    params: pytree of [R, ...], cut along R by the mesh axis of `layers`.
    context: pytree of [B, ...], what the layers know of each row.
    rematerialize: wraps a function whose first argument is a layer's input. It gets run_pattern together with the
        choice of its parameters and context, so that these are chosen again in the backward pass and not kept.

    Returns: x, and the stats stacked to [R, ...] and summed over the micro-batches.
    """
    repeats = jax.tree.leaves(params)[0].shape[0]
    rounds, ticks = schedule.rounds(repeats), schedule.ticks(repeats)
    context = jax.tree.map(lambda rows: split_rows(rows, schedule.microbatches), context)
    params = _by_stage(params, schedule, rounds)
    run_stages = _stage_step(run_pattern, rematerialize)
    first = jnp.arange(schedule.stages).reshape(-1, 1, 1, 1) == 0

    def tick(carry: tuple[jax.Array, jax.Array, Any], now: jax.Array) -> tuple[tuple[jax.Array, jax.Array, Any], Any]:
        state, store, ledger = carry
        work, taken, done = _work(schedule, rounds, now)
        store, waiting = _take(store, taken)
        state = _on_stages(jnp.where(first, waiting, state))
        weights, ledger = _chosen_weights(params, ledger, work.rounds)
        state, stats = jax.lax.scan(lambda x, weights: run_stages(x, weights, context, work), state, weights)
        state = _on_stages(_turn(state, 1))
        return (state, _put(store, state, done), ledger), stats

    rows = constrain(split_rows(x, schedule.microbatches), None, *_ROWS)
    store = constrain(jnp.broadcast_to(rows, (schedule.stages, *rows.shape)), "layers", None, *_ROWS)
    # Stages that have nothing to do yet compute on real rows: their results are dropped, but must be finite.
    start = (jax.lax.stop_gradient(store[:, 0]), store, jax.tree.map(lambda page: page.astype(jnp.float32), params))
    (_, store, _), stats = jax.lax.scan(tick, start, jnp.arange(ticks))
    x = constrain(_merge(store[0]), *_ROWS)
    return x, jax.tree.map(functools.partial(_summed, schedule=schedule, rounds=rounds), stats)


class _Rounds(NamedTuple):
    """All stages are in the newest round of a tick or in the one before.

    newest, before: places of their weights, the same for all stages; is_newest: [S], which of them a stage is in.
    For vmap the same holds the axes.
    """

    newest: jax.Array | None
    before: jax.Array | None
    is_newest: jax.Array | int


class _Work(NamedTuple):
    """What the stages do in a tick: microbatch: [S]; rounds: None where there is but one. For vmap: the axes."""

    microbatch: jax.Array | int
    rounds: _Rounds | None


def _work(schedule: PipelineSchedule, rounds: int, now: jax.Array) -> tuple[_Work, jax.Array, jax.Array]:
    """Returns the work of tick `now`, where the first stage takes its rows, and where those of the last one go.

    Before the last stage has rows to give, what comes from it goes where rows were just taken; after the first one
    has had its last rows, it takes those that are overwritten next.
    """
    stages, microbatches = schedule.stages, schedule.microbatches
    begun = now - jnp.arange(stages)
    done = jnp.where(now >= stages - 1, now - (stages - 1), now) % microbatches
    taken = jnp.where(now < microbatches * rounds, now % microbatches, done)
    newest = now // microbatches
    is_newest = begun >= newest * microbatches
    chosen = _Rounds(jnp.clip(newest, 0, rounds - 1), jnp.clip(newest - 1, 0, rounds - 1), is_newest)
    return _Work(begun % microbatches, chosen if rounds > 1 else None), taken, done


def _stage_step(run_pattern: Callable[..., Any], rematerialize: Callable[..., Any]) -> Callable[..., Any]:
    """One repeat on every stage: (x [S, mb, T, D], weights, context [M, mb, ...], work) -> (x, stats [S, ...])."""

    def one_stage(x: jax.Array, weights: Any, context: Any, work: _Work) -> Any:
        weights = jax.tree.map(functools.partial(_weight, rounds=work.rounds), *weights)
        rows = jax.tree.map(lambda rows: jax.lax.dynamic_index_in_dim(rows, work.microbatch, keepdims=False), context)
        return run_pattern(x, weights, rows)

    def step(x: jax.Array, weights: Any, context: Any, work: _Work) -> Any:
        of_work = _Work(0, None if work.rounds is None else _Rounds(None, None, 0))
        stage_axes = live_axes("layers") or None
        mapped = jax.vmap(rematerialize(one_stage), in_axes=(0, 0, None, of_work), spmd_axis_name=stage_axes)
        x, stats = mapped(x, weights, context, work)
        return _on_stages(x), stats

    return step


def _on_stages(x: jax.Array) -> jax.Array:
    return constrain(x, "layers", *_ROWS)


def _merge(rows: jax.Array) -> jax.Array:
    """[M, B / M, ...] -> [B, ...], in the order that `split_rows` was given."""
    return rows.swapaxes(0, 1).reshape(-1, *rows.shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _turn(x: jax.Array, by: int) -> jax.Array:
    """jnp.roll over the stages, whose gradient is one step back: as one exchange, where jax would make two of it."""
    return jnp.roll(x, by, axis=0)


_turn.defvjp(lambda x, by: (_turn(x, by), None), lambda by, _, gradient: (_turn(gradient, -by),))


@jax.custom_vjp
def _take(store: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[S, M, ...] -> the same and [S, ...]; what was taken is not read again before something else is put there.

    The backward pass may therefore write its gradient there, where a slice would add it to the whole store.
    """
    return store, jax.lax.dynamic_index_in_dim(store, place, axis=1, keepdims=False)


_take.defvjp(
    lambda store, place: (_take(store, place), place),
    lambda place, gradients: (_put(gradients[0], gradients[1], place), None),
)


def _put(store: jax.Array, rows: jax.Array, place: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(store, rows, place, axis=1)


def _chosen_weights(params: Any, ledger: Any, rounds: _Rounds | None) -> tuple[Any, Any]:
    """[layers_per_stage, S, rounds, ...] -> the weights of all rounds with slots for their gradients, and the ledger.

    A slice of the weights would be kept for every tick, or else its gradient added to those of all rounds in every
    tick. So each layer slices for itself what is kept once (`_weight`), and the gradient goes through a slot to the
    ledger: a copy of the parameters that the loop carries for the sake of its gradient alone, which sums up in
    float32 whatever the dtype of the weights.
    """
    booked = jax.tree.map(lambda weight, page: _book(page, rounds, weight.dtype), params, ledger)
    slots, ledger = (jax.tree.map(lambda _, pair, i=i: pair[i], params, booked) for i in range(2))
    return (jax.lax.stop_gradient(params), slots), ledger


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _book(page: jax.Array, rounds: _Rounds | None, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """[layers_per_stage, S, rounds, ...] -> a slot [layers_per_stage, S, ...] for each stage's gradient, and the same.

    The backward pass adds what comes in the slot to the round that each stage is in, and touches no other.
    """
    shape = page.shape if rounds is None else (*page.shape[:2], *page.shape[3:])
    return jnp.zeros(shape, dtype), page


def _book_backward(
    dtype: jnp.dtype, rounds: _Rounds | None, gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None]:
    new, page = gradients
    new = new.astype(page.dtype)
    if rounds is None:
        return page + new, None
    is_newest = jnp.reshape(rounds.is_newest, (1, -1, *[1] * (new.ndim - 2)))
    for place, mine in ((rounds.newest, is_newest), (rounds.before, ~is_newest)):
        total = jax.lax.dynamic_index_in_dim(page, place, axis=2, keepdims=False) + jnp.where(mine, new, 0)
        page = jax.lax.dynamic_update_index_in_dim(page, total, place, axis=2)
    return page, None


_book.defvjp(lambda page, rounds, dtype: (_book(page, rounds, dtype), rounds), _book_backward)


def _weight(weight: jax.Array, slot: jax.Array, rounds: _Rounds | None) -> jax.Array:
    """One stage's [rounds, ...] -> [...]: those of the round that it is in."""
    if rounds is None:
        return _through_slot(weight, slot)
    newest, before = (
        jax.lax.dynamic_index_in_dim(weight, place, keepdims=False) for place in (rounds.newest, rounds.before)
    )
    return _through_slot(jnp.where(rounds.is_newest, newest, before), slot)


@jax.custom_vjp
def _through_slot(weight: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns the weight; its gradient goes to the slot."""
    return weight


_through_slot.defvjp(lambda weight, slot: (weight, None), lambda _, gradient: (None, gradient))


def _summed(stats: jax.Array, schedule: PipelineSchedule, rounds: int) -> jax.Array:
    """[ticks, layers_per_stage, S, ...] of every tick -> [R, ...], sums over the micro-batches."""
    begun = np.arange(stats.shape[0])[:, None] - np.arange(schedule.stages)
    real = begun[None] // schedule.microbatches == np.arange(rounds)[:, None, None]
    real = real.reshape(rounds, stats.shape[0], 1, schedule.stages, *[1] * (stats.ndim - 3))
    total = jnp.where(real, stats, 0).sum(1)
    return total.swapaxes(1, 2).reshape(-1, *stats.shape[3:])


def _by_stage(params: Any, schedule: PipelineSchedule, rounds: int) -> Any:
    """[R, ...] in the layers' order -> [layers_per_stage, S, rounds, ...]; without `rounds` where there is but one.

    With one round every device has its layers already. With several, each has to get most of them from the others.
    """
    stages, each = schedule.stages, schedule.layers_per_stage
    if rounds == 1 or not live_axes("layers"):

        def arrange(weight: jax.Array) -> jax.Array:
            weight = weight.reshape(rounds, stages, each, *weight.shape[1:]).swapaxes(0, 2)
            return weight if rounds > 1 else weight[:, :, 0]

        return jax.tree.map(arrange, params)
    axes = live_axes("layers")
    deal = functools.partial(_deal, stages=stages, rounds=rounds, axes=axes)
    # Over the stages alone: how else a weight is cut does not matter here.
    mapped = jax.shard_map(
        lambda params: jax.tree.map(deal, params),
        in_specs=PartitionSpec(axes),
        out_specs=PartitionSpec(None, axes),
        axis_names=set(axes),
        check_vma=False,
    )
    return mapped(params)


def _deal(weight: jax.Array, stages: int, rounds: int, axes: tuple[str, ...]) -> jax.Array:
    """A device's layers [rounds * each, ...] -> [each, 1, rounds, ...], those that its stage runs.

    Chunk k of `each` layers lies on stage k // rounds and is run by stage k % stages in round k // stages. In each of
    as many steps as there are rounds every stage sends one chunk and receives one.
    """
    chunks = weight.reshape(rounds, -1, *weight.shape[1:])
    here = jax.lax.axis_index(axes)
    # Stages whose first chunks go to the same place begin with different ones.
    period = stages // math.gcd(stages, rounds)
    result = jnp.zeros((chunks.shape[1], 1, rounds, *chunks.shape[2:]), chunks.dtype)
    for step in range(rounds):
        sent = np.arange(stages) * rounds + (step + np.arange(stages) // period) % rounds
        sender = np.argsort(sent % stages)
        pairs = [(source, int(chunk) % stages) for source, chunk in enumerate(sent)]
        chunk = jax.lax.dynamic_index_in_dim(chunks, jnp.asarray(sent % rounds)[here], keepdims=False)
        chunk = jax.lax.ppermute(chunk, axes, pairs)
        place = jnp.asarray(sent[sender] // stages)[here]
        result = jax.lax.dynamic_update_index_in_dim(result, chunk[:, None], place, axis=2)
    return result
