import copy
from typing import Any

import pytest

from maxlite.errors import ConversionError
from maxlite.hf.compressed_json import (
    ROUNDED_INPUTS,
    Scheme,
    compressed_problems,
    quantization_config,
    read_schemes,
    rounds_activations,
)
from maxlite.hf.config_json import read_config
from tests.hf.folders import read_golden

# As llm-compressor writes it, and as its first versions did.
GROUPS = {
    "config_groups": {
        "group_0": {
            "format": "pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": "weight", "block_structure": None, "dynamic": False, "group_size": 128, "num_bits": 4,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
            },
        }
    },
    "format": "pack-quantized", "global_compression_ratio": 1.9, "ignore": ["lm_head"], "kv_cache_scheme": None,
    "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {},
    "transform_config": {}, "version": "0.12.0",
}  # fmt: skip
FROZEN = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": True, "num_bits": 8, "strategy": "token", "type": "float"},
            "weights": {"num_bits": 8, "strategy": "channel", "symmetric": True, "type": "float"},
            "targets": ["Linear"],
        }
    },
    "format": "float-quantized", "quant_method": "compressed-tensors", "quantization_status": "frozen",
    "sparsity_config": {"format": "dense", "sparsity_structure": "unstructured"},
}  # fmt: skip
WEIGHTS = "config_groups.group_0.weights"


def changed(path: str, value: Any, base: dict[str, Any] = GROUPS) -> dict[str, Any]:
    quantization = copy.deepcopy(base)
    *parents, name = path.split(".")
    node = quantization
    for parent in parents:
        node = node[parent]
    node[name] = value
    return quantization


def test_what_published_folders_say_is_read():
    for quantization in (GROUPS, FROZEN):
        assert compressed_problems(quantization, "config.json") == []
    assert read_schemes(GROUPS) == (Scheme("int", 4, True, 1, 128),)
    assert read_schemes(FROZEN) == (Scheme("float", 8, False, 1, None),)
    assert rounds_activations(FROZEN) and not rounds_activations(GROUPS)


def test_groups_of_a_mixed_folder_keep_their_own_formats():
    mixed = changed("config_groups.group_1", {**FROZEN["config_groups"]["group_0"], "format": "float-quantized"})
    mixed["format"] = "mixed-precision"
    assert compressed_problems(mixed, "config.json") == []
    assert read_schemes(mixed) == (Scheme("int", 4, True, 1, 128), Scheme("float", 8, False, 1, None))


@pytest.mark.parametrize(
    "strategy, size, block, scheme, shape",
    [
        ("tensor", None, None, (None, None), (1,)),
        (None, None, None, (None, None), (1,)),
        ("channel", None, None, (1, None), (6, 1)),
        (None, -1, None, (1, None), (6, 1)),
        ("group", 4, None, (1, 4), (6, 2)),
        (None, 4, None, (1, 4), (6, 2)),
        ("block", None, [4, 5], (4, 5), (2, 2)),
    ],
)
def test_strategies(strategy, size, block, scheme, shape):
    quantization = copy.deepcopy(GROUPS)
    quantization["config_groups"]["group_0"]["weights"] |= {
        "strategy": strategy, "group_size": size, "block_structure": block
    }  # fmt: skip
    assert compressed_problems(quantization, "config.json") == []
    found = read_schemes(quantization)[0]
    assert found[3:] == scheme and found.scale_shape((6, 8)) == shape


@pytest.mark.parametrize("kind, bits", [("int", 4), ("int", 8), ("float", 8)])
@pytest.mark.parametrize("columns", [None, 32])
def test_what_is_written_is_read(kind, bits, columns):
    scheme = Scheme(kind, bits, kind == "int", 1, columns)
    quantization = quantization_config(scheme, ["lm_head"])
    assert compressed_problems(quantization, "config.json") == []
    assert read_schemes(quantization) == (scheme,)


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("quantization_status", "initialized", "'initialized' is not supported; it may be 'compressed'"),
        ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme={'num_bits': 8} is not supported; it may be null"),
        ("transform_config", {"config_groups": {"R1": {}}}, "transform_config=.* may be null"),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config=.* may be empty"),
        ("sparsity_config", "2:4", "sparsity_config='2:4' is not supported"),
        ("other", 1, "other=1 is not known"),
        ("config_groups", {}, "config_groups={} is not supported"),
        ("config_groups.group_0", ["Linear"], "group_0.weights is not there"),
        (
            "config_groups.group_0.format",
            "nvfp4-pack-quantized",
            "format='nvfp4-pack-quantized' .* 'pack-quantized' or",
        ),
        ("config_groups.group_0.format", "float-quantized", "float-quantized cannot hold weights of the type 'int'"),
        ("config_groups.group_0.format", "int-quantized", "int-quantized cannot hold weights of 4 bits"),
        ("config_groups.group_0.more", 1, "group_0.more=1 is not known"),
        (f"{WEIGHTS}.num_bits", 3, "num_bits=3 is not supported; it may be 4 or 8"),
        (f"{WEIGHTS}.type", "float", "pack-quantized cannot hold weights of the type 'float'"),
        (f"{WEIGHTS}.type", ["int"], r"type=\['int'\] is not supported"),
        (f"{WEIGHTS}.symmetric", False, "symmetric=False is not supported; it may be True"),
        (f"{WEIGHTS}.dynamic", True, "dynamic=True is not supported"),
        (f"{WEIGHTS}.actorder", "group", "actorder='group' is not supported; it may be None or 'weight'"),
        (f"{WEIGHTS}.strategy", "tensor_group", "strategy='tensor_group' is not supported"),
        (f"{WEIGHTS}.group_size", 0, "group_size=0 is not supported for groups"),
        (f"{WEIGHTS}.strategy", "block", "block_structure=None is not supported"),
        (f"{WEIGHTS}.more", 1, "weights.more=1 is not known"),
    ],
)
def test_what_cannot_be_honoured_is_refused(path, value, message):
    config = {**read_golden("llama").config, "quantization_config": changed(path, value)}
    with pytest.raises(ConversionError, match=f"config.json: quantization_config.*{message}"):
        read_config(config, "config.json")


def test_scales_of_activations_are_left_out():
    plain = read_golden("llama").config
    family, _ = read_config({**plain, "quantization_config": FROZEN}, "config.json")
    assert ROUNDED_INPUTS in family.table.ignored
    assert ROUNDED_INPUTS.matches("model.layers.0.mlp.up_proj.input_scale")
    assert ROUNDED_INPUTS not in read_config(plain, "config.json")[0].table.ignored
