"""`smoke=true`: the same family and code paths at sizes that train in seconds on a CPU.

Widths are multiples of 8, so that every split over up to eight devices divides them. Ratios that pick a code
path are kept: grouped or multi-query heads, tied embeddings, rotary scaling, the pattern of layers.
"""

import math
from typing import Any

KV_HEADS = 8


def smoke_overrides(value: dict[str, Any]) -> dict[str, Any]:
    """Returns the shrunk keys for a model whose full sizes are in `value` (every key present)."""
    grouped = value["num_query_heads"] > value["num_kv_heads"]
    num_kv_heads = 1 if value["num_kv_heads"] == 1 else KV_HEADS
    num_query_heads = 2 * KV_HEADS if grouped else num_kv_heads
    pattern = math.lcm(len(value["attention_pattern"]), len(value["mlp_pattern"]))
    shrunk = {
        "vocab_size": 320,
        "emb_dim": 64,
        "num_decoder_layers": max(2, pattern),
        "num_query_heads": num_query_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": 8,
        "mlp_dim": 128,
        "max_target_length": 64,
        "per_device_batch_size": 1.0,
        "eval_steps": 2,
    }
    if value["sliding_window_size"] is not None:
        shrunk["sliding_window_size"] = 16
    return shrunk
