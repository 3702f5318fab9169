"""Which products the rules match, by their paths, and what a model says about them."""

import jax
import jax.numpy as jnp
import pytest

from maxlite.config.load import load_config
from maxlite.errors import ConfigError
from maxlite.model.build import build_model
from maxlite.model.equip import describe_equipment

DENSE = [
    f"group_0/block_0/{name}"
    for name in (
        "attention/key",
        "attention/out",
        "attention/query",
        "attention/value",
        "mlp/down",
        "mlp/gate",
        "mlp/up",
    )
]
MOE = ("mlp_pattern=moe", "num_experts=4", "moe_mlp_dim=24", "num_experts_per_tok=2")
ROW = "{{module_path: '{}', weight_qtype: int8, act_qtype: int8, bwd_qtype: int8}}"


def model_of(tiny_config, *overrides):
    config = tiny_config(*overrides)
    return build_model(config.model, config.compute)


def rules(*rows):
    return f"quant_rules=[{', '.join(rows)}]"


def test_products_are_those_of_the_layers(tiny_config):
    model = model_of(tiny_config)
    assert [product.path for product in model.products] == DENSE
    found = {product.path: product for product in model.products}
    query = found["group_0/block_0/attention/query"]
    assert (query.equation, query.repeats, query.is_experts, query.summed_dims) == ("BTD,DNH->BTNH", 2, False, (0,))
    for product in model.products:
        node = model.abstract_params
        for step in product.params_path.split("/"):
            node = node[step]
        assert node["kernel"].shape == (product.repeats, *product.shape)
        assert not any((product.equipment.rule, product.equipment.stored, product.equipment.adapter))
    assert describe_equipment(model.products) == []


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "deepseek3-671b", "gemma4-26b-a4b"])
def test_routers_gates_of_one_number_and_what_is_outside_of_layers_are_none(name):
    config = load_config("base.yml", [f"model={name}", "smoke=true", "quantization=int8"], {})
    products = build_model(config.model, config.compute).products
    assert all(product.equipment.rule is not None for product in products)
    last = {product.path.rpartition("/")[2] for product in products}
    known = {"query", "key", "value", "out", "gate", "up", "down"}
    assert last <= known | {"query_a", "query_b", "key_value_a", "key_value_b"}
    assert any(product.is_experts and product.path.endswith("experts/gate") for product in products)


def test_the_first_row_that_matches_decides_and_a_row_without_types_leaves_as_it_is(tiny_config):
    rows = rules("{module_path: '.*/out'}", ROW.format(".*/attention/.*"))
    model = model_of(tiny_config, "quantization=fp8", rows)
    found = {product.path: product.equipment.rule for product in model.products}
    assert found["group_0/block_0/attention/out"] is None
    assert found["group_0/block_0/attention/query"].weight_qtype == "int8"
    assert found["group_0/block_0/mlp/up"].bwd_qtype == "fp8_e5m2"
    assert describe_equipment(model.products) == [
        "Quantized: fp8 kernels, fp8 activations, fp8_e5m2 gradients, forward and backward: "
        "group_0/block_0/mlp/{down,gate,up} x 2 layers",
        "Quantized: int8 products, forward and backward: group_0/block_0/attention/{key,query,value} x 2 layers",
        "Not quantized: group_0/block_0/attention/out x 2 layers",
        "As they are: embedding, output matrix, norms, biases, routers, convolutions, gates of one number",
    ]


def test_paths_that_lead_to_the_same_stand_together(tiny_config):
    model = model_of(tiny_config, *MOE, "attention_pattern=[local,full]", "sliding_window_size=8", "quantization=int8")
    assert describe_equipment(model.products)[0] == (
        "Quantized: int8 products, forward and backward: group_0/{block_0,block_1}/{attention/{key,out,query,value}, "
        "mlp/experts/{down,gate,up}} x 1 layers"
    )


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            (rules(ROW.format("mlp/up")),),
            "row 0 of quant_rules, 'mlp/up', matches no product; it must match a whole path",
        ),
        ((rules(ROW.format(".*"), ROW.format(".*/up")),), "row 1 of quant_rules, '.*/up', decides about no product"),
        (("lora_rank=2", "lora_module_path=.*/nothing"), "lora_module_path='.*/nothing' matches no product"),
        (
            ("weight_quantization=int8", "weight_quant_module_path=up"),
            "weight_quant_module_path='up' matches no product",
        ),
        (
            (*MOE, "quant_rules=[{module_path: '.*', weight_qtype: int8}]"),
            "matches the experts group_0/block_0/mlp/experts/down",
        ),
        (
            ("quant_rules=[{module_path: '.*', weight_qtype: int8, act_qtype: int8, tile_size: 7}]",),
            "tile_size 7 of '.*' does not divide",
        ),
    ],
)
def test_a_rule_that_does_nothing_or_can_not_be_followed_is_refused(overrides, said, tiny_config):
    with pytest.raises(ConfigError) as caught:
        model_of(tiny_config, *overrides)
    assert said in str(caught.value)
    if "matches no product" in said:
        assert all(path in str(caught.value) for path in DENSE)


def test_with_adapters_only_they_train(tiny_config):
    plain, adapted = model_of(tiny_config), model_of(tiny_config, "lora_rank=2", "lora_module_path=.*/query")
    assert all(jax.tree.leaves(plain.trainable))
    trained = jax.tree_util.tree_leaves_with_path(adapted.trainable)
    paths = [jax.tree_util.keystr(path) for path, trains in trained if trains]
    assert len(paths) == 2 and all("query" in path and "lora_" in path for path in paths)


def test_a_stored_kernel_counts_as_its_weights(tiny_config):
    plain = model_of(tiny_config, *MOE)
    for name in ("int8", "int4"):
        stored = model_of(tiny_config, *MOE, f"weight_quantization={name}")
        assert stored.num_parameters == plain.num_parameters
        assert stored.num_active_parameters == plain.num_active_parameters
        assert len(jax.tree.leaves(stored.abstract_params)) == len(jax.tree.leaves(plain.abstract_params)) + 7


def test_shapes_are_those_of_the_values_whatever_is_asked_for(tiny_config):
    model = model_of(tiny_config, *MOE, "weight_quantization=int4", "lora_rank=2", "lora_module_path=.*")
    made = jax.eval_shape(model.init, jax.random.key(0))
    assert jax.tree.map(lambda leaf: (leaf.shape, jnp.dtype(leaf.dtype)), made) == jax.tree.map(
        lambda leaf: (leaf.shape, jnp.dtype(leaf.dtype)), model.abstract_params
    )
