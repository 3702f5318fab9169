"""How much arithmetic a training step is: the one count that TFLOP/s and MFU are made from.

    weights:   6 x matmul parameters x tokens
    attention: 6 x N x (key width + value width) x B x pairs, summed over the layers with scores
    memory:    18 x value heads x key width x value width x tokens, summed over the gated_delta_net layers

All hold two FLOP for each multiply-add, and the backward pass at twice the forward's. Where adapters alone train, the
weights count 4 instead of 6, having no gradients of their own, and the adapters 6 beside them. Matmul parameters are
those of attention's projections (latent ones included), the gated MLP, the router, the experts that a token is sent
to, the shared expert and the output matrix; the output matrix counts the same when it is the embedding's, and the
embedding's look-up counts nothing. Tokens count padding too, since it is computed like any token. `pairs` is
`attention_pairs`. A memory is read, written to and read again, each at the cost of its size; its convolutions count as
weights. What the backward pass recomputes (remat_policy), norms, activations, the softmax and the optimizer
are not counted: the count is the model's, not the program's.
"""

import dataclasses

from maxlite.config.layers import (
    attention_chunk,
    attention_head_dim,
    attention_kv_heads,
    attention_shares_kv,
    attention_window,
    layer_specs,
)
from maxlite.config.schema import ModelConfig


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """FLOP of one training step, over all devices."""

    weight_flops: int
    attention_flops: int

    @property
    def total(self) -> int:
        """Sum of both parts."""
        return self.weight_flops + self.attention_flops


def train_step_flops(model: ModelConfig, rows: int, length: int, adapters: int = 0) -> StepFlops:
    """Counts one training step over all devices and micro-batches.

    rows: B, rows in the step.
    length: T, tokens in a row.
    adapters: parameters of adapters that a token is multiplied with; with them nothing else trains.
    """
    forward = sum(_attention_flops(model, spec.attention, length) for spec in layer_specs(model))
    return StepFlops(
        weight_flops=((4 if adapters else 6) * matmul_parameters(model) + 6 * adapters) * rows * length,
        attention_flops=3 * forward * rows,
    )


def matmul_parameters(model: ModelConfig) -> int:
    """Counts the parameters that a token is multiplied with on its way through the model."""
    dense, experts = 3 * model.emb_dim * model.mlp_dim, _expert_parameters(model)
    mlp = {"dense": dense, "moe": experts, "dense_and_moe": dense + experts}
    layers = sum(_attention_parameters(model, spec.attention) + mlp[spec.mlp] for spec in layer_specs(model))
    return layers + model.emb_dim * model.vocab_size


def _attention_parameters(model: ModelConfig, kind: str) -> int:
    if kind == "gated_delta_net":
        return _delta_net_parameters(model)
    head_dim = attention_head_dim(model, kind)
    query = model.num_query_heads * head_dim
    if kind != "mla":
        key_value = (1 if attention_shares_kv(model, kind) else 2) * attention_kv_heads(model, kind) * head_dim
        return model.emb_dim * ((2 + model.attention_output_gate) * query + key_value)
    latent, turning, fixed = model.kv_lora_rank or 0, model.qk_rope_head_dim or 0, model.qk_nope_head_dim or 0
    value = model.num_query_heads * (model.v_head_dim or 0)
    queries = model.emb_dim * query if model.q_lora_rank is None else model.q_lora_rank * (model.emb_dim + query)
    keys_values = model.emb_dim * (latent + turning) + latent * (model.num_query_heads * fixed + value)
    return queries + keys_values + value * model.emb_dim


def _delta_net_parameters(model: ModelConfig) -> int:
    heads = model.gdn_num_value_heads or 0
    keys, values = (
        (model.gdn_num_key_heads or 0) * (model.gdn_key_head_dim or 0),
        heads * (model.gdn_value_head_dim or 0),
    )
    projections = model.emb_dim * (2 * keys + 3 * values + 2 * heads)
    return projections + (model.gdn_conv_kernel_dim or 0) * (2 * keys + values)


def _expert_parameters(model: ModelConfig) -> int:
    routed = model.num_experts_per_tok * (model.moe_mlp_dim or 0)
    weights = 3 * (routed + (model.shared_expert_mlp_dim or 0)) + model.num_experts + model.shared_expert_gate
    return model.emb_dim * weights


def attention_pairs(length: int, window: int | None, chunk: int | None = None) -> float:
    """Counts the (query, key) pairs of one causal row: T^2 / 2, or T w - w^2 / 2 where a token sees w keys.

    Pairs on the border of what is seen (a token with itself; the first key past the window) count half, so that
    full attention is half of T^2 and a window as long as the row is full attention. A chunk of c positions is a row
    of its own: c^2 / 2.
    """
    return _doubled_pairs(length, window, chunk) / 2


def _attention_flops(model: ModelConfig, kind: str, length: int) -> int:
    """FLOP of the forward pass of one layer and row, beside its weights."""
    if kind == "gated_delta_net":
        heads = model.gdn_num_value_heads or 0
        return 6 * heads * (model.gdn_key_head_dim or 0) * (model.gdn_value_head_dim or 0) * length
    head_dim = attention_head_dim(model, kind)
    value_width = model.v_head_dim or head_dim
    pairs = _doubled_pairs(length, attention_window(model, kind), attention_chunk(model, kind))
    return model.num_query_heads * (head_dim + value_width) * pairs


def _doubled_pairs(length: int, window: int | None, chunk: int | None) -> int:
    if chunk is not None:
        return length // chunk * chunk**2 + (length % chunk) ** 2
    seen = length if window is None else min(window, length)
    return 2 * length * seen - seen * seen
