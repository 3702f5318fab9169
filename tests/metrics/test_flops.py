import pytest

from maxlite.config.schema import ModelConfig
from maxlite.metrics.flops import attention_pairs, matmul_parameters, train_step_flops

P49 = {
    "emb_dim": 64,
    "mlp_dim": 128,
    "num_decoder_layers": 2,
    "num_query_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}


@pytest.mark.parametrize("tied", [True, False])
def test_published_count(section, tied):
    flops = train_step_flops(section(ModelConfig, **P49, logits_via_embedding=tied), rows=2, length=32)

    assert (flops.weight_flops, flops.attention_flops) == (34_603_008, 1_572_864)
    assert flops.total == 36_175_872


def test_matmul_parameters_of_llama3_8b(section):
    # 8,030,261,248 parameters are published; the embedding's rows and 65 norms of 4096 are not multiplied.
    model = section(
        ModelConfig,
        emb_dim=4096,
        mlp_dim=14336,
        num_decoder_layers=32,
        num_query_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
    )

    assert matmul_parameters(model) == 8_030_261_248 - 128256 * 4096 - 65 * 4096


def weighed_pairs(length: int, window: int) -> float:
    """Counts pairs one by one: whole where the key is strictly inside what is seen, half on its two borders."""
    weights = {0: 0.5, window: 0.5} | {distance: 1.0 for distance in range(1, window)}
    return sum(weights.get(query - key, 0.0) for query in range(length) for key in range(length))


@pytest.mark.parametrize(("length", "window"), [(8, 1), (8, 3), (8, 7), (8, 8), (8, 20), (33, 16)])
def test_pairs_of_a_window_counted_one_by_one(length, window):
    assert attention_pairs(length, window) == weighed_pairs(length, window)


def test_pairs_of_full_attention_are_half_of_the_square():
    assert attention_pairs(8, None) == 32 == weighed_pairs(8, 8)


def test_local_layers_count_their_window(section):
    changes = P49 | {"num_decoder_layers": 3, "attention_pattern": ("local", "full"), "sliding_window_size": 8}
    flops = train_step_flops(section(ModelConfig, **changes), rows=2, length=32)

    pairs = 2 * weighed_pairs(32, 8) + weighed_pairs(32, 32)  # layers: local, full, local
    assert flops.attention_flops == 12 * 4 * 16 * 2 * pairs


def test_a_gate_is_a_matrix_more(section):
    plain, gated = (section(ModelConfig, **P49, attention_output_gate=gate) for gate in (False, True))
    assert matmul_parameters(gated) - matmul_parameters(plain) == 2 * 64 * 4 * 16


def test_memories_cost_their_size_three_times_a_token(section):
    changes = {"gdn_num_key_heads": 2, "gdn_num_value_heads": 6, "gdn_key_head_dim": 5, "gdn_value_head_dim": 7}
    changes |= {"attention_pattern": ("gated_delta_net", "full"), "gdn_conv_kernel_dim": 4}
    plain = train_step_flops(section(ModelConfig, **P49), rows=2, length=32)
    flops = train_step_flops(section(ModelConfig, **P49 | changes), rows=2, length=32)

    # Read, write, read: 5 x 7 multiply-adds each, in 6 memories; forward, and twice that backward.
    assert flops.attention_flops == plain.attention_flops // 2 + 64 * 6 * (3 * 5 * 7) * 2 * 3
    # query, key, value, gate, out, beta and step instead of one layer of the others; and what is convolved.
    instead = 64 * (2 * 10 + 3 * 42 + 2 * 6) + 4 * (2 * 10 + 42) - 64 * 2 * (4 + 2) * 16
    assert flops.weight_flops == plain.weight_flops + 6 * instead * 64


def test_full_layers_may_have_heads_of_their_own(section):
    changes = P49 | {"attention_pattern": ("local", "full"), "sliding_window_size": 8, "use_v_norm": True}
    heads = {"global_head_dim": 24, "global_num_kv_heads": 1, "share_kv_projections": True}
    plain, other = (section(ModelConfig, **changes | more) for more in ({}, heads))

    # query and out of 4 heads, and one matrix for keys and values; where there were two of 2 heads.
    difference = 64 * (2 * 4 * 24 + 24) - 64 * (2 * 4 * 16 + 2 * 2 * 16)
    assert matmul_parameters(other) - matmul_parameters(plain) == difference
    flops = train_step_flops(other, rows=2, length=32)
    assert flops.attention_flops == 12 * 4 * 2 * (16 * weighed_pairs(32, 8) + 24 * weighed_pairs(32, 32))


def test_a_dense_mlp_beside_experts_counts_both(section):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_mlp_dim": 24}
    kinds = ("dense", "moe", "dense_and_moe")
    dense, moe, both = (
        matmul_parameters(section(ModelConfig, **P49 | experts, mlp_pattern=(kind,))) - 64 * 256 for kind in kinds
    )
    attention = 2 * 64 * 2 * (4 + 2) * 16
    assert both - attention == (dense - attention) + (moe - attention)


def test_work_grows_with_rows(section):
    model = section(ModelConfig, **P49)

    assert train_step_flops(model, rows=6, length=32).total == 3 * 36_175_872
