"""Runs with kernels in few bits -> folders of compressed-tensors: the same codes, the same scales, the same logits."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.checkpoint.tree import leaf_paths
from maxlite.errors import ConversionError
from maxlite.hf.compressed import CompressedSource
from maxlite.hf.compressed_json import read_schemes
from maxlite.hf.safetensors import SafetensorsSource
from maxlite.launcher.convert import convert
from maxlite.ops.stored import dequantize_kernel, unpack
from tests.hf.cases import LONG_PROMPTS
from tests.hf.folders import load_folder
from tests.hf.stored_runs import StoredRun, export, logits_of, make_run

WAYS = {
    "int8": ("weight_quantization=int8",),
    "int8-groups": ("weight_quantization=int8", "weight_quant_tile_size=16"),
    "int4": ("weight_quantization=int4", "weight_quant_tile_size=32"),
    "int4-fours": ("weight_quantization=int4", "weight_quant_tile_size=4"),
    "int4-channels": ("weight_quantization=int4",),
    "fp8": ("weight_quantization=fp8",),
}
# Experts of their own; latent attention; queries that share a tensor with gates, in linear attention too.
FAMILIES = {"qwen3-moe": "int8-groups", "deepseek-v3": "int4-channels", "qwen3-next": "int4-fours"}


def read(folder: Path, name: str) -> np.ndarray:
    source = SafetensorsSource(folder)
    return source.rows(name, 0, source.tensors[name].shape[0])


def quantization_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def assert_kernels_come_back(run: StoredRun, folder: Path) -> None:
    """Bit for bit what the codes and scales of the run are as floats."""

    @jax.jit
    def kernels(held: dict[str, jax.Array]) -> dict[str, jax.Array]:
        found = {}
        for product in run.model.products:
            path, stored = product.params_path, product.equipment.stored
            if stored is not None:
                dims = tuple(dim + 1 for dim in product.summed_dims)
                codes, scale = held[f"{path}/codes"], held[f"{path}/scale"]
                found[f"{path}/kernel"] = dequantize_kernel(codes, scale, dims, stored.qtype, jnp.float32)
        return found

    held, back = leaf_paths(run.params), leaf_paths(load_folder(folder).params)
    wanted = kernels(held)
    assert wanted
    for path, kernel in wanted.items():
        np.testing.assert_array_equal(np.asarray(back[path]), np.asarray(kernel), path)
    for path, value in back.items():
        if path in held:
            np.testing.assert_array_equal(np.asarray(value), np.asarray(held[path]), path)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """exported(way): a run of the tiny Llama with its kernels so, and the folder that it was written to."""

    @functools.cache
    def export_once(way: str) -> tuple[StoredRun, Path]:
        place = tmp_path_factory.mktemp(way)
        run = make_run("llama", place, *WAYS[way])
        export(run, place / "out")
        return run, place / "out"

    return export_once


@pytest.mark.parametrize("way", WAYS)
def test_codes_and_scales_are_the_runs_own(way, exported):
    run, out = exported(way)
    attention = run.params["group_0"]["layers"]["block_0"]["attention"]
    qtype = way.partition("-")[0]
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        codes = np.asarray(unpack(attention["out"]["codes"], (1, 2), qtype))[layer].reshape(64, 64).T
        scales = np.asarray(attention["out"]["scale"])[layer].reshape(-1, 64).T
        np.testing.assert_array_equal(read(out, f"{name}_scale"), scales)
        if qtype == "fp8":
            assert read(out, name).tobytes() == np.ascontiguousarray(codes).tobytes()
            continue
        bits = 4 if qtype == "int4" else 8
        assert read(out, f"{name}_shape").tolist() == [64, 64]
        words = read(out, f"{name}_packed").astype(np.int64) & 0xFFFFFFFF
        per_word = 32 // bits
        for row, column in ((0, 0), (3, 5), (63, 63), (17, 32)):
            value = int(words[row, column // per_word]) >> bits * (column % per_word) & (1 << bits) - 1
            assert value - (1 << bits - 1) == codes[row, column]


@pytest.mark.parametrize("way", WAYS)
def test_what_config_json_says(way, exported):
    said = quantization_of(exported(way)[1])
    weights = said["config_groups"]["group_0"]["weights"]
    assert said["quant_method"] == "compressed-tensors" and said["ignore"] == ["lm_head"]
    assert said["format"] == ("float-quantized" if way == "fp8" else "pack-quantized")
    assert weights["num_bits"] == (4 if way.startswith("int4") else 8) and weights["symmetric"] is True
    assert weights["group_size"] == {"int8-groups": 16, "int4": 32, "int4-fours": 4}.get(way)
    assert weights["strategy"] == ("channel" if weights["group_size"] is None else "group")


@pytest.mark.parametrize("way", WAYS)
def test_the_folder_comes_back_as_the_dequantized_model(way, exported):
    run, out = exported(way)
    assert_kernels_come_back(run, out)
    back = load_folder(out)
    np.testing.assert_allclose(logits_of(back.model, back.params), logits_of(run.model, run.params), atol=2e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_and_shared_tensors_come_back(name, tmp_path):
    run = make_run(name, tmp_path, *WAYS[FAMILIES[name]])
    export(run, tmp_path / "out", max_shard_bytes=40_000)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    assert_kernels_come_back(run, tmp_path / "out")


def test_modules_that_stay_floats_are_ignored(tmp_path):
    keys = (*WAYS["int8"], "weight_quant_module_path=group_0/block_[01]/mlp/.*|.*/attention/(query|key)")
    run = make_run("qwen3-moe", tmp_path, *keys)
    export(run, tmp_path / "out")
    number = r"\d+"
    assert quantization_of(tmp_path / "out")["ignore"] == [
        "lm_head",
        rf"re:model\.layers\.{number}\.mlp\.gate$",
        rf"re:model\.layers\.{number}\.self_attn\.o_proj$",
        rf"re:model\.layers\.{number}\.self_attn\.v_proj$",
    ]
    assert_kernels_come_back(run, tmp_path / "out")


def test_tiles_that_do_not_fit_each_other_share_the_scales_of_their_common_parts(tmp_path):
    # The MLP's 96 become two tiles of 48, the other sums have tiles of 64.
    run = make_run("llama", tmp_path, "weight_quantization=int4", "weight_quant_tile_size=64")
    said = export(run, tmp_path / "out")
    assert "repeated for every 16 elements (here they are for 48, 64)" in said
    assert quantization_of(tmp_path / "out")["config_groups"]["group_0"]["weights"]["group_size"] == 16
    assert_kernels_come_back(run, tmp_path / "out")


def test_tiles_that_have_nothing_in_common_are_refused(tmp_path):
    # 96 become four tiles of 24, 64 two of 22 and one of 20.
    run = make_run("llama", tmp_path, "weight_quantization=int4", "weight_quant_tile_size=28")
    with pytest.raises(ConversionError, match="tiles of 22, 24 elements would become groups of 2, .*over: 64, 96"):
        export(run, tmp_path / "out")


def test_bfloat16_is_for_what_is_not_stored_in_few_bits(tmp_path):
    run = make_run("llama", tmp_path, *WAYS["int8"], "weight_dtype=bfloat16")
    export(run, tmp_path / "out")
    dtypes = {name: tensor.dtype.name for name, tensor in SafetensorsSource(tmp_path / "out").tensors.items()}
    assert dtypes.pop("model.embed_tokens.weight") == dtypes.pop("model.norm.weight") == "bfloat16"
    assert {dtype for name, dtype in dtypes.items() if name.endswith("_scale")} == {"float32"}
    source = CompressedSource(SafetensorsSource(tmp_path / "out"), read_schemes(quantization_of(tmp_path / "out")))
    assert source.tensors["model.layers.0.mlp.up_proj.weight"].shape == (96, 64)


@pytest.mark.parametrize(
    "name, keys, message",
    [
        ("llama", ("weight_quantization=nf4",), "nf4 is none of its types; int8, int4, fp8 are"),
        ("gpt-oss", WAYS["int8"], "experts.down_proj .* is not the weight of a linear layer"),
        (
            "qwen3-next",
            (*WAYS["int8"], "weight_quant_module_path=.*/query"),
            "q_proj.* would be part floats: .*/attention/gate/kernel",
        ),
    ],
)
def test_what_has_no_form_is_refused(name, keys, message, tmp_path):
    run = make_run(name, tmp_path, *keys)
    with pytest.raises(ConversionError, match=f"(?s){message}.*weight_quant_module_path"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, way", [*(("llama", way) for way in WAYS), *FAMILIES.items(), ("mixtral", "fp8")])
def test_transformers_computes_the_same(name, way, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    run = make_run(name, tmp_path, *WAYS[way])
    export(run, tmp_path / "out")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not {kind: found for kind, found in info.items() if found}
    ids = torch.tensor([max(LONG_PROMPTS, key=len)])
    with torch.no_grad():
        found = model.eval()(ids).logits[0].numpy()
    np.testing.assert_allclose(found, logits_of(run.model, run.params), atol=5e-5, rtol=0)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_commands_own_check_passes_both_ways(dtype, tmp_path, capsys):
    pytest.importorskip("compressed_tensors")
    run = make_run("llama", tmp_path, *WAYS["int4"], f"weight_dtype={dtype}")
    flags = {"explain": False, "check": True}
    convert(str(run.path), str(tmp_path / "out"), [], "5GB", flags)
    convert(str(tmp_path / "out"), str(tmp_path / "back"), [], "5GB", flags)
    assert capsys.readouterr().out.count("Check: ") == 2
