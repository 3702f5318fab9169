"""Loss on held-out data: sums over all its targets, whatever the batch size."""

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import jax
import numpy as np

from maxlite.data.batch import Batch
from maxlite.metrics.rates import EVAL_SOURCE, eval_tags, source_tags
from maxlite.train.eval_setup import EvalSetup
from maxlite.train.step import LossSums


def evaluate(setup: EvalSetup, params: Any, batches: Iterator[Batch], eval_steps: int) -> dict[str, float]:
    """Returns the eval/* tags over the first `eval_steps` batches, -1 for all of them."""
    began, routed = time.perf_counter(), False
    # In float64: the sum over many batches loses nothing to the size of one.
    totals: dict[str, Any] = dict.fromkeys(LossSums._fields, np.zeros(()))
    for batch in islice(batches, None if eval_steps == -1 else eval_steps):
        sums = setup.eval_step(params, setup.place(batch))
        routed = bool(jax.tree.leaves(sums.loads))
        for name, value in sums._asdict().items():
            if isinstance(value, jax.Array):
                totals[name] = totals[name] + np.asarray(value, np.float64)
    lm_loss, z_loss, targets = (float(totals[name]) for name in ("lm_loss", "z_loss", "targets"))
    tags = eval_tags(lm_loss, z_loss, targets, time.perf_counter() - began)
    if routed:
        tags["eval/avg_moe_lb_loss"] = float(totals["balance"]) / max(float(totals["tokens"]), 1.0)
    names = setup.batches.source_names
    by_source = (np.broadcast_to(totals[name], len(names)).tolist() for name in ("source_losses", "source_targets"))
    return tags | source_tags(EVAL_SOURCE, names, *by_source)
