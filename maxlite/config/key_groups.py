"""Keys of the architecture that belong together: those that one part of a model, and nothing else, reads."""

FULL_LAYERS = ("global_num_kv_heads", "global_head_dim", "share_kv_projections")
MLA_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
GDN_SIZES = (
    "gdn_conv_kernel_dim",
    "gdn_num_key_heads",
    "gdn_num_value_heads",
    "gdn_key_head_dim",
    "gdn_value_head_dim",
)
TEMPERATURE = ("temperature_tuning_floor", "temperature_tuning_scale")
SWIGLUOAI = ("mlp_activations_limit", "glu_alpha")
EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_mlp_dim")
# How tokens find experts, and what serves them besides.
ROUTER = (
    "routed_score_func",
    "norm_topk_prob",
    "routed_scaling_factor",
    "routed_bias",
    "router_bias",
    "scaled_router",
    "n_routing_groups",
    "topk_routing_group",
    "scale_expert_input",
    "shared_expert_mlp_dim",
    "shared_expert_gate",
)
LLAMA3_ROPE = ("rope_low_freq_factor", "rope_high_freq_factor")
YARN = ("beta_fast", "beta_slow", "mscale", "rope_mscale_all_dim", "rope_truncate", "rope_attention_factor")
# rope_type -> the keys that it uses.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("rope_factor",),
    "llama3": ("rope_factor", *LLAMA3_ROPE, "original_max_position_embeddings"),
    "proportional": ("rope_factor",),
    "yarn": ("rope_factor", "original_max_position_embeddings", *YARN),
}
