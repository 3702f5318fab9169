"""Loss on held-out data: sums over all its targets, whatever the batch size."""

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

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
    sums = [0.0, 0.0, 0.0]
    for batch in islice(batches, None if eval_steps == -1 else eval_steps):
        # Python floats are float64: the sum over many batches loses nothing to the size of one.
        sums = [total + float(new) for total, new in zip(sums, eval_step(params, place(batch)), strict=True)]
    lm_loss, z_loss, weight = sums
    return eval_tags(lm_loss, z_loss, weight, time.perf_counter() - began)
