import pytest

from maxlite.config.layers import (
    LayerSpec,
    attention_chunk,
    attention_head_dim,
    attention_kv_heads,
    attention_shares_kv,
    attention_window,
    has_experts,
    layer_groups,
    layer_places,
    layer_specs,
    rotary_dim,
)

L, F = LayerSpec("local", "dense"), LayerSpec("full", "dense")
M = LayerSpec("full", "moe")
MOE = ("num_experts=4", "num_experts_per_tok=2", "moe_mlp_dim=16")


def model_of(tiny_config, layers, pattern):
    window = "null" if "local" not in pattern else "4"
    return tiny_config(
        f"num_decoder_layers={layers}", f"attention_pattern={pattern}", f"sliding_window_size={window}"
    ).model


@pytest.mark.parametrize(
    ("layers", "pattern", "groups"),
    [
        (5, "full", [((F,), 5)]),
        (4, "full,full", [((F,), 4)]),
        (6, "local,full", [((L, F), 3)]),
        (5, "local,full", [((L, F), 2), ((L,), 1)]),
        (8, "local,local,full", [((L, L, F), 2), ((L, L), 1)]),
        (3, "local,local,full", [((L,), 2), ((F,), 1)]),
        (5, "full,full,local,local,local", [((F,), 2), ((L,), 3)]),
        (2, "local,full", [((L, F), 1)]),
    ],
)
def test_layers_fold_into_groups(tiny_config, layers, pattern, groups):
    model = model_of(tiny_config, layers, pattern)
    assert [(group.pattern, group.repeats) for group in layer_groups(model)] == groups


@pytest.mark.parametrize(("layers", "pattern"), [(7, "local,local,full"), (4, "full"), (9, "local,full")])
def test_the_place_of_a_layer_holds_its_spec(tiny_config, layers, pattern):
    model = model_of(tiny_config, layers, pattern)
    kinds = pattern.split(",")
    specs = layer_specs(model)
    assert [spec.attention for spec in specs] == [kinds[n % len(kinds)] for n in range(layers)]
    groups = layer_groups(model)
    places = layer_places(groups)
    assert [groups[place.group].pattern[place.position] for place in places] == list(specs)
    assert len(set(places)) == layers


def test_only_local_layers_have_a_window(tiny_config):
    model = model_of(tiny_config, 2, "local,full")
    assert (attention_window(model, "local"), attention_window(model, "full")) == (4, None)


def test_only_chunked_layers_have_chunks_and_nope_layers_do_not_turn(tiny_config):
    model = tiny_config("attention_pattern=chunked,nope", "chunk_attn_window_size=8", "partial_rotary_factor=0.5").model
    assert [attention_chunk(model, kind) for kind in ("chunked", "nope")] == [8, None]
    assert [rotary_dim(model, kind) for kind in ("chunked", "nope", "gated_delta_net")] == [8, 0, 0]


def test_full_layers_may_have_heads_of_their_own(tiny_config):
    pattern = ("attention_pattern=local,full", "sliding_window_size=4", "partial_rotary_factor=0.5")
    model = tiny_config(*pattern, "global_head_dim=24", "global_num_kv_heads=1", "share_kv_projections=true").model
    for kind, expected in (("local", (16, 2, False, 8)), ("full", (24, 1, True, 12))):
        found = (attention_head_dim(model, kind), attention_kv_heads(model, kind), attention_shares_kv(model, kind))
        assert (*found, rotary_dim(model, kind)) == expected
    plain = tiny_config(*pattern).model
    assert (attention_head_dim(plain, "full"), attention_kv_heads(plain, "full")) == (16, 2)
    assert not attention_shares_kv(plain, "full")
    # Of a proportional rotation the pairs that stand still are pairs too.
    assert rotary_dim(tiny_config(*pattern, "rope_type=proportional").model, "full") == 16


@pytest.mark.parametrize(("pattern", "expected"), [("dense", False), ("dense,moe", True), ("dense_and_moe", True)])
def test_kinds_with_experts(tiny_config, pattern, expected):
    sizes = MOE if expected else ()
    assert has_experts(tiny_config(f"mlp_pattern={pattern}", "use_post_norms=true", *sizes).model) == expected


@pytest.mark.parametrize(
    ("layers", "overrides", "groups"),
    [
        (5, ["mlp_pattern=moe", "num_dense_layers=2"], [((F,), 2), ((M,), 3)]),
        (6, ["mlp_pattern=dense,moe"], [((F, M), 3)]),
        (5, ["mlp_pattern=moe", "num_dense_layers=1"], [((F,), 1), ((M,), 4)]),
    ],
)
def test_experts_fold_apart_from_dense_layers(tiny_config, layers, overrides, groups):
    model = tiny_config(f"num_decoder_layers={layers}", *overrides, *MOE).model
    assert [(group.pattern, group.repeats) for group in layer_groups(model)] == groups
