"""`smoke=true`: the same family and code paths at sizes that train in seconds on a CPU.

Widths are multiples of 8, so that every split over up to eight devices divides them. Ratios that pick a code
path are kept: grouped or multi-query heads, tied embeddings, rotary scaling, the pattern of layers, latent
attention, experts with their router and groups.
"""

import math
from typing import Any

KV_HEADS = 8
SIZES_IF_SET = {
    "sliding_window_size": 16,
    "chunk_attn_window_size": 16,
    "global_head_dim": 16,
    "moe_mlp_dim": 32,
    "shared_expert_mlp_dim": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "gdn_num_key_heads": KV_HEADS,
    "gdn_key_head_dim": 8,
    "gdn_value_head_dim": 16,
}


def smoke_overrides(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the shrunk keys for a model whose full sizes are in `value` (every key present)."""
    latent = "mla" in value["attention_pattern"]
    grouped = value["num_query_heads"] > value["num_kv_heads"]
    num_kv_heads = _kv_heads(value["num_kv_heads"])
    num_query_heads = 2 * KV_HEADS if grouped else num_kv_heads
    pattern = math.lcm(len(value["attention_pattern"]), len(value["mlp_pattern"]))
    num_dense_layers = min(value["num_dense_layers"], 1)
    shrunk = {
        "vocab_size": 320,
        "emb_dim": 64,
        "num_dense_layers": num_dense_layers,
        "num_decoder_layers": max(2, pattern) + num_dense_layers,
        "num_query_heads": num_query_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": 24 if latent else 8,
        "mlp_dim": 128,
        "max_target_length": 64,
        "per_device_batch_size": 1.0,
        "eval_steps": 2,
    }
    sizes = dict(SIZES_IF_SET)
    if value["num_experts"]:
        num_groups = min(value["n_routing_groups"], 4)
        sizes |= {
            "num_experts": 8,
            "num_experts_per_tok": min(value["num_experts_per_tok"], 2),
            "n_routing_groups": num_groups,
            "topk_routing_group": min(value["topk_routing_group"], max(1, num_groups // 2)),
        }
    if value["temperature_tuning"]:
        sizes["temperature_tuning_floor"] = 16
    if value["gdn_num_value_heads"]:
        grouped = value["gdn_num_value_heads"] > value["gdn_num_key_heads"]
        sizes["gdn_num_value_heads"] = 2 * KV_HEADS if grouped else KV_HEADS
    if value["global_num_kv_heads"]:
        sizes["global_num_kv_heads"] = _kv_heads(value["global_num_kv_heads"])
    return shrunk | {name: size for name, size in sizes.items() if value[name]}


def _kv_heads(number: int) -> int:
    return 1 if number == 1 else KV_HEADS
