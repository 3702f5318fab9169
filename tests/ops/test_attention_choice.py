"""Which kernel is chosen for what is wanted, the platform and the model; and what is refused, by what message."""

import pytest

from maxlite.errors import ConfigError
from maxlite.ops.attention_choice import AttentionFacts, choose_kernel
from maxlite.ops.attention_types import AttentionOptions, ContextParallel

OPTIONS = AttentionOptions(0.125, None, None, None)
FACTS = AttentionFacts(OPTIONS, "bfloat16", (64, 64), 512, sinks=False, context_parallel=None)
GATHERED = FACTS._replace(context_parallel=ContextParallel("all_gather", True))
RING = FACTS._replace(context_parallel=ContextParallel("ring", True))


@pytest.mark.parametrize(
    ("wanted", "platform", "facts", "kernel", "reason"),
    [
        ("autoselected", "cpu", FACTS, "blockwise", "cpu"),
        ("autoselected", "tpu", FACTS, "splash", "Pallas"),
        ("autoselected", "gpu", FACTS, "cudnn", "cuDNN"),
        ("autoselected", "gpu", FACTS._replace(dtype="float32"), "blockwise", "dtype=float32"),
        ("autoselected", "gpu", FACTS._replace(sinks=True), "blockwise", "sinks"),
        ("autoselected", "gpu", FACTS._replace(options=OPTIONS._replace(soft_cap=50.0)), "blockwise", "soft cap"),
        ("autoselected", "gpu", FACTS._replace(head_dims=(256, 256)), "blockwise", "features"),
        ("autoselected", "gpu", GATHERED, "blockwise", "context parallelism"),
        ("autoselected", "tpu", GATHERED, "splash", "Pallas"),
        ("autoselected", "tpu", RING, "blockwise", "ring"),
        ("flash", "cpu", FACTS, "blockwise", "cpu"),
        ("flash", "gpu", FACTS, "blockwise", "gpu"),
        ("flash", "tpu", FACTS, "splash", "Pallas"),
        ("flash", "tpu", RING, "blockwise", "ring"),
        ("dot_product", "tpu", FACTS, "dot_product", "all scores"),
        ("dot_product", "cpu", GATHERED, "dot_product", "all scores"),
        ("cudnn_flash", "gpu", FACTS, "cudnn", "cudnn_flash"),
    ],
)
def test_choice(wanted: str, platform: str, facts: AttentionFacts, kernel: str, reason: str):
    choice = choose_kernel(wanted, platform, facts)
    assert choice.kernel == kernel
    assert reason in choice.reason


def test_head_sizes_of_older_gpus():
    facts = FACTS._replace(head_dims=(128, 128))
    assert choose_kernel("autoselected", "gpu", facts, "9.0").kernel == "cudnn"
    assert choose_kernel("autoselected", "gpu", facts, "8.0").kernel == "blockwise"
    assert choose_kernel("autoselected", "gpu", FACTS, "8.0").kernel == "cudnn"
    assert choose_kernel("autoselected", "gpu", FACTS, "gfx942").kernel == "blockwise"


@pytest.mark.parametrize(
    ("wanted", "platform", "facts", "message"),
    [
        ("cudnn_flash", "cpu", FACTS, r"NVIDIA GPU \(the devices are cpu\).*attention=flash, which runs blockwise"),
        ("cudnn_flash", "tpu", FACTS, "attention=flash, which runs splash"),
        ("cudnn_flash", "gpu", FACTS._replace(sinks=True), "lacks attention sinks"),
        ("cudnn_flash", "gpu", GATHERED, "context parallelism"),
        ("dot_product", "cpu", RING, "context_parallel_strategy=all_gather"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused(wanted: str, platform: str, facts: AttentionFacts, message: str):
    with pytest.raises(ConfigError, match=message):
        choose_kernel(wanted, platform, facts)
