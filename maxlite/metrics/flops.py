"""How much arithmetic a training step is: the one count that TFLOP/s and MFU are made from.

    weights:   6 x matmul parameters x tokens
    attention: 12 x N x H x B x pairs, summed over the layers

Both hold two FLOP for each multiply-add, and the backward pass at twice the forward's. Matmul parameters are those of
q, k, v, o, the gated MLP and the output matrix; the output matrix counts the same when it is the embedding's, and the
embedding's look-up counts nothing. Tokens count padding too, since it is computed like any token. `pairs` is
`attention_pairs`. What the backward pass recomputes (remat_policy), norms, activations, the softmax and the optimizer
are not counted: the count is the model's, not the program's.
"""

import dataclasses

from maxlite.config.layers import attention_window, layer_specs
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


def train_step_flops(model: ModelConfig, rows: int, length: int) -> StepFlops:
    """Counts one training step over all devices and micro-batches.

    rows: B, rows in the step.
    length: T, tokens in a row.
    """
    heads = model.num_query_heads * model.head_dim
    doubled_pairs = sum(_doubled_pairs(length, attention_window(model, spec)) for spec in layer_specs(model))
    return StepFlops(
        weight_flops=6 * matmul_parameters(model) * rows * length,
        attention_flops=6 * heads * rows * doubled_pairs,
    )


def matmul_parameters(model: ModelConfig) -> int:
    """Counts the parameters that a token is multiplied with on its way through the model."""
    query = model.num_query_heads * model.head_dim
    key_value = model.num_kv_heads * model.head_dim
    attention = model.emb_dim * (2 * query + 2 * key_value)
    mlp = 3 * model.emb_dim * model.mlp_dim
    return model.num_decoder_layers * (attention + mlp) + model.emb_dim * model.vocab_size


def attention_pairs(length: int, window: int | None) -> float:
    """Counts the (query, key) pairs of one causal row: T^2 / 2, or T w - w^2 / 2 where a token sees w keys.

    Pairs on the border of what is seen (a token with itself; the first key past the window) count half, so that
    full attention is half of T^2 and a window as long as the row is full attention.
    """
    return _doubled_pairs(length, window) / 2


def _doubled_pairs(length: int, window: int | None) -> int:
    seen = length if window is None else min(window, length)
    return 2 * length * seen - seen * seen
