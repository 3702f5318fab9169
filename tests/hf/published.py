"""config.json of published models, as their folders have them, and the keys that they stand for."""

from typing import Any

_LLAMA3_1_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# Keys that most files have and that say nothing about the architecture.
COMMON = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.46.0",
    "use_cache": True,
}


def _file(architecture: str, model_type: str, **keys: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **COMMON, **keys}


def _gpt_oss_layers(number: int) -> list[str]:
    return ["sliding_attention", "full_attention"] * (number // 2)


def _gemma4(model_type: str, architecture: str, **text: Any) -> dict[str, Any]:
    number = text["num_hidden_layers"]
    return {
        "architectures": [architecture],
        "audio_config": None,
        "audio_token_id": 258881,
        "boa_token_id": 256000,
        "boi_token_id": 255999,
        "dtype": "bfloat16",
        "eoa_token_id": 258883,
        "eoa_token_index": 258883,
        "eoi_token_id": 258882,
        "eos_token_id": [1, 106],
        "image_token_id": 258880,
        "initializer_range": 0.02,
        "model_type": model_type,
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attention_k_eq_v": True,
            "enable_moe_block": False,
            "final_logit_softcapping": 30.0,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 0,
            "layer_types": ["full_attention" if n % 6 == 5 else "sliding_attention" for n in range(number)],
            "max_position_embeddings": 262144,
            "model_type": f"{model_type}_text",
            "num_experts": None,
            "num_kv_shared_layers": 0,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "sliding_window": 1024,
            "tie_word_embeddings": True,
            "top_k_experts": None,
            "use_bidirectional_attention": "vision",
            "use_cache": True,
            "use_double_wide_mlp": False,
            "vocab_size": 262144,
            "vocab_size_per_layer_input": 262144,
            **text,
        },
        "tie_word_embeddings": True,
        "transformers_version": "5.5.0.dev0",
        "video_token_id": 258884,
        "vision_config": {"model_type": f"{model_type}_vision"},
        "vision_soft_tokens_per_image": 280,
    }


GEMMA4 = dict(
    vocab_size=262144, head_dim=256, global_head_dim=512, max_position_embeddings=262144,
    normalization_layer_epsilon=1e-6, scale_embeddings=True, mlp_activation="gelu_tanh", use_post_norms=True,
    use_qk_norm=True, use_v_norm=True, share_kv_projections=True, query_pre_attn_scalar=1.0, use_layer_scalar=True,
    attention_pattern=("local",) * 5 + ("full",), sliding_window_size=1024, final_logits_soft_cap=30.0,
    rope_type="proportional", rope_max_timescale=1e6, local_rope_max_timescale=10000.0, partial_rotary_factor=0.25,
)  # fmt: skip
_FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
_DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
_DEEPSEEK = {
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
}

# Name (that of the model YAML, if there is one) -> (config.json, what differs from base.yml's plain Llama).
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama2-7b": (
        _file(
            "LlamaForCausalLM", "llama", hidden_act="silu", hidden_size=4096, intermediate_size=11008,
            max_position_embeddings=4096, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32,
            pretraining_tp=1, rms_norm_eps=1e-05, rope_scaling=None, tie_word_embeddings=False, vocab_size=32000,
        ),
        dict(
            vocab_size=32000, emb_dim=4096, num_decoder_layers=32, num_query_heads=32, num_kv_heads=32, head_dim=128,
            mlp_dim=11008, max_position_embeddings=4096, logits_via_embedding=False,
        ),
    ),
    "llama3.1-8b": (
        _file(
            "LlamaForCausalLM", "llama", attention_bias=False, hidden_act="silu", hidden_size=4096,
            intermediate_size=14336, max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32,
            num_hidden_layers=32, num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-05,
            rope_scaling=_LLAMA3_1_ROPE, rope_theta=500000.0, tie_word_embeddings=False, vocab_size=128256,
        ),
        dict(
            vocab_size=128256, emb_dim=4096, num_decoder_layers=32, num_query_heads=32, num_kv_heads=8, head_dim=128,
            mlp_dim=14336, max_position_embeddings=131072, logits_via_embedding=False, rope_type="llama3",
            rope_factor=8.0, original_max_position_embeddings=8192, rope_max_timescale=500000.0,
        ),
    ),
    "smollm2-135m": (
        _file(
            "LlamaForCausalLM", "llama", attention_bias=False, hidden_act="silu", hidden_size=576,
            intermediate_size=1536, is_llama_config=True, max_position_embeddings=8192, num_attention_heads=9,
            num_hidden_layers=30, num_key_value_heads=3, pretraining_tp=1, rms_norm_eps=1e-05, rope_interleaved=False,
            rope_scaling=None, rope_theta=100000, tie_word_embeddings=True, vocab_size=49152,
        ) | {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}},
        dict(
            vocab_size=49152, emb_dim=576, num_decoder_layers=30, num_query_heads=9, num_kv_heads=3, head_dim=64,
            mlp_dim=1536, max_position_embeddings=8192, rope_max_timescale=100000.0,
        ),
    ),
    "mistral-7b-v0.1": (
        _file(
            "MistralForCausalLM", "mistral", hidden_act="silu", hidden_size=4096, intermediate_size=14336,
            max_position_embeddings=32768, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8,
            rms_norm_eps=1e-05, rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False, vocab_size=32000,
        ),
        dict(
            vocab_size=32000, emb_dim=4096, num_decoder_layers=32, num_query_heads=32, num_kv_heads=8, head_dim=128,
            mlp_dim=14336, max_position_embeddings=32768, logits_via_embedding=False, attention_pattern=("local",),
            sliding_window_size=4096,
        ),
    ),
    "mistral-nemo-12b": (
        _file(
            "MistralForCausalLM", "mistral", head_dim=128, hidden_act="silu", hidden_size=5120,
            intermediate_size=14336, max_position_embeddings=128000, num_attention_heads=32, num_hidden_layers=40,
            num_key_value_heads=8, rms_norm_eps=1e-05, rope_theta=1000000.0, sliding_window=None,
            tie_word_embeddings=False, vocab_size=131072,
        ),
        dict(
            vocab_size=131072, emb_dim=5120, num_decoder_layers=40, num_query_heads=32, num_kv_heads=8, head_dim=128,
            mlp_dim=14336, max_position_embeddings=128000, logits_via_embedding=False, rope_max_timescale=1e6,
        ),
    ),
    "mixtral-8x7b": (
        _file(
            "MixtralForCausalLM", "mixtral", hidden_act="silu", hidden_size=4096, intermediate_size=14336,
            max_position_embeddings=32768, num_attention_heads=32, num_experts_per_tok=2, num_hidden_layers=32,
            num_key_value_heads=8, num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-05,
            rope_theta=1000000.0, router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False,
            vocab_size=32000,
        ),
        dict(
            vocab_size=32000, emb_dim=4096, num_decoder_layers=32, num_query_heads=32, num_kv_heads=8, head_dim=128,
            mlp_dim=14336, max_position_embeddings=32768, logits_via_embedding=False, rope_max_timescale=1e6,
            mlp_pattern=("moe",), num_experts=8, num_experts_per_tok=2, moe_mlp_dim=14336,
        ),
    ),
    "qwen2.5-7b": (
        _file(
            "Qwen2ForCausalLM", "qwen2", hidden_act="silu", hidden_size=3584, intermediate_size=18944,
            max_position_embeddings=131072, max_window_layers=28, num_attention_heads=28, num_hidden_layers=28,
            num_key_value_heads=4, rms_norm_eps=1e-06, rope_theta=1000000.0, sliding_window=131072,
            tie_word_embeddings=False, use_mrope=False, use_sliding_window=False, vocab_size=152064,
        ),
        dict(
            vocab_size=152064, emb_dim=3584, num_decoder_layers=28, num_query_heads=28, num_kv_heads=4, head_dim=128,
            mlp_dim=18944, max_position_embeddings=131072, logits_via_embedding=False, rope_max_timescale=1e6,
            normalization_layer_epsilon=1e-6, attention_bias=True,
        ),
    ),
    "qwen1.5-moe-a2.7b": (
        _file(
            "Qwen2MoeForCausalLM", "qwen2_moe", decoder_sparse_step=1, hidden_act="silu", hidden_size=2048,
            intermediate_size=5632, max_position_embeddings=8192, max_window_layers=21, moe_intermediate_size=1408,
            norm_topk_prob=False, num_attention_heads=16, num_experts=60, num_experts_per_tok=4, num_hidden_layers=24,
            num_key_value_heads=16, output_router_logits=False, rms_norm_eps=1e-06, rope_theta=1000000.0,
            router_aux_loss_coef=0.001, shared_expert_intermediate_size=5632, sliding_window=32768,
            tie_word_embeddings=False, use_sliding_window=False, vocab_size=151936,
        ),
        dict(
            vocab_size=151936, emb_dim=2048, num_decoder_layers=24, num_query_heads=16, num_kv_heads=16, head_dim=128,
            mlp_dim=5632, max_position_embeddings=8192, logits_via_embedding=False, rope_max_timescale=1e6,
            normalization_layer_epsilon=1e-6, attention_bias=True, mlp_pattern=("moe",), num_experts=60,
            num_experts_per_tok=4, moe_mlp_dim=1408, shared_expert_mlp_dim=5632, shared_expert_gate=True,
            norm_topk_prob=False,
        ),
    ),
    "qwen3-0.6b": (
        _file(
            "Qwen3ForCausalLM", "qwen3", attention_bias=False, head_dim=128, hidden_act="silu", hidden_size=1024,
            intermediate_size=3072, max_position_embeddings=40960, max_window_layers=28, num_attention_heads=16,
            num_hidden_layers=28, num_key_value_heads=8, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1000000,
            sliding_window=None, tie_word_embeddings=True, use_sliding_window=False, vocab_size=151936,
        ),
        dict(
            vocab_size=151936, emb_dim=1024, num_decoder_layers=28, num_query_heads=16, num_kv_heads=8, head_dim=128,
            mlp_dim=3072, max_position_embeddings=40960, rope_max_timescale=1e6, normalization_layer_epsilon=1e-6,
            use_qk_norm=True,
        ),
    ),
    "qwen3-coder-480b-a35b": (
        _file(
            "Qwen3MoeForCausalLM", "qwen3_moe", decoder_sparse_step=1, head_dim=128, hidden_act="silu",
            hidden_size=6144, intermediate_size=8192, max_position_embeddings=262144, max_window_layers=62,
            mlp_only_layers=[], moe_intermediate_size=2560, norm_topk_prob=True, num_attention_heads=96,
            num_experts=160, num_experts_per_tok=8, num_hidden_layers=62, num_key_value_heads=8,
            output_router_logits=False, qkv_bias=False, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=10000000,
            router_aux_loss_coef=0.0, shared_expert_intermediate_size=0, sliding_window=None,
            tie_word_embeddings=False, use_qk_norm=True, use_sliding_window=False, vocab_size=151936,
        ),
        dict(
            vocab_size=151936, emb_dim=6144, num_decoder_layers=62, num_query_heads=96, num_kv_heads=8, head_dim=128,
            mlp_dim=8192, max_position_embeddings=262144, logits_via_embedding=False, rope_max_timescale=1e7,
            normalization_layer_epsilon=1e-6, use_qk_norm=True, mlp_pattern=("moe",), num_experts=160,
            num_experts_per_tok=8, moe_mlp_dim=2560,
        ),
    ),
    "qwen3-next-80b-a3b": (
        _file(
            "Qwen3NextForCausalLM", "qwen3_next", attention_bias=False, decoder_sparse_step=1,
            full_attention_interval=4, head_dim=256, hidden_act="silu", hidden_size=2048, intermediate_size=5120,
            linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
            linear_value_head_dim=128, max_position_embeddings=262144, mlp_only_layers=[], moe_intermediate_size=512,
            norm_topk_prob=True, num_attention_heads=16, num_experts=512, num_experts_per_tok=10,
            num_hidden_layers=48, num_key_value_heads=2, output_router_logits=False, partial_rotary_factor=0.25,
            rms_norm_eps=1e-06, rope_scaling=None, rope_theta=10000000, router_aux_loss_coef=0.001,
            shared_expert_intermediate_size=512, tie_word_embeddings=False, use_sliding_window=False,
            vocab_size=151936,
        ),
        dict(
            vocab_size=151936, emb_dim=2048, num_decoder_layers=48, num_query_heads=16, num_kv_heads=2, head_dim=256,
            mlp_dim=5120, max_position_embeddings=262144, logits_via_embedding=False, rope_max_timescale=1e7,
            normalization_layer_epsilon=1e-6, norm_scale_offset=1.0, use_qk_norm=True, attention_output_gate=True,
            partial_rotary_factor=0.25, attention_pattern=("gated_delta_net",) * 3 + ("full",),
            gdn_conv_kernel_dim=4, gdn_num_key_heads=16, gdn_num_value_heads=32, gdn_key_head_dim=128,
            gdn_value_head_dim=128, mlp_pattern=("moe",), num_experts=512, num_experts_per_tok=10, moe_mlp_dim=512,
            shared_expert_mlp_dim=512, shared_expert_gate=True,
        ),
    ),
    "gemma-2b": (
        _file(
            "GemmaForCausalLM", "gemma", attention_bias=False, head_dim=256, hidden_act="gelu",
            hidden_activation="gelu_pytorch_tanh", hidden_size=2048, intermediate_size=16384,
            max_position_embeddings=8192, num_attention_heads=8, num_hidden_layers=18, num_key_value_heads=1,
            pad_token_id=0, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=10000.0, vocab_size=256000,
        ),
        dict(
            vocab_size=256000, emb_dim=2048, num_decoder_layers=18, num_query_heads=8, num_kv_heads=1, head_dim=256,
            mlp_dim=16384, max_position_embeddings=8192, normalization_layer_epsilon=1e-6, norm_scale_offset=1.0,
            scale_embeddings=True, mlp_activation="gelu_tanh",
        ),
    ),
    "gemma2-27b": (
        _file(
            "Gemma2ForCausalLM", "gemma2", attention_bias=False, attn_logit_softcapping=50.0,
            cache_implementation="hybrid", final_logit_softcapping=30.0, head_dim=128, hidden_act="gelu_pytorch_tanh",
            hidden_activation="gelu_pytorch_tanh", hidden_size=4608, intermediate_size=36864,
            max_position_embeddings=8192, num_attention_heads=32, num_hidden_layers=46, num_key_value_heads=16,
            pad_token_id=0, query_pre_attn_scalar=144, rms_norm_eps=1e-06, rope_theta=10000.0, sliding_window=4096,
            vocab_size=256000,
        ) | {"_attn_implementation": "eager"},
        dict(
            vocab_size=256000, emb_dim=4608, num_decoder_layers=46, num_query_heads=32, num_kv_heads=16, head_dim=128,
            mlp_dim=36864, max_position_embeddings=8192, normalization_layer_epsilon=1e-6, norm_scale_offset=1.0,
            scale_embeddings=True, mlp_activation="gelu_tanh", use_post_norms=True, query_pre_attn_scalar=144.0,
            attn_logits_soft_cap=50.0, final_logits_soft_cap=30.0, attention_pattern=("local", "full"),
            sliding_window_size=4096,
        ),
    ),
    "gemma3-1b": (
        _file(
            "Gemma3ForCausalLM", "gemma3_text", attention_bias=False, attn_logit_softcapping=None,
            cache_implementation="hybrid", eos_token_id=[1, 106], final_logit_softcapping=None, head_dim=256,
            hidden_activation="gelu_pytorch_tanh", hidden_size=1152, intermediate_size=6912,
            max_position_embeddings=32768, num_attention_heads=4, num_hidden_layers=26, num_key_value_heads=1,
            pad_token_id=0, query_pre_attn_scalar=256, rms_norm_eps=1e-06, rope_local_base_freq=10000,
            rope_scaling=None, rope_theta=1000000, sliding_window=512, sliding_window_pattern=6, vocab_size=262144,
        ),
        dict(
            vocab_size=262144, emb_dim=1152, num_decoder_layers=26, num_query_heads=4, num_kv_heads=1, head_dim=256,
            mlp_dim=6912, max_position_embeddings=32768, normalization_layer_epsilon=1e-6, norm_scale_offset=1.0,
            scale_embeddings=True, mlp_activation="gelu_tanh", use_post_norms=True, use_qk_norm=True,
            attention_pattern=("local",) * 5 + ("full",), sliding_window_size=512, rope_max_timescale=1e6,
            local_rope_max_timescale=10000.0,
        ),
    ),
    # A multimodal folder, most of whose text_config is left to the defaults.
    "gemma3-12b": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "eos_token_id": [1, 106],
            "image_token_index": 262144,
            "initializer_range": 0.02,
            "mm_tokens_per_image": 256,
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 3840,
                "intermediate_size": 15360,
                "model_type": "gemma3_text",
                "num_attention_heads": 16,
                "num_hidden_layers": 48,
                "num_key_value_heads": 8,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "transformers_version": "4.50.0.dev0",
            "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
        },
        dict(
            vocab_size=262208, emb_dim=3840, num_decoder_layers=48, num_query_heads=16, num_kv_heads=8, head_dim=256,
            mlp_dim=15360, max_position_embeddings=131072, normalization_layer_epsilon=1e-6, norm_scale_offset=1.0,
            scale_embeddings=True, mlp_activation="gelu_tanh", use_post_norms=True, use_qk_norm=True,
            attention_pattern=("local",) * 5 + ("full",), sliding_window_size=1024, rope_max_timescale=1e6,
            local_rope_max_timescale=10000.0, rope_type="linear", rope_factor=8.0,
        ),
    ),
    "gemma4-12b": (
        _gemma4(
            "gemma4_unified", "Gemma4UnifiedForConditionalGeneration", hidden_size=3840, intermediate_size=15360,
            moe_intermediate_size=None, num_attention_heads=16,
            num_global_key_value_heads=1, num_hidden_layers=48, num_key_value_heads=8,
        ),
        dict(
            GEMMA4, emb_dim=3840, num_decoder_layers=48, num_query_heads=16, num_kv_heads=8, global_num_kv_heads=1,
            mlp_dim=15360,
        ),
    ),
    "gemma4-26b-a4b": (
        _gemma4(
            "gemma4", "Gemma4ForConditionalGeneration", enable_moe_block=True, hidden_size=2816,
            intermediate_size=2112, moe_intermediate_size=704, num_attention_heads=16,
            num_experts=128, num_global_key_value_heads=2, num_hidden_layers=30, num_key_value_heads=8,
            top_k_experts=8,
        ),
        dict(
            GEMMA4, emb_dim=2816, num_decoder_layers=30, num_query_heads=16, num_kv_heads=8, global_num_kv_heads=2,
            mlp_dim=2112, mlp_pattern=("dense_and_moe",), num_experts=128, num_experts_per_tok=8, moe_mlp_dim=704,
            scaled_router=True,
        ),
    ),
    "gemma4-31b": (
        _gemma4(
            "gemma4", "Gemma4ForConditionalGeneration", expert_intermediate_size=None, hidden_size=5376,
            intermediate_size=21504, num_attention_heads=32, num_global_key_value_heads=4,
            num_hidden_layers=60, num_key_value_heads=16,
        ),
        dict(
            GEMMA4, emb_dim=5376, num_decoder_layers=60, num_query_heads=32, num_kv_heads=16, global_num_kv_heads=4,
            mlp_dim=21504,
        ),
    ),
    "llama4-17b-16e-instruct": (
        {
            "architectures": ["Llama4ForConditionalGeneration"],
            "boi_token_index": 200080,
            "eoi_token_index": 200081,
            "image_token_index": 200092,
            "model_type": "llama4",
            "text_config": {
                "_attn_implementation_autoset": True,
                "attention_bias": False,
                "attention_chunk_size": 8192,
                "attention_dropout": 0.0,
                "attn_scale": 0.1,
                # A number in the first files, although a switch.
                "attn_temperature_tuning": 4,
                "bos_token_id": 200000,
                "cache_implementation": "hybrid",
                "eos_token_id": [200001, 200007, 200008],
                "floor_scale": 8192,
                "for_llm_compressor": False,
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 5120,
                "initializer_range": 0.02,
                "interleave_moe_layer_step": 1,
                "intermediate_size": 8192,
                "intermediate_size_mlp": 16384,
                "max_position_embeddings": 10485760,
                "model_type": "llama4_text",
                "moe_layers": list(range(48)),
                "no_rope_layers": [1, 1, 1, 0] * 12,
                "num_attention_heads": 40,
                "num_experts_per_tok": 1,
                "num_hidden_layers": 48,
                "num_key_value_heads": 8,
                "num_local_experts": 16,
                "output_router_logits": False,
                "pad_token_id": 200018,
                "rms_norm_eps": 1e-05,
                "rope_scaling": {**_LLAMA3_1_ROPE, "factor": 16.0, "high_freq_factor": 1.0},
                "rope_theta": 500000.0,
                "router_aux_loss_coef": 0.001,
                "router_jitter_noise": 0.0,
                "torch_dtype": "bfloat16",
                "use_cache": True,
                "use_qk_norm": True,
                "vocab_size": 202048,
            },
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.51.0.dev0",
            "vision_config": {"model_type": "llama4_vision_model"},
        },
        dict(
            vocab_size=202048, emb_dim=5120, num_decoder_layers=48, num_query_heads=40, num_kv_heads=8, head_dim=128,
            mlp_dim=16384, max_position_embeddings=10485760, logits_via_embedding=False, rope_type="llama3",
            rope_factor=16.0, rope_high_freq_factor=1.0, original_max_position_embeddings=8192,
            rope_max_timescale=500000.0, rope_interleave=True,
            attention_pattern=("chunked", "chunked", "chunked", "nope"), chunk_attn_window_size=8192,
            temperature_tuning=True, use_qk_norm=True, qk_norm_type="l2", mlp_pattern=("moe",), num_experts=16,
            num_experts_per_tok=1, moe_mlp_dim=8192, shared_expert_mlp_dim=8192, routed_score_func="sigmoid",
            norm_topk_prob=False, scale_expert_input=True,
        ),
    ),
    "deepseek2-lite-16b": (
        _file(
            "DeepseekV2ForCausalLM", "deepseek_v2",
            **{
                **_DEEPSEEK, "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944,
                "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "n_group": 1,
                "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
                "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
                "rope_scaling": {**_DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "rope_theta": 10000,
                "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy",
                "vocab_size": 102400,
            },
        ),
        dict(
            vocab_size=102400, emb_dim=2048, num_decoder_layers=27, num_query_heads=16, num_kv_heads=16, head_dim=192,
            mlp_dim=10944, max_position_embeddings=163840, logits_via_embedding=False,
            normalization_layer_epsilon=1e-6, attention_pattern=("mla",), kv_lora_rank=512, qk_nope_head_dim=128,
            qk_rope_head_dim=64, v_head_dim=128, rope_type="yarn", rope_factor=40.0,
            original_max_position_embeddings=4096, mscale=0.707, rope_mscale_all_dim=0.707, rope_interleave=True,
            num_dense_layers=1, mlp_pattern=("moe",), num_experts=64, num_experts_per_tok=6, moe_mlp_dim=1408,
            shared_expert_mlp_dim=2816, norm_topk_prob=False,
        ),
    ),
    "deepseek2-236b": (
        _file(
            "DeepseekV2ForCausalLM", "deepseek_v2",
            **{
                **_DEEPSEEK, "first_k_dense_replace": 1, "hidden_size": 5120, "intermediate_size": 12288,
                "max_position_embeddings": 163840, "moe_intermediate_size": 1536, "n_group": 8,
                "n_routed_experts": 160, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 128,
                "num_experts_per_tok": 6, "num_hidden_layers": 60, "num_key_value_heads": 128, "q_lora_rank": 1536,
                "rope_scaling": {**_DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "rope_theta": 10000,
                "routed_scaling_factor": 16.0, "scoring_func": "softmax", "topk_group": 3,
                "topk_method": "group_limited_greedy", "vocab_size": 102400,
            },
        ),
        dict(
            vocab_size=102400, emb_dim=5120, num_decoder_layers=60, num_query_heads=128, num_kv_heads=128,
            head_dim=192, mlp_dim=12288, max_position_embeddings=163840, logits_via_embedding=False,
            normalization_layer_epsilon=1e-6, attention_pattern=("mla",), q_lora_rank=1536, kv_lora_rank=512,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rope_type="yarn", rope_factor=40.0,
            original_max_position_embeddings=4096, mscale=0.707, rope_mscale_all_dim=0.707, rope_interleave=True,
            num_dense_layers=1, mlp_pattern=("moe",), num_experts=160, num_experts_per_tok=6, moe_mlp_dim=1536,
            shared_expert_mlp_dim=3072, norm_topk_prob=False, routed_scaling_factor=16.0, n_routing_groups=8,
            topk_routing_group=3,
        ),
    ),
    "deepseek3-671b": (
        _file(
            "DeepseekV3ForCausalLM", "deepseek_v3",
            **{
                **_DEEPSEEK, "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
                "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "n_group": 8,
                "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
                "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
                "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "quantization_config": _FP8,
                "rope_scaling": _DEEPSEEK_YARN, "rope_theta": 10000, "routed_scaling_factor": 2.5,
                "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "vocab_size": 129280,
            },
        ),
        dict(
            vocab_size=129280, emb_dim=7168, num_decoder_layers=61, num_query_heads=128, num_kv_heads=128,
            head_dim=192, mlp_dim=18432, max_position_embeddings=163840, logits_via_embedding=False,
            normalization_layer_epsilon=1e-6, attention_pattern=("mla",), q_lora_rank=1536, kv_lora_rank=512,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rope_type="yarn", rope_factor=40.0,
            original_max_position_embeddings=4096, mscale=1.0, rope_mscale_all_dim=1.0, rope_interleave=True,
            num_dense_layers=3, mlp_pattern=("moe",), num_experts=256, num_experts_per_tok=8, moe_mlp_dim=2048,
            shared_expert_mlp_dim=2048, routed_score_func="sigmoid", routed_scaling_factor=2.5, routed_bias=True,
            n_routing_groups=8, topk_routing_group=4, router_group_score="top2_sum",
        ),
    ),
    "kimi-k2-1t": (
        _file(
            "DeepseekV3ForCausalLM", "kimi_k2",
            **{
                **_DEEPSEEK, "first_k_dense_replace": 1, "hidden_size": 7168, "intermediate_size": 18432,
                "max_position_embeddings": 131072, "moe_intermediate_size": 2048, "n_group": 1,
                "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
                "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64,
                "num_nextn_predict_layers": 0, "q_lora_rank": 1536, "quantization_config": _FP8,
                "rope_scaling": {**_DEEPSEEK_YARN, "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
                "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_group": 1,
                "topk_method": "noaux_tc", "vocab_size": 163840,
            },
        ),
        dict(
            vocab_size=163840, emb_dim=7168, num_decoder_layers=61, num_query_heads=64, num_kv_heads=64, head_dim=192,
            mlp_dim=18432, max_position_embeddings=131072, logits_via_embedding=False,
            normalization_layer_epsilon=1e-6, attention_pattern=("mla",), q_lora_rank=1536, kv_lora_rank=512,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rope_max_timescale=50000.0, rope_type="yarn",
            rope_factor=32.0, original_max_position_embeddings=4096, beta_fast=1.0, mscale=1.0,
            rope_mscale_all_dim=1.0, rope_interleave=True, num_dense_layers=1, mlp_pattern=("moe",), num_experts=384,
            num_experts_per_tok=8, moe_mlp_dim=2048, shared_expert_mlp_dim=2048, routed_score_func="sigmoid",
            routed_scaling_factor=2.827, routed_bias=True,
        ),
    ),
    "gpt-oss-20b": (
        _file(
            "GptOssForCausalLM", "gpt_oss", attention_bias=True, eos_token_id=200002, experts_per_token=4,
            head_dim=64, hidden_act="silu", hidden_size=2880, initial_context_length=4096, intermediate_size=2880,
            layer_types=_gpt_oss_layers(24), max_position_embeddings=131072, num_attention_heads=64,
            num_experts_per_tok=4, num_hidden_layers=24, num_key_value_heads=8, num_local_experts=32,
            output_router_logits=False, pad_token_id=199999,
            quantization_config={"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"}, rms_norm_eps=1e-05,
            rope_scaling={
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                "rope_type": "yarn", "truncate": False,
            },
            rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0,
            tie_word_embeddings=False, vocab_size=201088,
        ),
        dict(
            vocab_size=201088, emb_dim=2880, num_decoder_layers=24, num_query_heads=64, num_kv_heads=8, head_dim=64,
            mlp_dim=2880, max_position_embeddings=131072, logits_via_embedding=False,
            attention_pattern=("local", "full"), sliding_window_size=128, attention_bias=True,
            attention_out_bias=True, attention_sink=True, mlp_activation="swigluoai", mlp_bias=True, router_bias=True,
            mlp_pattern=("moe",), num_experts=32, num_experts_per_tok=4, moe_mlp_dim=2880, rope_type="yarn",
            rope_factor=32.0, original_max_position_embeddings=4096, rope_truncate=False, rope_max_timescale=150000.0,
        ),
    ),
    "olmo2-1b": (
        _file(
            "Olmo2ForCausalLM", "olmo2", attention_bias=False, hidden_act="silu", hidden_size=2048,
            intermediate_size=8192, max_position_embeddings=4096, num_attention_heads=16, num_hidden_layers=16,
            num_key_value_heads=16, pad_token_id=100277, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=500000,
            tie_word_embeddings=False, vocab_size=100352,
        ),
        dict(
            vocab_size=100352, emb_dim=2048, num_decoder_layers=16, num_query_heads=16, num_kv_heads=16, head_dim=128,
            mlp_dim=8192, max_position_embeddings=4096, logits_via_embedding=False, normalization_layer_epsilon=1e-6,
            rope_max_timescale=500000.0, use_qk_norm=True, qk_norm_type="projection", use_pre_norms=False,
            use_post_norms=True,
        ),
    ),
    "olmo3-7b": (
        _file(
            "Olmo3ForCausalLM", "olmo3", attention_bias=False, hidden_act="silu", hidden_size=4096,
            intermediate_size=11008, layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
            max_position_embeddings=65536, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32,
            pad_token_id=100277, rms_norm_eps=1e-06,
            rope_scaling={
                "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                "original_max_position_embeddings": 8192, "rope_type": "yarn",
            },
            rope_theta=500000, sliding_window=4096, tie_word_embeddings=False, vocab_size=100278,
        ),
        dict(
            vocab_size=100278, emb_dim=4096, num_decoder_layers=32, num_query_heads=32, num_kv_heads=32, head_dim=128,
            mlp_dim=11008, max_position_embeddings=65536, logits_via_embedding=False,
            normalization_layer_epsilon=1e-6, rope_max_timescale=500000.0, local_rope_max_timescale=500000.0,
            rope_type="yarn", rope_factor=8.0, original_max_position_embeddings=8192,
            rope_attention_factor=1.2079441541679836, use_qk_norm=True, qk_norm_type="projection",
            use_pre_norms=False, use_post_norms=True, attention_pattern=("local", "local", "local", "full"),
            sliding_window_size=4096,
        ),
    ),
    "olmoe-1b-7b": (
        _file(
            "OlmoeForCausalLM", "olmoe", attention_bias=False, clip_qkv=None, hidden_act="silu", hidden_size=2048,
            intermediate_size=1024, max_position_embeddings=4096, norm_topk_prob=False, num_attention_heads=16,
            num_experts=64, num_experts_per_tok=8, num_hidden_layers=16, num_key_value_heads=16,
            output_router_logits=False, pad_token_id=1, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000.0,
            router_aux_loss_coef=0.01, tie_word_embeddings=False, vocab_size=50304,
        ),
        dict(
            vocab_size=50304, emb_dim=2048, num_decoder_layers=16, num_query_heads=16, num_kv_heads=16, head_dim=128,
            mlp_dim=1024, max_position_embeddings=4096, logits_via_embedding=False, use_qk_norm=True,
            qk_norm_type="projection", mlp_pattern=("moe",), num_experts=64, num_experts_per_tok=8, moe_mlp_dim=1024,
            norm_topk_prob=False,
        ),
    ),
}  # fmt: skip

# The same rotary keys as transformers 5 writes them.
NEW_ROPE: dict[str, dict[str, Any]] = {
    "llama2-7b": {"rope_theta": 10000.0, "rope_type": "default"},
    "llama3.1-8b": {**_LLAMA3_1_ROPE, "rope_theta": 500000.0},
    "qwen3-0.6b": {"rope_theta": 1000000, "rope_type": "default"},
    "qwen3-next-80b-a3b": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
    "deepseek3-671b": {**_DEEPSEEK_YARN, "rope_theta": 10000, "rope_type": "yarn"},
    "gemma3-1b": {
        "full_attention": {"rope_theta": 1000000, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 10000, "rope_type": "default"},
    },
    "olmo3-7b": {
        "full_attention": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
            "rope_type": "yarn",
        },
        "sliding_attention": {"rope_theta": 500000.0, "rope_type": "default"},
    },
}
OLD_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor")
