"""Learning-rate schedules and update rules, as tables.

The schedule at step s (from 0), with S schedule steps, W = int(S * warmup_steps_fraction) and peak p:
  s < W        p * (s + 1) / W, so the first step already moves
  cosine       f + (p - f) * (1 + cos(pi * (s - W) / (S - W))) / 2, f = p * learning_rate_final_fraction
  wsd          p until the last D = int(S * wsd_decay_steps_fraction) steps, which fall to f in a line or half a cosine
  s >= S       f
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from maxlite.config.schema import OptimizerConfig

Schedule = Callable[[Any], jax.Array]


def build_schedule(optimizer: OptimizerConfig, steps: int) -> Schedule:
    """Returns the learning rate as a function of the step; `steps` is the length if the config names none."""
    return SCHEDULES[optimizer.lr_schedule_type](optimizer, optimizer.learning_rate_schedule_steps or steps)


def build_optimizer(
    optimizer: OptimizerConfig, schedule: Schedule, decays: Any
) -> optax.GradientTransformationExtraArgs:
    """Returns the update rule; `decays` is a tree of bools like what trains: which of it weight decay shrinks.

    Its update takes `has_targets`, a boolean scalar: a step without any real target must not move along the
    momentum of earlier ones, so only weight decay acts then.
    """
    return optax.chain(
        OPTIMIZERS[optimizer.opt_type](optimizer),
        _only_with_targets(),
        optax.add_decayed_weights(optimizer.adam_weight_decay, mask=decays),
        optax.scale_by_learning_rate(schedule),
    )


def _adamw(optimizer: OptimizerConfig) -> optax.GradientTransformation:
    """Adam's direction (Kingma and Ba 2015); with decoupled decay, AdamW (Loshchilov and Hutter 2019)."""
    return optax.scale_by_adam(
        b1=optimizer.adam_b1,
        b2=optimizer.adam_b2,
        eps=optimizer.adam_eps,
        eps_root=optimizer.adam_eps_root,
        mu_dtype=optimizer.mu_dtype,
    )


def _sgd(optimizer: OptimizerConfig) -> optax.GradientTransformation:
    """The gradient itself."""
    del optimizer
    return optax.identity()


def _only_with_targets() -> optax.GradientTransformationExtraArgs:
    def update(updates: Any, state: Any, params: Any = None, *, has_targets: jax.Array, **_: Any) -> Any:
        return jax.tree.map(lambda u: u * has_targets.astype(u.dtype), updates), state

    # optax passes the extra argument by name; its type for `update` has no place for one.
    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), cast(Any, update))


class _Phases(NamedTuple):
    """Length and warm-up in steps, peak and final rate."""

    length: int
    warmup: int
    peak: float
    final: float


def _phases(optimizer: OptimizerConfig, length: int) -> _Phases:
    peak = optimizer.learning_rate
    final = peak * optimizer.learning_rate_final_fraction
    return _Phases(length, int(length * optimizer.warmup_steps_fraction), peak, final)


def _with_warmup(phases: _Phases, decay_start: int, fall: Callable[[jax.Array], jax.Array]) -> Schedule:
    """`fall` maps the share of the decay that is over, 0..1, to the share of peak - final that is left."""

    def schedule(step: jax.Array) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        over = jnp.clip((step - decay_start) / max(phases.length - decay_start, 1), 0.0, 1.0)
        rate = phases.final + (phases.peak - phases.final) * fall(over)
        rate = jnp.where(step >= phases.length, phases.final, rate)
        return jnp.where(step < phases.warmup, phases.peak * (step + 1) / max(phases.warmup, 1), rate)

    return schedule


def _half_cosine(over: jax.Array) -> jax.Array:
    return 0.5 * (1 + jnp.cos(jnp.pi * over))


def _line(over: jax.Array) -> jax.Array:
    return 1 - over


def _cosine_schedule(optimizer: OptimizerConfig, length: int) -> Schedule:
    phases = _phases(optimizer, length)
    return _with_warmup(phases, phases.warmup, _half_cosine)


def _wsd_schedule(optimizer: OptimizerConfig, length: int) -> Schedule:
    phases = _phases(optimizer, length)
    fall = {"linear": _line, "cosine": _half_cosine}[optimizer.wsd_decay_style]
    return _with_warmup(phases, length - int(length * optimizer.wsd_decay_steps_fraction), fall)


OPTIMIZERS: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {"adamw": _adamw, "sgd": _sgd}
SCHEDULES: dict[str, Callable[[OptimizerConfig, int], Schedule]] = {"cosine": _cosine_schedule, "wsd": _wsd_schedule}
