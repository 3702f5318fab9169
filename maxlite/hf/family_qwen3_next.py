"""Qwen3-Next: config.json and tensors, with the defaults of transformers' configuration class."""

from maxlite.hf import family_tensors as tensors
from maxlite.hf.family_fields import Expect, Field, fixed
from maxlite.hf.family_layers import LinearLayers, SparseStep
from maxlite.hf.family_lines import (
    ALL_BIASES,
    HEAD_NORM,
    NO_MLP_BIAS,
    Family,
    expert_width,
    experts,
    head_dim,
    mlp_width,
    sizes,
    tied,
)
from maxlite.hf.rope_json import Rope


def _size(name: str, key: str, default: int) -> Field:
    """A size of the linear layers, which transformers wants even where no layer is linear."""
    return Field(name, key, default, unset=lambda model: default)


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    (
        *sizes(151936, 2048, 48, (16, 2), 32768, 1e-6),
        head_dim(256, null=False),
        mlp_width(5632),
        # Of the convolutions too, which here are always SiLU.
        Field("hidden_act", "mlp_activation", "silu", words={"silu": "silu", "swish": "silu"}),
        NO_MLP_BIAS,
        ALL_BIASES,
        HEAD_NORM,
        fixed(attention_output_gate=True, norm_scale_offset=1.0),
        LinearLayers(),
        _size("linear_conv_kernel_dim", "gdn_conv_kernel_dim", 4),
        _size("linear_num_key_heads", "gdn_num_key_heads", 16),
        _size("linear_num_value_heads", "gdn_num_value_heads", 32),
        _size("linear_key_head_dim", "gdn_key_head_dim", 128),
        _size("linear_value_head_dim", "gdn_value_head_dim", 128),
        *experts(512, 10),
        expert_width(512),
        Field("shared_expert_intermediate_size", "shared_expert_mlp_dim", 512, unset=lambda model: 512),
        fixed(shared_expert_gate=True),
        Field("norm_topk_prob", "norm_topk_prob", True),
        SparseStep(),
        tied(False),
        Rope(partial=0.25),
        Expect("use_sliding_window", (False, None)),
    ),
    tensors.predicting_table("qwen3_next", tensors.QWEN3_NEXT),
)
