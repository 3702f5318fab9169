"""What `estimate` and `compile` print; the numbers themselves are tested where they are made."""

import json
import re

import pytest

from maxlite.errors import ConfigError
from maxlite.launcher import estimate as commands
from maxlite.launcher.estimate import compile_step, print_estimate

MESH = ("ici_fsdp_parallelism=4", "ici_tensor_parallelism=2", "cpu_devices=8", "jax_cache_dir=null")


@pytest.fixture
def config(tiny_config):
    return lambda *more: tiny_config(*MESH, "peak_tflops_per_device=1", *more)


@pytest.fixture(scope="module", autouse=True)
def each_once():
    """What is printed in two ways, or looked at by two tests, is estimated once."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("run_estimate", "run_decode_estimate"):
            patch.setattr(commands, name, remembering(getattr(commands, name)))
        yield


def remembering(estimate):
    found = {}

    def remembered(config):
        key = repr(config)
        if key not in found:
            found[key] = estimate(config)
        return found[key]

    return remembered


def test_json_is_one_object_with_every_number(config, capsys):
    print_estimate(config(), True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["num_devices"] == 8 and shown["mesh"] == "fsdp=4 tensor=2"
    assert shown["parameters"] == shown["gradients"] and 2 * shown["parameters"] <= shown["optimizer"]
    assert shown["fits"] is True and shown["fixes"] == []
    (program,) = shown["programs"]
    memory = program["memory"]
    state = shown["parameters"] + shown["optimizer"]
    # The batch is all that goes in beside the state.
    assert state < memory["arguments"] < state + 10_000
    assert memory["peak"] == program["needed"] > memory["arguments"]
    assert program["flops"] > program["model_flops"] > 0
    assert {axis for row in program["traffic"] for axis in row["axes"]} == {"fsdp", "tensor"}
    gathers = [row for row in program["traffic"] if (row["kind"], row["axes"]) == ("all-gather", ["fsdp"])]
    # At least the weights of both layers, forward and backward.
    assert gathers and gathers[0]["times"] >= 2 * 2 * 7
    assert [row["stage"] for row in shown["zero"]] == ["DP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    # On one slice of fsdp and tensor the state is split as by ZeRO-3, but for norms.
    assert shown["zero"][-1]["parameters"] <= shown["parameters"] < 1.2 * shown["zero"][-1]["parameters"]


def test_the_table_for_people(config, capsys):
    print_estimate(config(), False)
    text = capsys.readouterr().out
    for line in ("parameters", "optimizer", "activations and gradients", "peak", "fits: a device has", "all-gather"):
        assert line in text, line
    assert re.search(r"ZeRO-3\s", text)


def test_decoding_has_two_programs(config, capsys):
    print_estimate(config("max_new_tokens=16"), True, decode=True)
    shown = json.loads(capsys.readouterr().out)
    assert [program["name"] for program in shown["programs"]] == ["prefill", "decode_step"]
    assert shown["tokens"] == 8 and shown["optimizer"] == 0 and shown["zero"] == []
    prefill, step = (program["flops"] for program in shown["programs"])
    # A prompt of 16 tokens a row against one token.
    assert 10 * step < prefill


@pytest.mark.parametrize(("overrides", "number"), [((), 4), (("quantize_kvcache=true", "kv_quant_dtype=int4"), 0.75)])
def test_bytes_of_the_cache(config, capsys, overrides, number):
    print_estimate(config("max_new_tokens=16", *overrides), True, decode=True)
    shown = json.loads(capsys.readouterr().out)
    # Of a device: 2 rows of 32 slots, 1 head of 16 keys and values in 2 layers; positions and segments of all rows.
    assert 0 <= shown["cache"] - 2 * 32 * 2 * 2 * 16 * number <= 8 * 32 * 2 * 4 + 4
    step = shown["programs"][1]["memory"]
    assert 0 < step["arguments"] - shown["parameters"] - shown["cache"] < 200
    print_estimate(config("max_new_tokens=16", *overrides), False, decode=True)
    assert re.search(r"^cache\s", capsys.readouterr().out, re.M)


def test_decoding_in_few_bits_is_compiled_as_decode_compiles_it(tiny_config, capsys):
    """Of six layers' kernels a few of one layer are floats at a time."""
    keys = ("emb_dim=128", "mlp_dim=512", "num_decoder_layers=6", "jax_cache_dir=null", "weight_quantization=int4")
    print_estimate(tiny_config(*keys), True, decode=True)
    step = json.loads(capsys.readouterr().out)["programs"][1]
    assert step["memory"]["temporaries"] < 4 * 4 * 128 * 512


def test_what_does_not_fit_comes_with_three_fixes(config, capsys, monkeypatch):
    monkeypatch.setattr("maxlite.estimate.run.device_memory_bytes", lambda devices: 100_000)
    print_estimate(config("remat_policy=minimal"), False)
    text = capsys.readouterr().out
    assert "does not fit" in text
    assert len(re.findall(r"^  \d\. ", text.partition("What helps, the cheapest first:")[2], re.M)) == 3


def test_compile_writes_the_file_and_says_so(config, capsys, tmp_path):
    path = tmp_path / "step.bin"
    compile_step(config(f"compiled_trainstep_file={path}"), True)
    shown = capsys.readouterr()
    assert json.loads(shown.out)["fits"] is True
    assert f"Wrote {path}" in shown.err and path.stat().st_size > 10_000


def test_compile_without_a_file_is_refused(config):
    with pytest.raises(ConfigError, match="compiled_trainstep_file="):
        compile_step(config(), False)


@pytest.mark.tpu
def test_a_slice_that_is_not_there(tiny_config, capsys):
    wide = ("emb_dim=256", "mlp_dim=512", "head_dim=128", "vocab_size=512", "max_target_length=128", "dtype=bfloat16")
    between = ("compile_topology=v5e-4", "compile_topology_num_slices=2", "dcn_data_parallelism=2")
    print_estimate(tiny_config(*wide, *between, "ici_fsdp_parallelism=4", "attention=dot_product"), True)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["device_kind"], shown["num_devices"], shown["num_slices"]) == ("TPU v5 lite", 8, 2)
    (program,) = shown["programs"]
    # Between slices only gradients are summed.
    assert {tuple(row["axes"]) for row in program["traffic"] if row["network"]} == {("data",)}
    assert {"fsdp"} == {axis for row in program["traffic"] if not row["network"] for axis in row["axes"]}
    assert 0 < program["mfu"] < 1 and program["roofline"]["network"] > 0
    assert program["roofline"]["bound"] <= program["roofline"]["serial"]
