"""Loss on held-out data: sums over all its targets, whatever the batch size."""

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import jax

from maxlite.data.batch import Batch
from maxlite.metrics.rates import eval_tags
from maxlite.train.step import LossSums


def evaluate(
    eval_step: Callable[[Any, Any], LossSums],
    params: Any,
    batches: Iterator[Batch],
    eval_steps: int,
    place: Callable[[Batch], Batch],
) -> dict[str, float]:
    """Returns the eval/* tags over the first `eval_steps` batches, -1 for all of them.

    eval_step: compiled, (params, batch) -> sums. place: puts a batch on the devices.
    """
    began = time.perf_counter()
    sums, routed = [0.0] * 5, False
    for batch in islice(batches, None if eval_steps == -1 else eval_steps):
        # Python floats are float64: the sum over many batches loses nothing to the size of one.
        new = eval_step(params, place(batch))
        scalars = (new.lm_loss, new.z_loss, new.targets, new.balance, new.tokens)
        sums = [total + float(scalar) for total, scalar in zip(sums, scalars, strict=True)]
        routed = bool(jax.tree.leaves(new.loads))
    lm_loss, z_loss, targets, balance, tokens = sums
    tags = eval_tags(lm_loss, z_loss, targets, time.perf_counter() - began)
    return tags | ({"eval/avg_moe_lb_loss": balance / max(tokens, 1.0)} if routed else {})
