"""The log line of a step and of an evaluation, in MaxText's order, which programs read."""

from collections.abc import Mapping

from maxlite.metrics.rates import EVAL_SOURCE


def step_line(step: int, tags: Mapping[str, float], hbm_limit_gib: float | None = None) -> str:
    """Formats one training step.

    tags: of `step_tags`. What they lack is left out: rates and MFU of a step that compiled, memory on a CPU.
    hbm_limit_gib: memory of one device.
    """
    parts = [f"completed step: {step}", f"seconds: {tags['perf/step_time_seconds']:.3f}"]
    if "perf/per_device_tflops_per_sec" in tags:
        parts.append(f"TFLOP/s/device: {tags['perf/per_device_tflops_per_sec']:.3f}")
        parts.append(f"Tokens/s/device: {tags['perf/per_device_tokens_per_sec']:.3f}")
    parts.append(f"total_weights: {tags['learning/total_weights']:.0f}")
    parts.extend(f"{name}: {tags[f'learning/{name}']:.3f}" for name in ("loss", "lm_loss", "perplexity"))
    if "learning/moe_lb_loss" in tags:
        parts.append(f"moe_lb_loss: {tags['learning/moe_lb_loss']:.6f}")
    if "perf/mfu" in tags:
        parts.append(f"MFU: {tags['perf/mfu']:.1%}")
    parts.append(f"grad_norm: {tags['learning/grad_norm']:.3f}")
    parts.append(f"lr: {tags['learning/current_learning_rate']:.3e}")
    parts.append(f"data_wait_ms: {tags['perf/data_wait_ms']:.1f}")
    if "perf/hbm_peak_gib" in tags and hbm_limit_gib is not None:
        parts.append(f"HBM: {tags['perf/hbm_peak_gib']:.2f}/{hbm_limit_gib:.2f} GiB")
    if "goodput/fraction" in tags:
        parts.append(f"goodput: {tags['goodput/fraction']:.1%}")
    return ", ".join(parts)


def eval_line(step: int, tags: Mapping[str, float]) -> str:
    """Formats the evaluation that follows training step `step`; `tags` are those of `eval_tags`."""
    return f"Completed eval after train step {step}, {eval_numbers(tags)}"


def eval_numbers(tags: Mapping[str, float]) -> str:
    """Formats what `eval_tags` and `source_tags` say of an evaluation, as the end of a line."""
    parts = [
        f"loss={tags['eval/avg_loss']:.3f}",
        f"perplexity={tags['eval/avg_perplexity']:.3f}",
        f"total_weights={tags['eval/total_weights']:.0f}",
        f"avg_z_loss={tags['eval/avg_z_loss']:.6f}",
    ]
    if "eval/avg_moe_lb_loss" in tags:
        parts.append(f"avg_moe_lb_loss={tags['eval/avg_moe_lb_loss']:.6f}")
    of_sources = [(name, tag) for tag in tags if (name := tag.removeprefix(EVAL_SOURCE)) != tag]
    parts.extend(f"loss of {name}={tags[tag]:.3f}" for name, tag in of_sources)
    return ", ".join(parts)


def compile_line(name: str, seconds: float) -> str:
    """Formats the time that compiling took, which no rate holds."""
    return f"compiled {name} in {seconds:.1f} s"
