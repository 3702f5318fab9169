"""Which checkpoints of a run are kept: the newest, and what the config asks for besides."""

import dataclasses
import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orbax.checkpoint import checkpoint_managers as policies

from maxlite.config.schema import CheckpointConfig


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """What the choice depends on.

    time: when the step was saved, in seconds since 1970. metrics: tag -> value of that step.
    """

    step: int
    time: float
    metrics: Mapping[str, float]


@dataclasses.dataclass
class _Candidate:
    """A StepInfo as orbax's policies want it."""

    step: int
    time: datetime.datetime
    metrics: dict[str, Any] | None


def kept_steps(infos: Sequence[StepInfo], config: CheckpointConfig) -> dict[int, str]:
    """Returns step -> why it is kept, ascending; the steps that are not there may be removed.

    infos: of complete steps, in any order.
    """
    candidates = [
        _Candidate(info.step, datetime.datetime.fromtimestamp(info.time, datetime.UTC), dict(info.metrics))
        for info in sorted(infos, key=lambda info: info.step)
    ]
    reasons: dict[int, list[str]] = {}
    for policy, reason, judged in _rules(candidates, config):
        kept = policy.should_preserve(judged, context=policies.PreservationContext())
        for candidate, keep in zip(judged, kept, strict=True):
            if keep:
                reasons.setdefault(candidate.step, []).append(reason)
    return {step: ", ".join(reasons[step]) for step in sorted(reasons)}


def _rules(
    candidates: Sequence[_Candidate], config: CheckpointConfig
) -> Iterator[tuple[policies.PreservationPolicy, str, Sequence[_Candidate]]]:
    """Each key's policy, its reason, and the steps it judges."""
    newest = config.max_num_checkpoints_to_keep
    yield policies.LatestN(newest), "newest" if newest == 1 else f"newest {newest}", candidates
    if config.checkpoint_keep_period is not None:
        every = config.checkpoint_keep_period
        yield policies.EveryNSteps(every), f"multiple of {every}", candidates
    if config.checkpoint_keep_minutes is not None:
        minutes = config.checkpoint_keep_minutes
        # The policy takes any number of seconds, whatever its type says.
        yield policies.EveryNSeconds(minutes * 60), f"one each {minutes:g} minutes", candidates  # type: ignore[arg-type]
    if config.checkpoint_keep_best > 0:
        tag, best = config.checkpoint_best_metric, config.checkpoint_best_mode
        # A step without the metric, or whose value is not a number, is not good; orbax would take it for good.
        judged = [one for one in candidates if math.isfinite((one.metrics or {}).get(tag, math.nan))]
        policy = policies.BestN(
            get_metric_fn=lambda metrics: metrics[tag], reverse=best == "min", n=config.checkpoint_keep_best
        )
        yield policy, f"best {config.checkpoint_keep_best} by {tag}", judged
