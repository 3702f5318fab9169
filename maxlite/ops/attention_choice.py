"""Which kernel attention runs on: what the user wants, what the platform has and what the kernels can do."""

from typing import NamedTuple

from maxlite.errors import ConfigError
from maxlite.ops.attention_types import AttentionOptions, ContextParallel
from maxlite.ops.cudnn_attention import LARGEST_HEAD, LARGEST_HEAD_BEFORE_HOPPER, cudnn_lacks

HOPPER = 9.0


class AttentionFacts(NamedTuple):
    """What of a model, its rows and its mesh a kernel must be able to do.

    dtype: of queries, keys and values. head_dims: features of queries and keys, and of values.
    length: tokens of a row. context_parallel: None where rows are whole on a device.
    """

    options: AttentionOptions
    dtype: str
    head_dims: tuple[int, int]
    length: int
    sinks: bool
    context_parallel: ContextParallel | None


class KernelChoice(NamedTuple):
    """A kernel of ops/attention.py, and why it and no other."""

    kernel: str
    reason: str


def choose_kernel(wanted: str, platform: str, facts: AttentionFacts, capability: str | None = None) -> KernelChoice:
    """Returns the kernel for one kind of attention of a model.

    wanted: the key `attention`, autoselected, dot_product, flash or cudnn_flash.
    platform: of the devices, cpu, gpu or tpu.
    capability: a GPU's compute capability as jax names it: 9.0 of NVIDIA's, gfx942 of others'; None if unknown.

    Raises:
        ConfigError: the kernel wanted cannot do what is asked of it, or not there.
    """
    rings = facts.context_parallel is not None and facts.context_parallel.strategy == "ring"
    if wanted == "dot_product":
        if rings:
            raise ConfigError(
                "attention=dot_product needs all keys of a row at once, but context_parallel_strategy=ring sends them "
                "round in parts; set attention=flash or context_parallel_strategy=all_gather."
            )
        return KernelChoice("dot_product", "attention=dot_product, all scores at once")
    cudnn_lack = _cudnn_lack(platform, facts, capability)
    if wanted == "cudnn_flash":
        if cudnn_lack is not None:
            raise ConfigError(
                f"attention=cudnn_flash cannot run here: the kernel lacks {cudnn_lack}. Set attention=flash, which "
                f"runs {_flash(platform, rings).kernel}, or attention=dot_product or autoselected."
            )
        return KernelChoice("cudnn", "attention=cudnn_flash")
    if wanted == "flash" or platform != "gpu":
        return _flash(platform, rings)
    if cudnn_lack is not None:
        return KernelChoice("blockwise", f"cudnn lacks {cudnn_lack}")
    return KernelChoice("cudnn", "cuDNN's kernel for this GPU")


def _flash(platform: str, rings: bool) -> KernelChoice:
    """The kernel that never has all scores at once."""
    if rings:
        return KernelChoice("blockwise", "the kernel of context_parallel_strategy=ring")
    if platform == "tpu":
        return KernelChoice("splash", "the Pallas kernel for TPUs")
    return KernelChoice("blockwise", f"plain JAX, tile by tile, on {platform}")


def _cudnn_lack(platform: str, facts: AttentionFacts, capability: str | None) -> str | None:
    """What cuDNN's kernel lacks of what is asked, None if it can do all."""
    if platform != "gpu" or (capability or "").startswith("gfx"):
        return f"an NVIDIA GPU (the devices are {platform if platform != 'gpu' else capability})"
    if facts.context_parallel is not None:
        return "rows cut over their length (context parallelism)"
    old = capability is not None and float(capability) < HOPPER
    largest_head = LARGEST_HEAD_BEFORE_HOPPER if old else LARGEST_HEAD
    return cudnn_lacks(
        facts.options, facts.dtype, facts.head_dims, facts.length, sinks=facts.sinks, largest_head=largest_head
    )
