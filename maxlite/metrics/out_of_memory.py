"""Recognizes a device that ran out of memory, and names the cheapest ways to need less."""

from collections.abc import Iterator
from itertools import islice

from maxlite.config.schema import ComputeConfig, DataConfig, OptimizerConfig, ParallelConfig, TrainConfig

_MARKS = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory", "Unable to allocate")
_NUM_FIXES = 3
_LONGEST_REASON = 300


def is_out_of_memory(error_text: str) -> bool:
    """Says whether jax, the device's driver or numpy reports by this text that memory ran out."""
    return any(mark in error_text for mark in _MARKS)


def out_of_memory_advice(
    error_text: str,
    compute: ComputeConfig,
    data: DataConfig,
    train: TrainConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
) -> str:
    """Returns the message of an OutOfMemoryError: the reason, and the three cheapest fixes not yet in place."""
    reason = (error_text.strip() or "memory").splitlines()[0][:_LONGEST_REASON]
    fixes = list(islice(_fixes(compute, data, train, parallel, optimizer), _NUM_FIXES))
    lines = [f"out of memory: {reason}"]
    if fixes:
        lines.append("What helps, the cheapest first:")
        lines.extend(f"  {number}. {fix}" for number, fix in enumerate(fixes, 1))
    else:
        lines.append("This config already saves memory in every way known here: use more devices or a smaller model.")
    return "\n".join(lines)


def _fixes(
    compute: ComputeConfig,
    data: DataConfig,
    train: TrainConfig,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
) -> Iterator[str]:
    if compute.remat_policy != "full":
        yield f"remat_policy=full (now {compute.remat_policy}): slower by up to a third, the same losses"
    yield from _batch_fixes(data, train)
    if parallel.ici_data_parallelism != 1:
        yield (
            f"ici_data_parallelism=1 ici_fsdp_parallelism=-1 (now {parallel.ici_data_parallelism} and "
            f"{parallel.ici_fsdp_parallelism}): weights and optimizer are split over the devices instead of copied"
        )
    if data.max_target_length > 1:
        yield f"max_target_length={data.max_target_length // 2} (now {data.max_target_length}): shorter rows"
    if optimizer.opt_type == "adamw" and "bfloat16" not in (optimizer.mu_dtype, compute.weight_dtype):
        yield "mu_dtype=bfloat16: the optimizer's first moment in half the bytes"
    if 0 < compute.num_vocab_tiling < data.max_target_length:
        tiles = min(2 * compute.num_vocab_tiling, data.max_target_length)
        yield f"num_vocab_tiling={tiles} (now {compute.num_vocab_tiling}): smaller parts of the logits at once"


def _batch_fixes(data: DataConfig, train: TrainConfig) -> Iterator[str]:
    """Splits the batch further, as long as a device computes more than one row at once."""
    rows, parts = data.per_device_batch_size, train.gradient_accumulation_steps
    more_parts = next((more for more in range(parts + 1, int(rows) + 1) if rows % more == 0), None)
    if more_parts is not None:
        yield (
            f"gradient_accumulation_steps={more_parts} (now {parts}): the same batch and losses, in smaller parts; "
            f"or a smaller batch, per_device_batch_size={rows * parts / more_parts:g} (now {rows:g})"
        )
