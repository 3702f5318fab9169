from maxlite.config.inert import inert_keys
from maxlite.config.load import load_config


def test_keys_that_cannot_act_are_named_with_the_reason():
    config = load_config("base.yml", ["opt_type=sgd", "adam_b1=0.5", "eval_interval=0"], {"MAXLITE_EVAL_STEPS": "3"})
    assert inert_keys(config) == [
        "No effect, because opt_type is not adamw: adam_b1",
        "No effect, because eval_interval is 0: eval_steps",
    ]


def test_keys_of_softmax_attention_where_no_layer_has_it():
    sizes = ["gdn_conv_kernel_dim=4", "gdn_key_head_dim=8", "gdn_value_head_dim=8", "gdn_num_key_heads=2"]
    given = [*sizes, "gdn_num_value_heads=2", "attention_sink=true", "attention_output_gate=true"]
    alone = load_config("base.yml", [*given, "attention_pattern=gated_delta_net"], {})
    assert inert_keys(alone) == [
        "No effect, because all layers are gated_delta_net: attention_sink, attention_output_gate"
    ]
    assert inert_keys(load_config("base.yml", [*given, "attention_pattern=gated_delta_net,full"], {})) == []


def test_what_acts_and_what_only_stands_in_base_yml_is_not_named():
    assert inert_keys(load_config("base.yml", ["opt_type=sgd", "enable_checkpointing=false"], {})) == []
    assert inert_keys(load_config("base.yml", ["adam_b1=0.5", "profiler=xplane", "profiler_steps=2"], {})) == []


def test_keys_of_quantization():
    given = [
        "remat_policy=minimal_with_quantization",
        "kv_quant_dtype=int4",
        "lora_alpha=3",
        "weight_quant_tile_size=8",
    ]
    lines = inert_keys(load_config("base.yml", given, {}))
    assert [line.rpartition(": ")[2] for line in lines] == [
        "remat_policy", "weight_quant_tile_size", "kv_quant_dtype", "lora_alpha"
    ]  # fmt: skip
    acting = ["quantization=int8", "quantize_kvcache=true", "lora_rank=2"]
    assert inert_keys(load_config("base.yml", [*given[:3], *acting], {})) == []
