"""Turns the raw numbers of a step into the tags that TensorBoard, the JSONL file and the log line show."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import jax

# What the name of a mixture's source follows in the tag of its mean loss.
TRAIN_SOURCE, EVAL_SOURCE = "learning/loss_", "eval/avg_loss_"
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class StepWork:
    """What every step of a run computes.

    step_flops: of one step over all devices (`train_step_flops(...).total`).
    padded_tokens: rows x length of one step over all devices.
    peak_tflops: of one device; None leaves MFU out.
    """

    step_flops: int
    padded_tokens: int
    num_devices: int
    peak_tflops: float | None


@dataclasses.dataclass(frozen=True)
class StepTiming:
    """What was measured around one step.

    seconds: wall time from the end of the step before to the end of this one, compiling included.
    data_wait_seconds: part of it spent waiting for the batch.
    compile_seconds: part of it spent compiling; such a step has no rates.
    hbm_peak_gib: most memory in use so far on one device; None where the device doesn't say.
    """

    seconds: float
    data_wait_seconds: float
    compile_seconds: float = 0.0
    hbm_peak_gib: float | None = None


def step_tags(scalars: Mapping[str, float], timing: StepTiming, work: StepWork) -> dict[str, float]:
    """Returns every tag of a training step.

    scalars: name -> value of learning/ tags, over all devices; `lm_loss` and `total_tokens` must be there.
        Perplexity is made here. A name with a slash is a whole tag.
    Returns: learning/*, perf/* and data/packing_efficiency, the share of the step's places that hold a token;
        rates only for a step that did not compile; perf/mfu is a share of 1.
    """
    tags = {name if "/" in name else f"learning/{name}": float(value) for name, value in scalars.items()}
    tags["learning/perplexity"] = perplexity(tags["learning/lm_loss"])
    tags["perf/step_time_seconds"] = timing.seconds - timing.compile_seconds
    tags["perf/per_device_tflops"] = work.step_flops / work.num_devices / 1e12
    tags["perf/per_device_tokens"] = tags["learning/total_tokens"] / work.num_devices
    tags["perf/data_wait_ms"] = timing.data_wait_seconds * 1e3
    tags["data/packing_efficiency"] = tags["learning/total_tokens"] / work.padded_tokens
    if timing.compile_seconds > 0:
        tags["perf/compile_seconds"] = timing.compile_seconds
    else:
        tags |= _rate_tags(tags, work)
    if timing.hbm_peak_gib is not None:
        tags["perf/hbm_peak_gib"] = timing.hbm_peak_gib
    return tags


def _rate_tags(tags: Mapping[str, float], work: StepWork) -> dict[str, float]:
    seconds = tags["perf/step_time_seconds"]
    tflops_per_second = tags["perf/per_device_tflops"] / seconds
    rates = {
        "perf/per_device_tflops_per_sec": tflops_per_second,
        "perf/per_device_tokens_per_sec": tags["perf/per_device_tokens"] / seconds,
        "perf/per_device_padded_tokens_per_sec": work.padded_tokens / work.num_devices / seconds,
    }
    if work.peak_tflops is not None:
        rates["perf/mfu"] = tflops_per_second / work.peak_tflops
    return rates


def eval_tags(loss_sum: float, z_loss_sum: float, total_weights: float, seconds: float) -> dict[str, float]:
    """Returns the tags of one evaluation from its sums over all batches.

    loss_sum: of the cross entropy, in nats, without z-loss.
    total_weights: number of real targets. Without any, the averages are 0, like a training step's.
    seconds: wall time of the whole evaluation.
    """
    divisor = max(total_weights, 1.0)
    return {
        "eval/avg_loss": loss_sum / divisor,
        "eval/avg_perplexity": perplexity(loss_sum / divisor),
        "eval/total_loss": float(loss_sum),
        "eval/total_weights": float(total_weights),
        "eval/avg_z_loss": z_loss_sum / divisor,
        "eval/step_time_seconds": seconds,
    }


def source_tags(
    prefix: str, names: Sequence[str], loss_sums: Iterable[float], total_weights: Iterable[float]
) -> dict[str, float]:
    """Returns the mean loss of each source that has targets, as the tag `prefix` + its name.

    loss_sums, total_weights: of each source, the sum of its cross entropy in nats and the number of its targets.
    """
    sums = zip(names, loss_sums, total_weights, strict=True)
    return {f"{prefix}{name}": float(loss / weight) for name, loss, weight in sums if weight > 0}


def perplexity(loss: float) -> float:
    """Returns e^loss; infinite where a float can't hold it, NaN for NaN."""
    return math.inf if loss > 709 else math.exp(loss)


def device_memory_gib(device: jax.Device) -> tuple[float, float] | None:
    """Returns (most in use so far, limit) in GiB, or None on a device that doesn't say, such as a CPU."""
    stats = device.memory_stats()
    if stats is None or not {"peak_bytes_in_use", "bytes_limit"} <= stats.keys():
        return None
    return stats["peak_bytes_in_use"] / _GIB, stats["bytes_limit"] / _GIB
