"""The families with experts: config.json and tensors of each, with the defaults of transformers' classes."""

import dataclasses

from maxlite.config.schema import ModelConfig
from maxlite.hf import family_tensors as tensors
from maxlite.hf.family_fields import ABSENT, REQUIRED, ConfigReader, Expect, Field, Json, ModelKeys, fixed, is_count
from maxlite.hf.family_layers import (
    DenseFirst,
    Llama4Experts,
    Llama4Layers,
    NextTokenLayers,
    SharedExperts,
    SparseStep,
    Windows,
    all_but_each,
    even_below_max_window_layers,
    every_layer,
)
from maxlite.hf.family_lines import (
    ACTIVATION,
    ALL_BIASES,
    EVERY_LAYER_MOE,
    HEAD_NORM,
    NO_BIASES,
    NO_JITTER,
    NO_MLP_BIAS,
    NO_MROPE,
    PROJECTION_NORM,
    TOPK_NORM,
    DividedHeads,
    Family,
    expert_width,
    experts,
    head_dim,
    mlp_width,
    query_heads,
    sizes,
    tied,
)
from maxlite.hf.rope_json import Rope

MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    (
        *sizes(32000, 4096, 32, (32, 8), 131072, 1e-5),
        head_dim(),
        ACTIVATION,
        NO_MLP_BIAS,
        *experts(8, 2, "num_local_experts"),
        expert_width(14336, "mlp_dim", name="intermediate_size"),
        EVERY_LAYER_MOE,
        *NO_BIASES,
        NO_JITTER,
        tied(False),
        Rope(1e6),
        Windows(None, every_layer),
    ),
    tensors.table("mixtral", tensors.MIXTRAL),
)
QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (
        *sizes(151936, 2048, 24, (16, 16), 32768, 1e-6),
        head_dim(),
        mlp_width(5632),
        ACTIVATION,
        NO_MLP_BIAS,
        Field("qkv_bias", "attention_bias", True),
        Expect("attention_bias", (None,)),
        fixed(attention_out_bias=False),
        *experts(60, 4),
        expert_width(1408),
        Field("shared_expert_intermediate_size", "shared_expert_mlp_dim", 5632, unset=lambda model: 5632),
        fixed(shared_expert_gate=True),
        TOPK_NORM,
        SparseStep(),
        tied(False),
        Rope(),
        Windows(4096, even_below_max_window_layers, listed=True, switched=True),
        NO_MROPE,
    ),
    tensors.table("qwen2_moe", tensors.QWEN2_MOE),
)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (
        *sizes(151936, 2048, 24, (32, 4), 32768, 1e-6),
        head_dim(),
        mlp_width(6144),
        ACTIVATION,
        NO_MLP_BIAS,
        ALL_BIASES,
        HEAD_NORM,
        # Some files say what the family always has.
        Expect("qkv_bias", (False, None)),
        Expect("use_qk_norm", (True, None)),
        Expect("shared_expert_intermediate_size", (0, None)),
        *experts(128, 8),
        expert_width(768),
        TOPK_NORM,
        SparseStep(),
        tied(False),
        Rope(),
        Windows(4096, every_layer, switched=True),
    ),
    tensors.table("qwen3_moe", tensors.EXPERTS),
    ignored_keys=frozenset({"max_window_layers"}),
)
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    (
        *sizes(50304, 2048, 16, (16, query_heads), 4096, 1e-5),
        DividedHeads(),
        ACTIVATION,
        NO_MLP_BIAS,
        Expect("clip_qkv", (None,)),
        ALL_BIASES,
        PROJECTION_NORM,
        *experts(64, 8),
        expert_width(2048, "mlp_dim", name="intermediate_size"),
        TOPK_NORM,
        EVERY_LAYER_MOE,
        tied(False),
        Rope(),
    ),
    tensors.table("olmoe", tensors.EXPERTS),
)


@dataclasses.dataclass(frozen=True)
class _LatentHeads:
    """head_dim and qk_head_dim, which transformers works out from the two parts whatever is written."""

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Works head_dim out."""
        reader.take("head_dim")
        reader.take("qk_head_dim")
        keys["head_dim"] = (keys["qk_nope_head_dim"] or 0) + (keys["qk_rope_head_dim"] or 0)

    def write(self, model: ModelConfig, json: Json) -> None:
        """Writes nothing."""


@dataclasses.dataclass(frozen=True)
class _Groups:
    """n_group and topk_group, and topk_method where the family has a choice (DeepSeek V2)."""

    number: int
    chosen: int
    method: bool = False

    def read(self, reader: ConfigReader, keys: ModelKeys) -> None:
        """Reads the groups; null and greedy mean that all experts are one."""
        given = {"n_group": self.number, "topk_group": self.chosen}
        for name, default in given.items():
            value = reader.take(name)
            value = default if value is ABSENT else 1 if value is None else value
            if not is_count(value) or value == 0:
                reader.refuse(f"{name}={value!r}: it must be a whole number above 0, or null")
                value = 1
            given[name] = value
        if self.method:
            method = reader.take_given("topk_method")
            if method not in (None, "greedy", "group_limited_greedy"):
                reader.refuse(f"topk_method={method!r} is not supported; it may be greedy or group_limited_greedy")
            if method != "group_limited_greedy":
                given = dict.fromkeys(given, 1)
        keys["n_routing_groups"], keys["topk_routing_group"] = given.values()

    def write(self, model: ModelConfig, json: Json) -> None:
        """Writes the groups."""
        json["n_group"], json["topk_group"] = model.n_routing_groups, model.topk_routing_group
        if self.method:
            json["topk_method"] = "greedy" if model.n_routing_groups == 1 else "group_limited_greedy"


def _latent(query_rank: int | None, nope: int, rope: int, value: int) -> tuple[Field | _LatentHeads, ...]:
    return (
        Field("q_lora_rank", "q_lora_rank", query_rank),
        Field("kv_lora_rank", "kv_lora_rank", 512, unset=lambda model: 0),
        Field("qk_nope_head_dim", "qk_nope_head_dim", nope, unset=lambda model: 0),
        Field("qk_rope_head_dim", "qk_rope_head_dim", rope, unset=lambda model: 0),
        Field("v_head_dim", "v_head_dim", value, unset=lambda model: 0),
        _LatentHeads(),
    )


_DEEPSEEK_LINES = (
    *_latent(1536, 128, 64, 128),
    ACTIVATION,
    NO_MLP_BIAS,
    ALL_BIASES,
    fixed(attention_pattern=("mla",)),
    tied(False),
    Rope(),
    Expect("moe_layer_freq", (1, None)),
)
# How the loss is made, or how the experts are spread over devices.
_DEEPSEEK_IGNORED = frozenset({"aux_loss_alpha", "seq_aux", "ep_size"})
DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    (
        *sizes(102400, 4096, 32, (32, query_heads), 2048, 1e-6),
        mlp_width(11008),
        *_DEEPSEEK_LINES,
        fixed(rope_interleave=True),
        *experts(64, REQUIRED, "n_routed_experts"),
        expert_width(1407),
        SharedExperts(2),
        DenseFirst(0),
        _Groups(1, 1, method=True),
        fixed(routed_score_func="softmax", norm_topk_prob=False, router_group_score="max"),
        Expect("scoring_func", ("softmax", None)),
        # transformers leaves true out of account, so nobody could say which of the two such a model was trained with.
        Expect("norm_topk_prob", (False, None), written=False),
        Field("routed_scaling_factor", "routed_scaling_factor", 1.0),
    ),
    tensors.table("deepseek_v2", tensors.DEEPSEEK),
    ignored_keys=_DEEPSEEK_IGNORED,
    whole_heads=True,
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (
        *sizes(129280, 7168, 61, (128, 128), 4096, 1e-6),
        mlp_width(18432),
        *_DEEPSEEK_LINES,
        Field("rope_interleave", "rope_interleave", True),
        *experts(256, 8, "n_routed_experts"),
        expert_width(2048),
        SharedExperts(1),
        DenseFirst(3),
        _Groups(8, 4),
        fixed(routed_score_func="sigmoid", routed_bias=True, router_group_score="top2_sum"),
        Expect("scoring_func", ("sigmoid", None)),
        Expect("topk_method", ("noaux_tc", None)),
        Field("norm_topk_prob", "norm_topk_prob", True),
        Field("routed_scaling_factor", "routed_scaling_factor", 2.5),
        NextTokenLayers(),
    ),
    tensors.table("deepseek_v3", tensors.DEEPSEEK),
    ignored_keys=_DEEPSEEK_IGNORED,
    # Kimi K2: the same layout under a name that transformers itself does not know.
    aliases=("kimi_k2",),
)
LLAMA4 = Family(
    "llama4_text",
    "Llama4ForCausalLM",
    (
        *sizes(202048, 5120, 48, (40, 8), 131072, 1e-5),
        head_dim(128),
        Field("intermediate_size_mlp", "mlp_dim", 16384),
        ACTIVATION,
        NO_MLP_BIAS,
        ALL_BIASES,
        *experts(16, 1, "num_local_experts"),
        expert_width(8192, "shared_expert_mlp_dim", name="intermediate_size"),
        Llama4Experts(),
        Llama4Layers(),
        fixed(routed_score_func="sigmoid", norm_topk_prob=False, scale_expert_input=True),
        NO_JITTER,
        Field("use_qk_norm", "use_qk_norm", True),
        fixed(qk_norm_type="l2", rope_interleave=True),
        Field("attn_temperature_tuning", "temperature_tuning", True, truth=True),
        Field("floor_scale", "temperature_tuning_floor", 8192),
        Field("attn_scale", "temperature_tuning_scale", 0.1),
        tied(False),
        Rope(500000.0),
    ),
    tensors.multimodal_table("llama4_text", tensors.LLAMA4, "vision_model", "multi_modal_projector"),
    ignored_keys=frozenset({"for_llm_compressor"}),
    wrapper="llama4",
    wrapper_architecture="Llama4ForConditionalGeneration",
)
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    (
        *sizes(201088, 2880, 36, (64, 8), 131072, 1e-5),
        head_dim(64),
        Field("attention_bias", ("attention_bias", "attention_out_bias"), True),
        *experts(128, 4, "num_local_experts"),
        expert_width(2880, "mlp_dim", name="intermediate_size"),
        EVERY_LAYER_MOE,
        # The file says silu; what it means is in the code.
        Expect("hidden_act", ("silu", None), written="silu"),
        fixed(mlp_activation="swigluoai", mlp_bias=True, router_bias=True, attention_sink=True, norm_topk_prob=True),
        Field("swiglu_limit", "mlp_activations_limit", 7.0),
        Field("swiglu_alpha", "glu_alpha", 1.702),
        tied(False),
        Rope(150000.0, absent=_GPT_OSS_ROPE),
        Windows(128, all_but_each(2), listed=True, always=True),
    ),
    tensors.table("gpt_oss", tensors.GPT_OSS),
    # The length before scaling, which rope_scaling says again.
    ignored_keys=frozenset({"initial_context_length"}),
)
