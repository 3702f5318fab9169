"""Tiny models of every family, as arguments of transformers' config classes. No torch is imported here.

Every case names the settings that it tests: `turned` holds changes that move transformers' own logits, and `silenced`
parts of tensor names whose values, set to zero, move them. A case that nothing moves would test nothing.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """config_class: its name in transformers. old: keys that the 4.x spelling of config.json has besides."""

    config_class: str
    settings: Settings
    turned: tuple[Settings, ...] = ()
    silenced: tuple[str, ...] = ()
    old: Settings = dataclasses.field(default_factory=dict)


# An epsilon that can be seen: with 1e-5 a norm that ignores the key would pass.
SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=0.01, bos_token_id=1, eos_token_id=2,
    pad_token_id=None, tie_word_embeddings=False,
)  # fmt: skip


def rope(kind: str = "default", theta: float = 1e4, **rest: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **rest}}


def _llama(*turned: Settings, silenced: tuple[str, ...] = (), **settings: Any) -> Case:
    return Case("LlamaConfig", {**SIZES, **settings}, turned, silenced)


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
YARN = dict(factor=4.0, original_max_position_embeddings=64)
# beta_slow and truncate act on wave lengths that a head of 16 has only if the two bounds lie apart.
YARN_ALL = dict(factor=4.0, original_max_position_embeddings=64, beta_fast=16.0, beta_slow=0.5, attention_factor=1.25,
                truncate=False)  # fmt: skip

LLAMA = {
    "llama": _llama({"hidden_act": "gelu_pytorch_tanh"}, silenced=("k_proj", "input_layernorm", "model.norm")),
    "llama-mha": _llama(num_key_value_heads=4, silenced=("k_proj",)),
    "llama-theta": _llama(rope(theta=1e4), **rope(theta=5e5)),
    "llama-linear": _llama(rope(), rope("linear", factor=2.0), **rope("linear", factor=4.0)),
    "llama-llama3": _llama(
        rope(theta=5e5),
        *(rope("llama3", 5e5, **{**LLAMA3, key: value}) for key, value in
          [("factor", 2.0), ("low_freq_factor", 2.0), ("high_freq_factor", 8.0),
           ("original_max_position_embeddings", 16)]),
        **rope("llama3", 5e5, **LLAMA3),
        eos_token_id=[2, 127],
        num_hidden_layers=3,
    ),
    "llama-yarn": _llama(
        rope(), rope("yarn", **YARN, attention_factor=1.0), rope("yarn", **{**YARN, "factor": 2.0}),
        **rope("yarn", **YARN),
    ),
    "llama-yarn-all": _llama(
        *(rope("yarn", **{**YARN_ALL, key: value}) for key, value in
          [("beta_fast", 8.0), ("beta_slow", 1.5), ("attention_factor", 1.0), ("truncate", True)]),
        **rope("yarn", **YARN_ALL),
        head_dim=32,
    ),
    "llama-tied": _llama({"tie_word_embeddings": False}, tie_word_embeddings=True),
    "llama-biases": _llama(
        {"attention_bias": False}, {"mlp_bias": False},
        silenced=("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias", "gate_proj.bias", "up_proj.bias",
                  "down_proj.bias"),
        attention_bias=True, mlp_bias=True,
    ),
    "llama-attention-bias": _llama({"attention_bias": False}, attention_bias=True),
    "llama-head-dim": _llama(silenced=("q_proj",), head_dim=24),
    "llama-epsilon": _llama({"rms_norm_eps": 1e-5}, rms_norm_eps=0.3),
    "llama-gelu": _llama({"hidden_act": "silu"}, hidden_act="gelu"),
    "llama-vocab": _llama(silenced=("lm_head",), vocab_size=131, num_hidden_layers=1),
}  # fmt: skip

MISTRAL = {
    "mistral": Case("MistralConfig", {**SIZES, **rope(theta=1e6), "sliding_window": None}, (rope(theta=1e4),)),
    "mistral-window": Case(
        "MistralConfig",
        {**SIZES, "sliding_window": 8},
        ({"sliding_window": 7}, {"sliding_window": 9}, {"sliding_window": None}),
    ),
    "mistral-head-dim": Case(
        "MistralConfig", {**SIZES, **rope(theta=1e6), "sliding_window": None, "head_dim": 24}, silenced=("q_proj",)
    ),
    "ministral": Case(
        "MinistralConfig",
        {**SIZES, **rope(theta=1e8), "head_dim": 24, "sliding_window": 8, "num_hidden_layers": 5,
         "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"]},
        ({"layer_types": ["sliding_attention"] * 5}, {"layer_types": ["full_attention"] * 5}, {"sliding_window": 9}),
    ),
    "mixtral": Case(
        "MixtralConfig",
        {**SIZES, **rope(theta=1e6), "num_local_experts": 4, "num_experts_per_tok": 2},
        ({"num_experts_per_tok": 1}, rope(theta=1e4)),
        ("gate.weight",),
    ),
    "mixtral-window": Case(
        "MixtralConfig",
        {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 8, "head_dim": 24},
        ({"sliding_window": None}, {"num_experts_per_tok": 2}),
    ),
}  # fmt: skip

QWEN_MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
QWEN = {
    "qwen2": Case(
        "Qwen2Config",
        {**SIZES, "num_hidden_layers": 4, "sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0},
        ({"use_sliding_window": True},),
        ("q_proj.bias", "k_proj.bias", "v_proj.bias"),
        # The window is written down in such files, and switched off (case P10).
        old={"sliding_window": 8},
    ),
    "qwen2-window": Case(
        "Qwen2Config",
        {**SIZES, "num_hidden_layers": 4, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
        ({"use_sliding_window": False}, {"max_window_layers": 3}, {"max_window_layers": 1}, {"sliding_window": 9}),
    ),
    "qwen2-tied": Case(
        "Qwen2Config",
        {**SIZES, **rope(theta=1e6), "tie_word_embeddings": True},
        ({"tie_word_embeddings": False}, rope(theta=1e4)),
        old={"sliding_window": 128},
    ),
    "qwen2-moe": Case(
        "Qwen2MoeConfig",
        {**SIZES, **QWEN_MOE, "shared_expert_intermediate_size": 80, "norm_topk_prob": False},
        ({"norm_topk_prob": True},),
        ("shared_expert_gate", "shared_expert.", "mlp.gate.weight", "v_proj.bias"),
        old={"sliding_window": 8},
    ),
    "qwen2-moe-mixed": Case(
        "Qwen2MoeConfig",
        {**SIZES, **QWEN_MOE, "shared_expert_intermediate_size": 48, "norm_topk_prob": True, "num_hidden_layers": 4,
         "decoder_sparse_step": 1, "mlp_only_layers": [0], "num_key_value_heads": 4},
        ({"norm_topk_prob": False}, {"mlp_only_layers": []}),
    ),
    "qwen3": Case(
        "Qwen3Config", {**SIZES, **rope(theta=1e6), "head_dim": 24}, (rope(theta=1e4),), ("q_norm", "k_norm")
    ),
    "qwen3-tied-biases": Case(
        "Qwen3Config",
        {**SIZES, "head_dim": 16, "tie_word_embeddings": True, "attention_bias": True},
        ({"attention_bias": False}, {"tie_word_embeddings": False}),
        ("o_proj.bias", "q_proj.bias"),
    ),
    "qwen3-moe": Case(
        "Qwen3MoeConfig",
        {**SIZES, **QWEN_MOE, "head_dim": 24, "norm_topk_prob": True},
        ({"norm_topk_prob": False}, {"num_experts_per_tok": 3}),
        ("q_norm", "k_norm", "gate.weight"),
    ),
    "qwen3-moe-unnormed": Case(
        "Qwen3MoeConfig",
        {**SIZES, **QWEN_MOE, "head_dim": 16, "norm_topk_prob": False, "num_hidden_layers": 4,
         "decoder_sparse_step": 2},
        ({"norm_topk_prob": True}, {"decoder_sparse_step": 1}),
    ),
}  # fmt: skip

# Interval 3, and 4 layers: the full one is neither first nor last. Heads of every kind have widths of their own. A
# small epsilon would blow up the rounding of the norm after the memory.
QWEN3_NEXT = {
    **SIZES, **rope(partial_rotary_factor=0.5), **QWEN_MOE, "rms_norm_eps": 0.1, "head_dim": 24,
    "shared_expert_intermediate_size": 48, "mlp_only_layers": [], "num_hidden_layers": 4,
    "linear_conv_kernel_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
}  # fmt: skip
NEXT_LAYERS = ["full_attention"] * 2 + ["linear_attention"] * 2
NEXT = {
    "qwen3-next": Case(
        "Qwen3NextConfig",
        {**QWEN3_NEXT, "full_attention_interval": 3},
        (rope(partial_rotary_factor=0.25), rope(theta=1e6, partial_rotary_factor=0.5), {"norm_topk_prob": False},
         {"rms_norm_eps": 1e-5}),
        ("q_norm", "k_norm", "A_log", "dt_bias", "conv1d", "linear_attn.norm", "in_proj_ba", "shared_expert_gate",
         "input_layernorm"),
        old={"full_attention_interval": 3, "use_sliding_window": False},
    ),
    "qwen3-next-mixed": Case(
        "Qwen3NextConfig",
        {**QWEN3_NEXT, **rope(theta=1e6, partial_rotary_factor=0.25), "layer_types": NEXT_LAYERS,
         "linear_conv_kernel_dim": 3, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
         "norm_topk_prob": False, "mlp_only_layers": [1], "attention_bias": True, "tie_word_embeddings": True},
        ({"attention_bias": False}, {"mlp_only_layers": []}, {"norm_topk_prob": True}),
        ("q_proj.bias", "o_proj.bias", "conv1d"),
        old={"layer_types": NEXT_LAYERS},
    ),
}  # fmt: skip

# The square root of 60 is not a bfloat16 number.
GEMMA_SIZES = {**SIZES, "rms_norm_eps": 0.1, "hidden_size": 60, "head_dim": 16, "tie_word_embeddings": True,
               "pad_token_id": 0}  # fmt: skip
GEMMA3 = {**GEMMA_SIZES, "num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 40}


def gemma3_rope(theta: float = 1e6, local_theta: float = 1e4, factor: float | None = None) -> dict[str, Any]:
    scaling = {"rope_type": "default"} if factor is None else {"rope_type": "linear", "factor": factor}
    return {
        "rope_parameters": {
            "full_attention": {**scaling, "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        }
    }


GEMMA = {
    "gemma": Case("GemmaConfig", GEMMA_SIZES, ({"rms_norm_eps": 1e-5},), ("input_layernorm", "model.norm")),
    "gemma-mqa": Case(
        "GemmaConfig", {**GEMMA_SIZES, "num_key_value_heads": 1, "head_dim": 24}, silenced=("post_attention_layernorm",)
    ),
    "gemma2": Case(
        "Gemma2Config",
        {**GEMMA_SIZES, "hidden_size": 64, "num_hidden_layers": 3, "query_pre_attn_scalar": 64, "sliding_window": 8,
         "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        ({"query_pre_attn_scalar": 16}, {"attn_logit_softcapping": None}, {"final_logit_softcapping": None},
         {"sliding_window": 9}, {"sliding_window": 7}),
        ("pre_feedforward_layernorm", "post_feedforward_layernorm", "post_attention_layernorm"),
    ),
    "gemma2-uncapped": Case(
        "Gemma2Config",
        {**GEMMA_SIZES, "query_pre_attn_scalar": 24, "sliding_window": 8, "attn_logit_softcapping": None,
         "final_logit_softcapping": None},
        ({"attn_logit_softcapping": 2.0}, {"final_logit_softcapping": 3.0}),
    ),
    "gemma3": Case(
        "Gemma3TextConfig",
        {**GEMMA3, **gemma3_rope(factor=8.0)},
        (gemma3_rope(), gemma3_rope(1e3, factor=8.0), gemma3_rope(local_theta=1e6, factor=8.0),
         {"query_pre_attn_scalar": 16}, {"sliding_window": 9}),
        ("q_norm", "k_norm", "pre_feedforward_layernorm"),
    ),
    "gemma3-unscaled": Case(
        "Gemma3TextConfig", {**GEMMA3, **gemma3_rope(), "num_key_value_heads": 1}, (gemma3_rope(factor=8.0),)
    ),
}  # fmt: skip

GEMMA4 = {**GEMMA_SIZES, "num_hidden_layers": 7, "sliding_window": 8, "final_logit_softcapping": 3.0,
          "global_head_dim": 24, "rms_norm_eps": 0.01}  # fmt: skip
GEMMA4_SHARED = {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
GEMMA4_EXPERTS = dict(enable_moe_block=True, num_experts=6, top_k_experts=3, moe_intermediate_size=20)


def gemma4_rope(theta: float = 1e6, local_theta: float = 1e4, share: float = 0.25, **factor: float) -> dict[str, Any]:
    full = {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": theta, **factor}
    return {
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        }
    }


GEMMA |= {
    "gemma4": Case(
        "Gemma4TextConfig",
        {**GEMMA4_SHARED, "hidden_size_per_layer_input": 0},
        ({"attention_k_eq_v": False}, {"final_logit_softcapping": None}, {"sliding_window": 9}, {"global_head_dim": 16},
         gemma4_rope(theta=1e3), gemma4_rope(local_theta=1e6), gemma4_rope(share=0.5)),
        ("q_norm", "k_norm", "pre_feedforward_layernorm", "post_attention_layernorm", "layers.3.layer_scalar"),
        {"global_head_dim": 24, "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"},
    ),
    "gemma4-moe": Case(
        "Gemma4TextConfig",
        {**GEMMA4_SHARED, **GEMMA4_EXPERTS, "hidden_size_per_layer_input": 0, "num_key_value_heads": 4,
         "num_global_key_value_heads": 2, "num_hidden_layers": 4,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
        ({"top_k_experts": 2},),
        ("router.proj", "router.scale", "router.per_expert_scale", "experts.gate_up_proj", "mlp.gate_proj",
         "post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2",
         "pre_feedforward_layernorm.", "post_feedforward_layernorm."),
        {"global_head_dim": 24, "num_global_key_value_heads": 2},
    ),
    "gemma4-unshared": Case(
        "Gemma4TextConfig",
        {**GEMMA4, **gemma4_rope(share=0.5, factor=2.0), "hidden_size_per_layer_input": 0, "attention_bias": True,
         "num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        (gemma4_rope(share=0.5), {"attention_bias": False}),
        ("v_proj",),
        {"global_head_dim": 24, "num_global_key_value_heads": 1},
    ),
    "gemma4-unified": Case(
        "Gemma4UnifiedTextConfig",
        {**GEMMA4_SHARED, "num_hidden_layers": 6},
        ({"attention_k_eq_v": False}, {"sliding_window": 9}),
        ("layer_scalar",),
        {"global_head_dim": 24, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
         "enable_moe_block": False, "num_experts": None, "vocab_size_per_layer_input": 262144},
    ),
}  # fmt: skip

LLAMA4_SIZES = {**SIZES, "head_dim": 16, "intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 4}
LLAMA4 = {
    "llama4-scout": Case(
        "Llama4TextConfig",
        {**LLAMA4_SIZES, **rope("llama3", 5e5, **LLAMA3), "num_hidden_layers": 5, "attention_chunk_size": 8,
         "interleave_moe_layer_step": 1, "use_qk_norm": True, "attn_temperature_tuning": True, "floor_scale": 4,
         "attn_scale": 0.3, "num_experts_per_tok": 1},
        (rope(theta=5e5), {"attention_chunk_size": 9}, {"use_qk_norm": False}, {"attn_temperature_tuning": False},
         {"floor_scale": 5}, {"attn_scale": 0.1}, {"no_rope_layer_interval": 5}, {"num_experts_per_tok": 2}),
        ("shared_expert", "router"),
    ),
    "llama4-maverick": Case(
        "Llama4TextConfig",
        {**LLAMA4_SIZES, **rope(theta=5e5), "num_hidden_layers": 4, "attention_chunk_size": 8,
         "interleave_moe_layer_step": 2, "use_qk_norm": False, "attn_temperature_tuning": False,
         "num_experts_per_tok": 2},
        ({"use_qk_norm": True}, {"interleave_moe_layer_step": 1}, {"num_experts_per_tok": 1}, rope(theta=1e4)),
    ),
}  # fmt: skip

# The norms inside latent attention keep an epsilon of 1e-6 in transformers, whatever the config says.
MLA = {**SIZES, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": None,
       "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20, "moe_intermediate_size": 32,
       "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3,
       "n_shared_experts": 2}  # fmt: skip
MLA_YARN = dict(factor=4.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0)
# Both bounds of the ramp are one, and at such a length that a ramp from 32 is another.
KIMI_YARN = dict(factor=4.0, original_max_position_embeddings=200, beta_fast=1.0, beta_slow=1.0, mscale=1.0,
                 mscale_all_dim=1.0)  # fmt: skip
V2_OLD = {"scoring_func": "softmax", "seq_aux": True, "aux_loss_alpha": 0.001, "ep_size": 1, "moe_layer_freq": 1}
V3_OLD = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1, "moe_layer_freq": 1}
DEEPSEEK = {
    "deepseek-v2-lite": Case(
        "DeepseekV2Config",
        {**MLA, **rope("yarn", **MLA_YARN, mscale=0.707, mscale_all_dim=0.707), "topk_method": "greedy", "n_group": 1,
         "topk_group": 1},
        (rope(), rope("yarn", **MLA_YARN), {"num_experts_per_tok": 2}, {"routed_scaling_factor": 2.0},
         {"first_k_dense_replace": 0}, rope("yarn", **MLA_YARN, mscale=1.0, mscale_all_dim=0.707)),
        ("kv_a_layernorm", "shared_experts", "mlp.gate.weight"),
        V2_OLD,
    ),
    "deepseek-v2": Case(
        "DeepseekV2Config",
        {**MLA, **rope("yarn", **MLA_YARN, mscale=1.0, mscale_all_dim=0.707), "q_lora_rank": 28,
         "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 4.0},
        ({"topk_method": "greedy"}, {"topk_group": 3}, {"routed_scaling_factor": 1.0},
         rope("yarn", **MLA_YARN, mscale=1.0, mscale_all_dim=1.0)),
        ("q_a_layernorm",),
        V2_OLD,
    ),
    "deepseek-v2-unscaled": Case(
        "DeepseekV2Config", {**MLA, "num_hidden_layers": 2, "n_shared_experts": 1}, (rope(theta=5e5),), (), V2_OLD
    ),
    "deepseek-v3": Case(
        "DeepseekV3Config",
        {**MLA, **rope("yarn", **MLA_YARN, mscale=1.0, mscale_all_dim=1.0), "q_lora_rank": 28, "n_shared_experts": 1,
         "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        ({"topk_group": 4}, {"n_group": 2}, {"rms_norm_eps": 1e-6}, {"routed_scaling_factor": 1.0},
         {"norm_topk_prob": False}, {"rope_interleave": False}, rope("yarn", **MLA_YARN)),
        ("e_score_correction_bias", "q_a_layernorm", "kv_a_layernorm", "shared_experts"),
        V3_OLD,
    ),
    "deepseek-v3-kimi": Case(
        "DeepseekV3Config",
        {**MLA, **rope("yarn", 5e4, **KIMI_YARN), "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
         "routed_scaling_factor": 2.827},
        (rope("yarn", 5e4, **{**KIMI_YARN, "beta_fast": 32.0}), {"routed_scaling_factor": 1.0}),
        ("e_score_correction_bias",),
        V3_OLD,
    ),
    "deepseek-v3-split-half": Case(
        "DeepseekV3Config",
        {**MLA, "q_lora_rank": 28, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "rope_interleave": False,
         "attention_bias": True, "norm_topk_prob": False, "num_hidden_layers": 2, "routed_scaling_factor": 1.0},
        ({"rope_interleave": True}, {"attention_bias": False}, {"norm_topk_prob": True}),
        ("q_a_proj.bias", "kv_a_proj_with_mqa.bias", "o_proj.bias"),
        V3_OLD,
    ),
}  # fmt: skip

GPT_OSS_SIZES = {**SIZES, "head_dim": 16, "num_hidden_layers": 4, "num_local_experts": 6, "num_experts_per_tok": 3,
                 "sliding_window": 8, "intermediate_size": 48}  # fmt: skip
GPT_OSS_YARN = dict(factor=8.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0, truncate=False)
GPT_OSS = {
    "gpt-oss": Case(
        "GptOssConfig",
        {**GPT_OSS_SIZES, **rope("yarn", 150000.0, **GPT_OSS_YARN), "swiglu_limit": 1.0},
        (rope(theta=150000.0), rope("yarn", 150000.0, **{**GPT_OSS_YARN, "truncate": True}), {"swiglu_limit": 7.0},
         {"swiglu_alpha": 1.0}, {"sliding_window": 9}, {"num_experts_per_tok": 2}),
        ("router.bias", "q_proj.bias", "o_proj.bias", "gate_up_proj_bias", "down_proj_bias", "sinks"),
        old={"experts_per_token": 3, "initial_context_length": 32, "swiglu_limit": 1.0},
    ),
}  # fmt: skip

OLMO3_SIZES = {**SIZES, "num_hidden_layers": 6, "sliding_window": 8}
OLMO3_YARN = dict(factor=8.0, original_max_position_embeddings=32, beta_fast=32.0, beta_slow=1.0)


def olmo3_rope(theta: float = 5e5, **scaling: Any) -> dict[str, Any]:
    full = {"rope_type": "yarn", **scaling} if scaling else {"rope_type": "default"}
    return {
        "rope_parameters": {
            "full_attention": {**full, "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        }
    }


OLMO = {
    "olmo2": Case(
        "Olmo2Config",
        {**SIZES, **rope(theta=5e5)},
        (rope(theta=1e4),),
        ("q_norm", "k_norm", "post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "olmo3": Case(
        "Olmo3Config",
        {**OLMO3_SIZES, **olmo3_rope(**OLMO3_YARN, attention_factor=1.2079441541679836)},
        (olmo3_rope(), olmo3_rope(**OLMO3_YARN, attention_factor=1.0), {"sliding_window": 9}),
        ("q_norm", "k_norm"),
    ),
    "olmo3-unscaled": Case(
        "Olmo3Config", {**OLMO3_SIZES, **olmo3_rope(), "num_key_value_heads": 4}, ({"sliding_window": 7},)
    ),
    "olmoe": Case(
        "OlmoeConfig",
        {**SIZES, "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "norm_topk_prob": False},
        ({"norm_topk_prob": True}, {"num_experts_per_tok": 2}),
        ("q_norm", "k_norm", "gate.weight"),
        old={"clip_qkv": None},
    ),
}

CASES: dict[str, Case] = {**LLAMA, **MISTRAL, **QWEN, **NEXT, **GEMMA, **LLAMA4, **DEEPSEEK, **GPT_OSS, **OLMO}

LONG_PROMPTS = (
    [(7 * i * i + 3 * i + 5) % 128 for i in range(48)],
    [(11 * i * i + 5 * i + 3) % 128 for i in range(33)],
)


def kept_columns(prompt: int) -> slice:
    """The columns of a long prompt's logits that a golden file holds: a third of them, at every position."""
    return slice(prompt, None, 3)


# A golden file takes the one whose greedy text says most and has no near tie.
SHORT_PROMPTS = [[(start * 37 + 7 * i * i + 3 * i + 5) % 128 for i in range(6)] for start in range(12)]
