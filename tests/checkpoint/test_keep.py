import dataclasses

import numpy as np
import pytest

from maxlite.checkpoint.keep import StepInfo, kept_steps
from maxlite.config.load import load_config

TAG = "eval/avg_loss"


def config_of(**others):
    section = load_config("base.yml", [], {}).checkpoint
    return dataclasses.replace(section, **{"max_num_checkpoints_to_keep": 1, **others})


def infos_of(steps, seconds=60, losses=()):
    """Step k was saved k times `seconds` after the first, and has a loss if there is one for it."""
    metrics = dict(zip(steps, losses, strict=False))
    return [StepInfo(step, 1e9 + step * seconds, {TAG: metrics[step]} if step in metrics else {}) for step in steps]


def test_the_newest_are_kept_in_any_order():
    infos = infos_of([10, 2, 30, 4])
    assert kept_steps(infos, config_of(max_num_checkpoints_to_keep=2)) == {10: "newest 2", 30: "newest 2"}
    assert kept_steps([], config_of()) == {}


def test_multiples_of_a_step():
    kept = kept_steps(infos_of([5, 10, 15, 20, 21]), config_of(checkpoint_keep_period=10))
    assert kept == {10: "multiple of 10", 20: "multiple of 10", 21: "newest"}


def test_one_each_so_many_minutes():
    kept = kept_steps(infos_of(range(1, 9), seconds=30), config_of(checkpoint_keep_minutes=1.5))
    assert kept == {1: "one each 1.5 minutes", 4: "one each 1.5 minutes", 7: "one each 1.5 minutes", 8: "newest"}


@pytest.mark.parametrize(("mode", "best"), [("min", [2, 4]), ("max", [1, 3])])
def test_the_best_by_a_metric(mode, best):
    infos = infos_of([1, 2, 3, 4, 5, 6], losses=[3.0, 1.0, 2.5, 2.0, float("nan")])
    kept = kept_steps(infos, config_of(checkpoint_keep_best=2, checkpoint_best_mode=mode))
    assert kept == {step: f"best 2 by {TAG}" for step in best} | {6: "newest"}


def test_a_step_can_have_several_reasons():
    config = config_of(checkpoint_keep_period=2, checkpoint_keep_best=1)
    assert kept_steps(infos_of([1, 2], losses=[2.0, 1.0]), config) == {2: f"newest, multiple of 2, best 1 by {TAG}"}


def test_as_a_run_removes_step_by_step():
    """After each save, the choice among what is left is the one among all steps there were."""
    random = np.random.default_rng(0)
    for period, minutes, best in [(None, None, 0), (7, None, 2), (None, 4.0, 3), (5, 2.5, 1)]:
        config = config_of(
            max_num_checkpoints_to_keep=2,
            checkpoint_keep_period=period,
            checkpoint_keep_minutes=minutes,
            checkpoint_keep_best=best,
        )
        steps = np.cumsum(random.integers(1, 4, size=40))
        times = 1e9 + np.cumsum(random.uniform(10, 90, size=40))
        losses = random.normal(size=40)
        left, all_infos = [], []
        for step, time, loss in zip(steps.tolist(), times.tolist(), losses.tolist(), strict=True):
            info = StepInfo(step, time, {TAG: loss})
            all_infos.append(info)
            left = [one for one in [*left, info] if one.step in kept_steps([*left, info], config)]
        kept = {one.step for one in left}
        assert kept == kept_steps(all_infos, config).keys()
        expected = {one.step for one in all_infos[-2:]}
        expected |= {one.step for one in all_infos if period and one.step % period == 0}
        expected |= {one.step for one in sorted(all_infos, key=lambda one: one.metrics[TAG])[:best]}
        last = -np.inf
        for one in all_infos if minutes else []:
            if one.time - last >= minutes * 60:
                expected.add(one.step)
                last = one.time
        assert kept == expected
