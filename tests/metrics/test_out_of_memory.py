import jax.numpy as jnp
import pytest

from maxlite.config.schema import ComputeConfig, DataConfig, OptimizerConfig, ParallelConfig, TrainConfig
from maxlite.metrics.out_of_memory import is_out_of_memory, out_of_memory_advice

ERROR = "RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.\nlong table of buffers"
SECTIONS = (ComputeConfig, DataConfig, TrainConfig, ParallelConfig, OptimizerConfig)


def advice(section, **changes):
    return out_of_memory_advice(
        ERROR, *(section(cls, **{k: v for k, v in changes.items() if k in cls.__annotations__}) for cls in SECTIONS)
    )


# So that base.yml may change its mind.
PLAIN = {"remat_policy": "save_qkv_proj", "per_device_batch_size": 16.0, "max_target_length": 256}


def test_the_three_cheapest_fixes_in_order(section):
    assert advice(section, **PLAIN).splitlines() == [
        "out of memory: RESOURCE_EXHAUSTED: Out of memory allocating 17179869184 bytes.",
        "What helps, the cheapest first:",
        "  1. remat_policy=full (now save_qkv_proj): slower by up to a third, the same losses",
        "  2. gradient_accumulation_steps=2 (now 1): the same batch and losses, in smaller parts; "
        "or a smaller batch, per_device_batch_size=8 (now 16)",
        "  3. max_target_length=128 (now 256): shorter rows",
    ]


def test_copied_weights_are_split(section):
    text = advice(section, **PLAIN, ici_data_parallelism=-1, ici_fsdp_parallelism=1)

    assert "  3. ici_data_parallelism=1 ici_fsdp_parallelism=-1 (now -1 and 1)" in text


def test_nothing_in_place_is_proposed(section):
    text = advice(
        section,
        remat_policy="full",
        per_device_batch_size=6.0,
        gradient_accumulation_steps=6,
        max_target_length=2048,
        num_vocab_tiling=4,
        mu_dtype="bfloat16",
    )

    assert [line for line in text.splitlines() if line.startswith("  ")] == [
        "  1. max_target_length=1024 (now 2048): shorter rows",
        "  2. num_vocab_tiling=8 (now 4): smaller parts of the logits at once",
    ]


@pytest.mark.parametrize(
    ("rows", "parts", "fix"),
    [
        (8.0, 2, "gradient_accumulation_steps=4 (now 2)"),
        (6.0, 2, "gradient_accumulation_steps=3 (now 2)"),
        (7.0, 1, "gradient_accumulation_steps=7 (now 1)"),
        (2.0, 2, None),
        (0.5, 1, None),
    ],
)
def test_batch_is_split_until_a_device_has_one_row_at_once(section, rows, parts, fix):
    text = advice(section, per_device_batch_size=rows, gradient_accumulation_steps=parts)

    assert fix in text if fix else "gradient_accumulation_steps" not in text


def test_when_nothing_is_left(section):
    text = advice(
        section,
        remat_policy="full",
        per_device_batch_size=1.0,
        max_target_length=1,
        opt_type="sgd",
    )

    assert "use more devices or a smaller model" in text


def test_recognizes_what_jax_raises():
    with pytest.raises(Exception) as caught:
        jnp.zeros((10**16,), jnp.int8).block_until_ready()

    assert is_out_of_memory(str(caught.value))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Unable to allocate 8.88 PiB for an array with shape (1,)", True),
        ("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory", True),
        ("INVALID_ARGUMENT: shapes differ", False),
    ],
)
def test_recognizes_texts(text, expected):
    assert is_out_of_memory(text) is expected
