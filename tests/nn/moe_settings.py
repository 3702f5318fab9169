"""Settings of families of layers with experts, in small, and what builds a layer of them."""

from maxlite.nn.moe import MoE
from tests.nn.layers import filled

BATCH, LENGTH, DIM, HIDDEN, EXPERTS = 2, 9, 16, 12, 8
SIZES = (
    "mlp_pattern=moe", f"emb_dim={DIM}", f"num_experts={EXPERTS}", f"moe_mlp_dim={HIDDEN}", "num_experts_per_tok=2",
)  # fmt: skip
GPT_OSS = (
    "mlp_activation=swigluoai", "mlp_bias=true", "router_bias=true", "mlp_activations_limit=0.7", "glu_alpha=1.702",
    "num_experts_per_tok=3",
)  # fmt: skip
DEEPSEEK3 = (
    "routed_score_func=sigmoid", "routed_bias=true", "routed_scaling_factor=2.5", "n_routing_groups=4",
    "topk_routing_group=2", "router_group_score=top2_sum", "shared_expert_mlp_dim=10", "num_experts_per_tok=3",
)  # fmt: skip
LLAMA4 = (
    "routed_score_func=sigmoid", "norm_topk_prob=false", "scale_expert_input=true", "shared_expert_mlp_dim=12",
    "num_experts_per_tok=1",
)  # fmt: skip
QWEN2 = ("norm_topk_prob=false", "shared_expert_mlp_dim=20", "shared_expert_gate=true")
GEMMA4 = ("scaled_router=true", "mlp_activation=gelu_tanh", "num_experts_per_tok=3", "normalization_layer_epsilon=0.1")


def build(tiny_config, *overrides, dtype="float32", kind=MoE):
    keys = dict(text.split("=") for text in (*SIZES, *overrides, f"dtype={dtype}"))
    config = tiny_config(*(f"{key}={value}" for key, value in keys.items()))
    return filled(kind(config.model, config.compute, rngs=None)), config.model
