import math

import pytest

from maxlite.config.load import load_config, model_names
from maxlite.config.schema import KEYS
from maxlite.config.smoke import smoke_overrides

SWITCHES = (
    "mlp_activation", "attention_pattern", "attention_bias", "use_qk_norm", "attn_logits_soft_cap", "attention_sink",
    "attention_output_gate", "partial_rotary_factor", "gdn_conv_kernel_dim",
    "norm_topk_prob", "routed_score_func", "router_group_score", "routed_bias", "use_post_norms", "norm_scale_offset",
    "mlp_pattern", "normalization_layer_epsilon", "logits_via_embedding",
    "rope_type", "rope_max_timescale", "rope_factor", "rope_low_freq_factor", "rope_high_freq_factor",
    "original_max_position_embeddings", "max_position_embeddings", "use_v_norm", "share_kv_projections",
    "use_layer_scalar", "scaled_router",
)  # fmt: skip


@pytest.mark.parametrize("name", ["default", *model_names()])
def test_smoke_keeps_the_family_and_shrinks_the_sizes(name):
    full = load_config("base.yml", [f"model={name}"], {}).model
    config = load_config("base.yml", [f"model={name}", "smoke=true"], {})
    small = config.model
    for switch in SWITCHES:
        assert getattr(small, switch) == getattr(full, switch), switch
    assert (small.num_query_heads > small.num_kv_heads) == (full.num_query_heads > full.num_kv_heads)
    assert small.emb_dim <= 64 and small.num_decoder_layers <= 8 and config.data.max_target_length <= 64
    assert config.sources["emb_dim"] == "smoke=true"
    for part in ("num_experts", "moe_mlp_dim", "global_head_dim", "global_num_kv_heads",
                 "shared_expert_mlp_dim", "kv_lora_rank", "q_lora_rank",
                 "gdn_num_key_heads", "gdn_key_head_dim", "gdn_value_head_dim"):  # fmt: skip
        assert bool(getattr(small, part)) == bool(getattr(full, part)), part
        assert (getattr(small, part) or 0) <= 64, part
    keys, values = (getattr(small, f"gdn_num_{kind}_heads") or 0 for kind in ("key", "value"))
    assert (values > keys) == ((full.gdn_num_value_heads or 0) > (full.gdn_num_key_heads or 0))
    assert (small.n_routing_groups > 1) == (full.n_routing_groups > 1)
    assert (small.num_dense_layers > 0) == (full.num_dense_layers > 0)


@pytest.mark.parametrize("name", ["default", *model_names()])
def test_smoke_sizes_divide_by_eight(name):
    model = load_config("base.yml", [f"model={name}", "smoke=true"], {}).model
    for size in ("vocab_size", "emb_dim", "mlp_dim", "num_query_heads", "num_kv_heads"):
        # Multi-query attention keeps its one head; tensor parallelism above 1 does not suit it at full size either.
        assert getattr(model, size) % 8 == 0 or (size == "num_kv_heads" and model.num_kv_heads == 1), size
    assert model.global_num_kv_heads in (None, 1, 8)
    assert model.global_head_dim is None or model.global_head_dim > model.head_dim


def test_one_kv_head_and_a_window_stay(tiny_config):
    value = tiny_config("num_kv_heads=1", "attention_pattern=local,local,full", "sliding_window_size=32",
                        "num_decoder_layers=7").flat()  # fmt: skip
    shrunk = smoke_overrides(value)
    assert (shrunk["num_kv_heads"], shrunk["num_query_heads"]) == (1, 16)
    assert shrunk["sliding_window_size"] < shrunk["max_target_length"]
    assert shrunk["num_decoder_layers"] == math.lcm(3, 1)
    assert shrunk.keys() <= KEYS.keys()


def test_what_is_given_on_the_command_line_wins_over_smoke():
    config = load_config("base.yml", ["model=llama3-8b", "smoke=true", "emb_dim=48"], {"MAXLITE_MLP_DIM": "72"})
    assert (config.model.emb_dim, config.model.mlp_dim, config.model.num_decoder_layers) == (48, 72, 2)
    assert config.sources["emb_dim"] == "command line" and config.sources["mlp_dim"] == "environment MAXLITE_MLP_DIM"
