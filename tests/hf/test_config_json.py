import copy
import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from maxlite.config.load import load_config, model_names
from maxlite.config.schema import ModelConfig
from maxlite.errors import ConversionError
from maxlite.hf.config_json import family_for, inexpressible_keys, read_config, write_config
from maxlite.hf.families import BY_MODEL_TYPE, FAMILIES
from maxlite.hf.family_canonical import canonical, default_config
from maxlite.hf.quantization_json import quantization_method
from tests.hf.published import NEW_ROPE, OLD_ROPE_KEYS, PUBLISHED

GOLDENS = sorted((Path(__file__).parents[1] / "golden" / "hf").glob("*.json"))
PLAIN = default_config().model
LLAMA = PUBLISHED["llama2-7b"][0]


def read(given: dict[str, Any]) -> ModelConfig:
    return ModelConfig(**read_config(given, "config.json")[1])


def differing(model: ModelConfig, other: ModelConfig = PLAIN) -> dict[str, Any]:
    pairs = ((field.name, getattr(model, field.name)) for field in dataclasses.fields(model))
    return {name: value for name, value in pairs if value != getattr(other, name)}


def refusal(given: dict[str, Any]) -> str:
    with pytest.raises(ConversionError) as raised:
        read_config(given, "config.json")
    return str(raised.value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_mean_these_keys(name):
    given, expected = PUBLISHED[name]
    before = copy.deepcopy(given)
    assert differing(read(given)) == {key: value for key, value in expected.items() if value != getattr(PLAIN, key)}
    assert given == before


@pytest.mark.parametrize("name", sorted(PUBLISHED.keys() & set(model_names())))
def test_model_yamls_are_the_published_models(name):
    ours = canonical(load_config("base.yml", [f"model={name}"], {}).model)
    published = read(PUBLISHED[name][0])
    # A multimodal folder pads the vocabulary; no layer of a model all of experts has mlp_dim.
    differences = differing(ours, published)
    if name == "olmo3-7b":
        # The file says the factor that the formula gives.
        assert differences.pop("rope_attention_factor") is None
        assert published.rope_attention_factor == pytest.approx(0.1 * math.log(8) + 1, abs=1e-12)
    assert differences.keys() <= {"vocab_size", "mlp_dim"}, differences
    if "vocab_size" in differences:
        assert (name, published.vocab_size - ours.vocab_size) == ("gemma3-12b", 64)
    if "mlp_dim" in differences:
        assert set(published.mlp_pattern) == {"moe"} and published.num_dense_layers == 0


@pytest.mark.parametrize("name", NEW_ROPE)
def test_both_spellings_of_rotary_positions_are_one(name):
    old = PUBLISHED[name][0]
    new = {key: value for key, value in old.items() if key not in OLD_ROPE_KEYS}
    new["rope_parameters"] = NEW_ROPE[name]
    assert read(new) == read(old)
    assert read({**old, "rope_parameters": NEW_ROPE[name]}) == read(old)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_written_reads_back(name):
    model = read(PUBLISHED[name][0])
    family = family_for(model)
    written = write_config(family, model, "bfloat16", {"eos_token_id": [2, 7]})
    assert json.loads(json.dumps(written)) == written
    assert written["architectures"] == [family.architecture] and written["dtype"] == "bfloat16"
    assert (written["bos_token_id"], written["eos_token_id"]) == (None, [2, 7])
    assert not written.keys() & {*OLD_ROPE_KEYS, "torch_dtype"}
    found, keys = read_config(written, "config.json")
    assert found.model_type == family.model_type and ModelConfig(**keys) == model


@pytest.mark.parametrize("file", GOLDENS, ids=lambda file: file.stem)
def test_files_of_transformers_in_both_spellings(file):
    golden = json.loads(file.read_text())
    new, old = golden["config"], golden["old_config"]
    family, keys = read_config(new, "config.json")
    model = ModelConfig(**keys)
    assert read(old) == model == canonical(model)
    assert family.model_type == new["model_type"]
    written = write_config(family, model, "float32", {})
    assert read(written) == model
    assert written["rope_parameters"].keys() == new["rope_parameters"].keys() | (
        {"beta_fast", "beta_slow"} if new["rope_parameters"].get("rope_type") == "yarn" else set()
    )
    assert not inexpressible_keys(family_for(model), model)


def test_goldens_are_there():
    assert len(GOLDENS) >= 39


def test_linear_layers_by_interval_and_by_list_and_rotary_share_by_default():
    given = {**PUBLISHED["qwen3-next-80b-a3b"][0], "num_hidden_layers": 6}
    del given["partial_rotary_factor"]
    assert read(given).partial_rotary_factor == 0.25
    assert read({**given, "full_attention_interval": 2}).attention_pattern == ("gated_delta_net", "full")
    listed = {**given, "layer_types": ["full_attention"] * 2 + ["linear_attention"] * 4}
    assert read(listed).attention_pattern == ("full",) * 2 + ("gated_delta_net",) * 4
    full = read({**given, "layer_types": ["full_attention"] * 6})
    assert full.attention_pattern == ("full",) and full.gdn_num_key_heads is None
    written = write_config(BY_MODEL_TYPE["qwen3_next"], full, "float32")
    assert (written["linear_num_key_heads"], written["linear_conv_kernel_dim"]) == (16, 4)
    assert written["rope_parameters"]["partial_rotary_factor"] == 0.25


def test_window_that_is_switched_off_is_off():
    given = {**PUBLISHED["qwen2.5-7b"][0], "sliding_window": 8, "max_window_layers": 4, "num_hidden_layers": 6}
    assert read(given).attention_pattern == ("full",) and read(given).sliding_window_size is None
    on = read({**given, "use_sliding_window": True})
    assert on.attention_pattern == ("full",) * 4 + ("local",) * 2 and on.sliding_window_size == 8


def test_layer_lists_become_the_shortest_pattern():
    given = {**PUBLISHED["gpt-oss-20b"][0], "num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 6}
    assert read(given).attention_pattern == ("local",)
    given["layer_types"] = ["full_attention", "sliding_attention", "sliding_attention"] * 2
    assert read(given).attention_pattern == ("full", "local", "local")
    given["layer_types"] = ["full_attention"] * 6
    full = read(given)
    assert full.attention_pattern == ("full",) and full.sliding_window_size is None
    # transformers builds the window's mask all the same.
    assert write_config(BY_MODEL_TYPE["gpt_oss"], full, "float32")["sliding_window"] == full.max_position_embeddings


@pytest.mark.parametrize(
    ("keys", "dense", "pattern"),
    [
        ({}, 0, ("moe",)),
        ({"decoder_sparse_step": 2}, 0, ("dense", "moe")),
        ({"mlp_only_layers": [0]}, 1, ("moe",)),
        ({"mlp_only_layers": [0, 1, 2]}, 3, ("moe",)),
        ({"mlp_only_layers": [5]}, 0, ("moe",) * 5 + ("dense",)),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, 3, ("dense", "moe")),
        ({"num_experts": 0}, 0, ("dense",)),
    ],
)
def test_layers_with_experts(keys, dense, pattern):
    given = {**PUBLISHED["qwen1.5-moe-a2.7b"][0], "num_hidden_layers": 6, **keys}
    model = read(given)
    assert (model.num_dense_layers, model.mlp_pattern) == (dense, pattern)
    assert (model.moe_mlp_dim is None) == (pattern == ("dense",))
    family = BY_MODEL_TYPE["qwen2_moe"]
    assert read(write_config(family, model, "float32")) == model


def test_gemma_gelu_means_its_tanh_form():
    given = dict(PUBLISHED["gemma-2b"][0])
    assert read(given).mlp_activation == "gelu_tanh"
    assert "hidden_activation='relu'" in refusal({**given, "hidden_activation": "relu"})
    exact = dataclasses.replace(read(given), mlp_activation="gelu")
    assert write_config(BY_MODEL_TYPE["gemma"], exact, "float32")["hidden_act"] == "gelu_python"


def test_tied_flag_outside_and_inside_must_agree():
    given = copy.deepcopy(PUBLISHED["llama4-17b-16e-instruct"][0])
    given["text_config"]["tie_word_embeddings"] = True
    assert "tie_word_embeddings=False, but in text_config it is True" in refusal(given)


def test_layers_of_multi_token_prediction_are_left_out():
    family, _ = read_config(PUBLISHED["deepseek3-671b"][0], "config.json")

    def reason(tensor: str) -> list[str]:
        return [ignored.reason for ignored in family.table.ignored if ignored.matches(tensor)]

    assert "multi-token" in reason("model.layers.61.eh_proj.weight")[0]
    assert not reason("model.layers.60.self_attn.o_proj.weight") and not reason("model.layers.62.eh_proj.weight")
    without, _ = read_config({**PUBLISHED["deepseek3-671b"][0], "num_nextn_predict_layers": 0}, "config.json")
    assert without.table == BY_MODEL_TYPE["deepseek_v3"].table
    assert write_config(without, read(PUBLISHED["deepseek3-671b"][0]), "float32")["num_nextn_predict_layers"] == 0


def test_kimi_is_written_under_the_name_that_transformers_knows():
    family, keys = read_config(PUBLISHED["kimi-k2-1t"][0], "config.json")
    written = write_config(family, ModelConfig(**keys), "bfloat16")
    assert (written["model_type"], written["architectures"]) == ("deepseek_v3", ["DeepseekV3ForCausalLM"])


def test_mistral_with_a_list_of_kinds_is_a_ministral():
    given = {**PUBLISHED["mistral-7b-v0.1"][0], "layer_types": ["full_attention", "sliding_attention"] * 16}
    family, keys = read_config(given, "config.json")
    assert (family.model_type, keys["attention_pattern"]) == ("ministral", ("full", "local"))


def test_quantization_methods():
    assert quantization_method(PUBLISHED["deepseek3-671b"][0]) == "fp8"
    assert quantization_method(PUBLISHED["gpt-oss-20b"][0]) == "mxfp4"
    assert quantization_method(LLAMA) is None


def test_the_default_model_is_a_llama():
    assert family_for(PLAIN).model_type == "llama"


def test_a_width_that_llama_refuses_is_written_as_another_family():
    odd = dataclasses.replace(PLAIN, emb_dim=100)
    assert "not a multiple of num_query_heads=8" in inexpressible_keys(BY_MODEL_TYPE["llama"], odd)[0]
    assert family_for(odd).model_type == "mistral"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_sink": True}, "attention_sink=true (it would be false)"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"use_post_norms": True}, "use_post_norms=true"),
        ({"attention_pattern": ("nope",)}, "attention_pattern=[nope]"),
        ({"scale_embeddings": True}, "scale_embeddings=true"),
        ({"query_pre_attn_scalar": 7.0}, "query_pre_attn_scalar=7.0"),
    ],
)
def test_what_no_family_can_express_is_named(changes, named):
    with pytest.raises(ConversionError, match=re.escape(named)):
        family_for(dataclasses.replace(PLAIN, **changes))


def test_keys_without_effect_do_not_stand_in_the_way():
    idle = dataclasses.replace(
        PLAIN,
        query_pre_attn_scalar=float(PLAIN.head_dim),
        qk_norm_type="l2",
        attention_pattern=("full", "full"),
        beta_fast=7.0,
        glu_alpha=2.0,
        routed_scaling_factor=3.0,
    )
    assert canonical(idle) == PLAIN
    assert family_for(idle).model_type == "llama"


def test_a_family_refuses_to_write_what_it_would_lose():
    with pytest.raises(ConversionError, match="model_type llama .* attention_sink=true"):
        write_config(BY_MODEL_TYPE["llama"], dataclasses.replace(PLAIN, attention_sink=True), "float32")


BAD = {
    "unknown key": ({"foo_scale": 2}, ["foo_scale=2", "model_type llama"]),
    "activation": ({"hidden_act": "xielu"}, ["hidden_act='xielu'", "silu, swish, gelu"]),
    "dropout": ({"attention_dropout": 0.1}, ["attention_dropout=0.1", "may be 0 or null"]),
    "missing rope type": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["'dynamic'", "linear, llama3"]),
    "longrope": ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_parameters", "'longrope'"]),
    "missing factor": ({"rope_scaling": {"type": "linear"}}, ["rope_scaling: factor is missing"]),
    "left-over rope key": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 8.0}},
        ["rope_type=default has no use for factor"],
    ),
    "rope disagrees": (
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        ["rope_max_timescale is 10000.0 and 500000.0"],
    ),
    "rope types disagree": (
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
        ["rope_type='yarn' and type='linear' differ"],
    ),
    "rope theta text": ({"rope_theta": "10000"}, ["'10000'", "a number"]),
    "partial rope": ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5", "must be 1"]),
    "nested rope": ({"rope_parameters": {"full_attention": {}}}, ["has no use for full_attention"]),
    "size is text": ({"hidden_size": "4096"}, ["hidden_size='4096'", "a whole number"]),
    "size is zero": ({"num_hidden_layers": 0}, ["num_hidden_layers=0", "at least 1"]),
    "size is null": ({"vocab_size": None}, ["vocab_size=None", "null is not allowed"]),
    "flag is a number": ({"attention_bias": 1}, ["attention_bias=1", "true or false"]),
    "heads": ({"num_key_value_heads": 5}, ["num_kv_heads=5", "not a multiple"]),
    "encoder": ({"is_encoder_decoder": True}, ["is_encoder_decoder=True"]),
    "architecture": ({"architectures": ["LlamaForSequenceClassification"]}, ["may be LlamaForCausalLM"]),
    "architecture of another": ({"architectures": ["MistralForCausalLM"]}, ["architectures=['MistralForCausalLM']"]),
    "quantization": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        ["'gptq'", "fp8, mxfp4 or compressed-tensors"],
    ),
    "mxfp4 elsewhere": ({"quantization_config": {"quant_method": "mxfp4"}}, ["gpt_oss only"]),
    "fp8 blocks": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 0]}},
        ["weight_block_size=[64, 0]", "[128, 128]"],
    ),
    "fp8 other key": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "kv_cache": "int8"}},
        ["quantization_config.kv_cache='int8'"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_llama_keys_are_named(name):
    changes, parts = BAD[name]
    message = refusal({**LLAMA, **changes})
    assert message.startswith("config.json: ") and all(part in message for part in parts), message
    assert len(message.splitlines()) == 1, message


BAD_ELSEWHERE = {
    "window off, layers on": (
        "qwen3-0.6b",
        {"layer_types": ["full_attention"] * 27 + ["sliding_attention"]},
        "the window is null or switched off",
    ),
    "window": ("mistral-7b-v0.1", {"sliding_window": 0}, "sliding_window=0"),
    "too few layer types": ("gpt-oss-20b", {"layer_types": ["full_attention"]}, "a list of num_hidden_layers=24"),
    "other layer type": ("gpt-oss-20b", {"layer_types": ["linear_attention"] * 24}, "names 'linear_attention'"),
    "switch": ("qwen2.5-7b", {"use_sliding_window": "no"}, "use_sliding_window='no': it must be true or false"),
    "qwen2 bias": ("qwen2.5-7b", {"attention_bias": False}, "attention_bias=False"),
    "mrope": ("qwen2.5-7b", {"use_mrope": True}, "use_mrope=True"),
    "clip": ("olmoe-1b-7b", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    "olmoe heads": ("olmoe-1b-7b", {"head_dim": 64}, "head_dim=64 is not supported"),
    "bidirectional": ("gemma3-1b", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    "fractional scalar": ("gemma2-27b", {"query_pre_attn_scalar": 144.5}, "query_pre_attn_scalar=144.5"),
    "scaled sliding rope": (
        "gemma3-1b",
        {
            "rope_scaling": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            },
        },
        "rope_parameters.sliding_attention is scaled",
    ),
    "flat rope": ("gemma3-1b", {"rope_parameters": {"rope_type": "default"}}, "holds the objects full_attention and"),
    "scoring": ("deepseek3-671b", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    "method": ("deepseek3-671b", {"topk_method": "greedy"}, "topk_method='greedy'"),
    "v2 method": ("deepseek2-236b", {"topk_method": "noaux_tc"}, "may be greedy or group_limited_greedy"),
    "v2 norm": ("deepseek2-236b", {"norm_topk_prob": True}, "norm_topk_prob=True"),
    "many guesses": ("deepseek3-671b", {"num_nextn_predict_layers": 10**12}, "a whole number from 0 to 61"),
    "frequency": ("deepseek3-671b", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
    "no shared expert": ("deepseek3-671b", {"n_shared_experts": 0}, "n_shared_experts=0"),
    "groups": ("deepseek3-671b", {"n_group": 7}, "n_routing_groups=7"),
    "kept groups": ("deepseek3-671b", {"topk_group": 9}, "topk_routing_group=9"),
    "jitter": ("mixtral-8x7b", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    "two names": ("mixtral-8x7b", {"num_experts": 16}, "num_local_experts=8 and num_experts=16 mean the same key"),
    "chosen": ("gpt-oss-20b", {"experts_per_token": 2}, "num_experts_per_tok=4 and experts_per_token=2"),
    "sparse layers": ("qwen3-coder-480b-a35b", {"mlp_only_layers": [62]}, "numbers of layers, from 0 to 61"),
    "shared expert": ("qwen3-coder-480b-a35b", {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate"),
    "convolutions": ("qwen3-next-80b-a3b", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    "interval": ("qwen3-next-80b-a3b", {"full_attention_interval": 0}, "full_attention_interval=0"),
    "linear heads": ("qwen3-next-80b-a3b", {"linear_num_value_heads": 24}, "gdn_num_value_heads=24"),
    "linear layers": ("qwen3-next-80b-a3b", {"layer_types": ["local"] * 48}, "full_attention or linear_attention"),
    "two shares": (
        "qwen3-next-80b-a3b",
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.25, but in rope_parameters it is 0.5",
    ),
    "no share": ("qwen3-next-80b-a3b", {"partial_rotary_factor": 0}, "partial_rotary_factor=0"),
    "outer key": ("gemma3-12b", {"audio_config": {}}, "audio_config"),
    "no text": ("gemma3-12b", {"text_config": None}, "needs an object text_config"),
    "inner type": ("gemma3-12b", {"text_config": {"model_type": "gemma2"}}, "text_config.model_type='gemma2'"),
    "per-layer embeddings": ("gemma4-31b", {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input=256"),
    "shared layers": ("gemma4-31b", {"num_kv_shared_layers": 20}, "num_kv_shared_layers=20"),
    "wide layers": ("gemma4-31b", {"use_double_wide_mlp": True}, "use_double_wide_mlp=True"),
    "unified experts": ("gemma4-12b", {"enable_moe_block": True}, "enable_moe_block=True"),
    "all see all": ("gemma4-12b", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
    "old rope": ("gemma4-31b", {"rope_theta": 1e6}, "the key rope_theta=1000000.0 is not known"),
    "experts without a width": ("gemma4-26b-a4b", {"moe_intermediate_size": None}, "moe_intermediate_size=None"),
    "no width of full layers": ("gemma4-31b", {"global_head_dim": None}, "head_dim=None of full_attention layers"),
    "layer for itself": ("gemma4-31b", {"per_layer_config": {"5": {"head_dim": 512}}}, "the same of all of them"),
    "local override": (
        "gemma4-31b",
        {"per_layer_config": {str(n): {"head_dim": 512} for n in range(60)}},
        "of the full_attention layers",
    ),
    "other override": (
        "gemma4-31b",
        {"per_layer_config": {str(n): {"intermediate_size": 512} for n in range(5, 60, 6)}},
        "it may say head_dim and num_key_value_heads",
    ),
    "no period": ("gemma3-1b", {"sliding_window_pattern": 0}, "sliding_window_pattern=0: it must be a whole number of"),
    "no step": ("qwen3-coder-480b-a35b", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
    "truncate": (
        "olmo3-7b",
        {"rope_scaling": {**PUBLISHED["olmo3-7b"][0]["rope_scaling"], "truncate": False}},
        "truncate=false",
    ),
}


@pytest.mark.parametrize("name", BAD_ELSEWHERE)
def test_bad_keys_of_families_are_named(name):
    model, changes, part = BAD_ELSEWHERE[name]
    given = PUBLISHED[model][0]
    inner = changes.keys().isdisjoint(given) and "text_config" in given and "audio_config" not in changes
    changed = {**given, "text_config": {**given["text_config"], **changes}} if inner else {**given, **changes}
    message = refusal(changed)
    assert part in message, message


def test_both_spellings_of_full_layers_are_one():
    given = PUBLISHED["gemma4-31b"][0]["text_config"]
    first = ("global_head_dim", "num_global_key_value_heads")
    rest = {name: value for name, value in given.items() if name not in first}
    override = {"head_dim": 512, "num_key_value_heads": 4}
    # transformers fills the numbers up with zeros to one length.
    new = {**rest, "per_layer_config": {f"{layer:02}": override for layer in range(5, 60, 6)}}
    assert read(new) == read(given)
    assert read({**given, "per_layer_config": {}}).global_head_dim is None
    assert read(rest).global_head_dim == 512 and read(rest).global_num_kv_heads is None
    # Without shared projections the number of heads is that of all layers.
    assert read({**given, "attention_k_eq_v": False}).global_num_kv_heads is None
    assert read({**new, "attention_k_eq_v": False}).global_num_kv_heads == 4


def test_the_last_layer_of_gemma4_sees_everything():
    given = {**PUBLISHED["gemma4-12b"][0]["text_config"], "num_hidden_layers": 4, "layer_types": None}
    assert read(given).attention_pattern == ("local", "local", "local", "full")
    local = dataclasses.replace(read(given), attention_pattern=("full", "local"))
    assert "attention_pattern=[full, local]" in inexpressible_keys(BY_MODEL_TYPE["gemma4_text"], local)[0]


def test_llama4_lists_must_agree():
    given = copy.deepcopy(PUBLISHED["llama4-17b-16e-instruct"][0])
    text = given["text_config"]
    text["layer_types"] = ["chunked_attention"] * 48
    assert "chunked_attention and 0 in no_rope_layers" in refusal(given)
    text["layer_types"], text["attention_chunk_size"] = None, None
    # Without chunks, layers with rotary positions see everything.
    assert read(given).attention_pattern == ("full", "full", "full", "nope")
    text["no_rope_layers"] = [1, 2]
    assert "no_rope_layers must be a list" in refusal(given)


def test_all_problems_are_listed_at_once():
    message = refusal({**LLAMA, "foo": 1, "hidden_act": "xielu", "hidden_size": "big", "rope_scaling": {"type": "su"}})
    assert len(message.splitlines()) == 4
    assert all(part in message for part in ("foo=1", "xielu", "hidden_size", "'su'"))


JUNK = (None, -1, 1.5, 10**12, "4096", [None], {"rope_type": "yarn", "factor": None}, {"full_attention": 3})


@pytest.mark.parametrize(
    "name", ["llama3.1-8b", "gemma3-1b", "gemma4-26b-a4b", "llama4-17b-16e-instruct", "deepseek3-671b"]
)
def test_any_value_is_honoured_or_refused(name):
    given = PUBLISHED[name][0]
    given = given.get("text_config", given)
    for key in {*given, "rope_parameters", "sliding_window", "layer_types", "quantization_config"}:
        for value in JUNK:
            try:
                family, keys = read_config({**copy.deepcopy(given), key: copy.deepcopy(value)}, "config.json")
            except ConversionError as error:
                assert str(error).startswith("config.json: ")
            else:
                assert not inexpressible_keys(family, ModelConfig(**keys))


@pytest.mark.parametrize("kind", [None, "falcon", "deepseek_v32", "qwen3_vl", 3, ["llama"]])
def test_other_model_types_are_refused(kind):
    assert f"model_type={kind!r} is not supported" in refusal({**LLAMA, "model_type": kind})


def test_defaults_are_those_of_the_class():
    # What transformers says is compared in test_families.py; here one that differs from the usual file.
    assert read({"model_type": "llama"}).normalization_layer_epsilon == 1e-6
    assert read({"model_type": "gemma3_text"}).sliding_window_size == 4096
    assert read({"model_type": "mixtral"}).rope_max_timescale == 1e6
    assert "num_experts_per_tok is missing" in refusal({"model_type": "deepseek_v2"})


def test_null_head_dim_is_worked_out():
    assert read({**LLAMA, "head_dim": None}).head_dim == 128
    assert read({**LLAMA, "head_dim": 24}).head_dim == 24


def test_yarn_factor_may_be_left_to_the_lengths():
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024}
    assert read({**LLAMA, "rope_scaling": scaling}).rope_factor == 4.0
    scaling = {"rope_type": "yarn", "factor": 4.0}
    assert read({**LLAMA, "rope_scaling": scaling}).original_max_position_embeddings == 4096


def test_reading_needs_no_jax():
    code = (
        "import sys, maxlite.hf.config_json as c; c.read_config({'model_type': 'llama'}, 'x'); "
        "print('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "False", done.stderr


def test_every_family_can_be_found():
    assert {family.model_type for family in FAMILIES} <= BY_MODEL_TYPE.keys()
    assert all(BY_MODEL_TYPE[family.model_type] is family for family in FAMILIES)
