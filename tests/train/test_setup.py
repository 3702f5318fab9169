"""What is found before a step is compiled, and what a run says of its mesh."""

import jax
import pytest

from maxlite.errors import ConfigError
from maxlite.train.report import start_lines
from maxlite.train.setup import build_setup
from maxlite.train.state import device_bytes

EXPERTS = ("mlp_pattern=[moe]", "num_experts=4", "num_experts_per_tok=2", "moe_mlp_dim=16")
ON_EIGHT = ("cpu_devices=8", "ici_fsdp_parallelism=-1", "num_query_heads=8", "num_kv_heads=8")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["ici_context_parallelism=4", "max_target_length=36"], ["max_target_length=36", "context=4", "8 equal parts"]),
        (
            ["ici_context_parallelism=4", "max_target_length=30", "context_parallel_load_balance=false"],
            ["max_target_length=30", "context=4", "4 equal parts"],
        ),
        (["ici_pipeline_parallelism=2", "num_decoder_layers=3"], ["Group 0", "3 x (full+dense)", "stage=2"]),
        (
            ["ici_pipeline_parallelism=2", "num_decoder_layers=8", "num_layers_per_pipeline_stage=3"],
            ["num_layers_per_pipeline_stage=3", "2 stages", "8 repeats"],
        ),
        (
            ["ici_pipeline_parallelism=4", "num_decoder_layers=8", "num_pipeline_microbatches=2"],
            ["num_pipeline_microbatches=2", "4 stages", "2 rounds"],
        ),
        (
            ["ici_pipeline_parallelism=2", "num_pipeline_microbatches=3", "per_device_batch_size=1"],
            ["8 rows", "num_pipeline_microbatches=3"],
        ),
        (["shard_optimizer_over_data=true"], ["shard_optimizer_over_data=true", "one device"]),
        (
            [*EXPERTS, "ici_expert_parallelism=8"],
            ["num_experts", "of size 4", "expert=8"],
        ),
        (["attention=cudnn_flash"], ["attention=cudnn_flash", "NVIDIA", "attention=flash"]),
        (
            ["attention=dot_product", "ici_context_parallelism=2", "context_parallel_strategy=ring"],
            ["attention=dot_product", "context_parallel_strategy=ring"],
        ),
        (["compile_xla_flags=--xla_no_such_flag=1"], ["xla_no_such_flag", "refuses"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_before_compiling(tiny_config, overrides, words):
    given = {text.partition("=")[0] for text in overrides}
    with pytest.raises(ConfigError) as caught:
        build_setup(tiny_config(*[text for text in ON_EIGHT if text.partition("=")[0] not in given], *overrides))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_rows_that_are_cut_and_layers_that_need_them_whole(tiny_config):
    widths = [f"gdn_{name}=8" for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")]
    layers = ("attention_pattern=[gated_delta_net]", "gdn_conv_kernel_dim=4", *widths)
    with pytest.raises(ConfigError, match="gated_delta_net.*context=2"):
        build_setup(tiny_config(*ON_EIGHT, *layers, "ici_context_parallelism=2"))


def test_the_mesh_the_kernels_and_the_pipeline_are_said(tiny_config):
    config = tiny_config(
        *ON_EIGHT, "ici_pipeline_parallelism=2", "ici_tensor_parallelism=2", "per_device_batch_size=2",
        "num_decoder_layers=4", "attention_pattern=[local,full]", "sliding_window_size=8", "max_target_length=31",
    )  # fmt: skip
    text = "\n".join(start_lines(config, build_setup(config)))
    assert "Num_devices: 8, shape (1, 2, 2, 1, 1, 2): stage=2 fsdp=2 tensor=2 on cpu" in text
    assert "Attention of local, full layers: blockwise (plain JAX, tile by tile, on cpu)" in text
    # Two repeats of two layers on two stages: one round of two micro-batches, three ticks, one of them idle.
    assert "Pipeline of 2 x 2 layers: 2 stages, 1 round, 2 micro-batches, bubble 33.3%" in text
    assert "max_target_length=31 is not divided by tensor=2: norms are not split over the sequence" in text


def test_zero_1_splits_moments_and_offload_takes_them_off_the_device(tiny_config):
    def state(*overrides):
        common = ("cpu_devices=8", "ici_fsdp_parallelism=1", "ici_data_parallelism=8")
        return build_setup(tiny_config(*common, *overrides)).abstract

    plain, split = state(), state("shard_optimizer_over_data=true")
    moments = [leaf for leaf in jax.tree.leaves(split.opt_state) if leaf.ndim > 1]
    assert moments and all("data" in str(leaf.sharding.spec) for leaf in moments)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(split.params))
    # Weights once and moments twice of float32; of the moments an eighth is left.
    assert device_bytes(split) < device_bytes(plain) * (1 + 2 / 8 + 0.01) / 3
    hosted = state("optimizer_memory_host_offload=true")
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(hosted.opt_state)} == {"pinned_host"}
    assert device_bytes(hosted) == device_bytes(plain._replace(opt_state=()))
