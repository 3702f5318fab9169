"""The quantize command, from a model to a run that decodes, evaluates and can be begun from."""

import contextlib
import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.checkpoint.manager import Checkpointer
from maxlite.checkpoint.restore import parameter_shapes, restore_parameters
from maxlite.checkpoint.tree import leaf_paths, nested
from maxlite.config.load import dump_config, load_config
from maxlite.config.schema import Config
from maxlite.decode.run import run_decode
from maxlite.errors import CheckpointError, ConfigError, ConversionError
from maxlite.launcher.quantize import quantize
from maxlite.model.build import Params, build_model
from maxlite.ops.stored import expand_scale
from maxlite.quantize import run as quantize_run
from maxlite.train.evaluation_run import run_evaluation
from tests.conftest import load_tiny
from tests.quantize.two_models import float_kernel, noisy
from tests.reference import STORIES, stories_generations

ONE = ("cpu_devices=1", "jax_cache_dir=null")
PLAIN = (*ONE, "max_target_length=16", "per_device_batch_size=2", "eval_steps=1")
KEYS = ("vocab_size=264", "dataset_type=text", "eval_fraction=0.5", "num_decoder_layers=1", "emb_dim=32", *PLAIN)
MOE = ("mlp_pattern=[moe]", "num_experts=4", "num_experts_per_tok=2", "moe_mlp_dim=32")
METHODS = ("int8", "int4", "nf4", "fp8", "gptq", "awq")

# What a report says of text takes most of the time.
NOTHING_HELD_OUT = "eval_fraction=0"


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("text")
    for number in range(8):
        (folder / f"{number}.txt").write_text(f"the {number} cats sat on {number} mats and purred\n" * 4)
    return str(folder)


def save_run(folder: Path, config: Config, params: Params) -> Path:
    folder.mkdir()
    (folder / "config.yml").write_text(dump_config(config))
    checkpointer = Checkpointer(folder, config.checkpoint, lean=True)
    checkpointer.save(1, {"step": jnp.int32(1), "params": params}, {})
    checkpointer.close()
    return folder


def make_run(folder: Path, *keys: str) -> Path:
    config = load_tiny(*KEYS, *keys)
    return save_run(folder, config, noisy(build_model(config.model, config.compute)))


@pytest.fixture(scope="module")
def float_run(tmp_path_factory, text) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "float", f"dataset_path={text}")


@pytest.fixture(scope="module")
def moe_run(tmp_path_factory, text) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "moe", f"dataset_path={text}", *MOE)


@pytest.fixture(scope="module")
def moe_int4(moe_run, tmp_path_factory) -> tuple[Path, str]:
    """The run of experts in int4, and what was said."""
    out = tmp_path_factory.mktemp("runs") / "int4"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        quantize(str(moe_run), str(out), ["method=int4"])
    return out, said.getvalue()


def params_of(run: Path):
    """Model and parameters of a run as they are saved."""
    config = load_config(str(run), [], {})
    model = build_model(config.model, config.compute)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), model.abstract_params
    )
    return model, leaf_paths(restore_parameters(run, abstract))


def decode(run: Path, *keys: str) -> list[dict]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run_decode(load_config(str(run), [*ONE, *keys], {}), str(run), json_output=True)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def floats_of(run: Path, folder: Path) -> Path:
    """A run with the floats that the codes of another stand for."""
    model, params = params_of(run)
    for product in model.products:
        codes, scale = (params.pop(f"{product.params_path}/{name}") for name in ("codes", "scale"))
        dims, form = tuple(dim + 1 for dim in product.summed_dims), product.equipment.stored
        assert form is not None
        params[f"{product.params_path}/kernel"] = float_kernel(codes, scale, dims, form.qtype, jnp.dtype("float32"))
    config = load_config(str(run), ["weight_quantization=null", "weight_quant_tile_size=null"], {})
    return save_run(folder, config, nested(params))


@pytest.mark.parametrize(
    "method", [pytest.param(one, marks=() if one == "awq" else pytest.mark.slow) for one in METHODS]
)
def test_each_method_makes_a_run_with_the_logits_of_its_floats(float_run, method, tmp_path, capsys):
    out = tmp_path / method
    quantize(str(float_run), str(out), [f"method={method}", "weight_quant_tile_size=16", NOTHING_HELD_OUT])
    said = capsys.readouterr().out
    qtype = {"gptq": "int4", "awq": "int4"}.get(method, method)
    assert f"Stored: {qtype} kernels, a scale for 16 summed elements: group_0/block_0/" in said
    assert f"Quantized by {method}" in said and f"Go on: maxlite decode {out}" in said
    assert {"report.txt", "report.json"} <= {file.name for file in (out / "quantization").iterdir()}
    compute = load_config(str(out), [], {}).compute
    assert (compute.weight_quantization, compute.weight_quant_tile_size) == (qtype, 16)
    floats = floats_of(out, tmp_path / "floats")
    for run in (out, floats):
        decode(run, "prompt_ids=5,6,7,8", "max_new_tokens=0", f"logits_path={run}/logits.npz")
    with np.load(out / "logits.npz") as ours, np.load(floats / "logits.npz") as theirs:
        np.testing.assert_allclose(ours["logits_0"], theirs["logits_0"], atol=2e-4)


def test_it_continues_prompts_and_is_evaluated_as_its_floats_are(moe_int4, tmp_path):
    out, _ = moe_int4
    floats = floats_of(out, tmp_path / "floats")
    rows = [decode(run, "prompt=the 1 cats", "max_new_tokens=8", "ignore_eos=true") for run in (out, floats)]
    assert rows[0] == rows[1]
    losses = [run_evaluation(load_config(str(run), ONE, {}), str(run), io.StringIO()) for run in (out, floats)]
    assert losses[0]["eval/avg_loss"] == pytest.approx(losses[1]["eval/avg_loss"], rel=1e-5)


@pytest.mark.parametrize("method", ("int8", "int4"))
def test_no_element_moves_by_more_than_half_its_scale(moe_run, moe_int4, method, tmp_path, capsys):
    out, said = moe_int4
    if method != "int4":
        out = tmp_path / "out"
        quantize(str(moe_run), str(out), [f"method={method}", NOTHING_HELD_OUT])
        said = capsys.readouterr().out
    assert "mlp/experts/{down,gate,up}" in said
    (_, plain), (model, stored) = params_of(moe_run), params_of(out)
    assert {product.path.rpartition("/")[2] for product in model.products if product.is_experts} == {
        "gate",
        "up",
        "down",
    }
    for product in model.products:
        codes, scale = (stored.pop(f"{product.params_path}/{name}") for name in ("codes", "scale"))
        kernel = plain.pop(f"{product.params_path}/kernel")
        dims = tuple(dim + 1 for dim in product.summed_dims)
        made = float_kernel(codes, scale, dims, method, jnp.dtype("float32"))
        limit = np.asarray(expand_scale(scale, kernel.shape, dims)) / 2 * (1 + 5e-5)
        assert (np.abs(np.asarray(made) - np.asarray(kernel)) <= limit).all()
    # Norms, embedding, router and output matrix are as they were, bit for bit.
    assert stored.keys() == plain.keys() and "group_0/layers/block_0/mlp/router/kernel" in stored
    for name in plain:
        np.testing.assert_array_equal(stored[name], plain[name])


def test_a_folder_becomes_a_run_that_stands_alone(tmp_path, text, capsys):
    out, moved = tmp_path / "out", tmp_path / "moved"
    quantize(str(STORIES), str(out), ["method=int8", f"dataset_path={text}", NOTHING_HELD_OUT, *PLAIN])
    out.rename(moved)
    names = {file.name for file in moved.iterdir()}
    assert {"config.yml", "model.yml", "tokenizer.json", "hugging_face", "checkpoints", "quantization"} <= names
    assert "Stored: int8 kernels, one scale a channel" in capsys.readouterr().out
    shapes = parameter_shapes(moved)
    assert shapes["group_0/layers/block_0/mlp/down/codes"] == ((5, 172, 64), "int8")
    assert shapes["group_0/layers/block_0/mlp/down/scale"] == ((5, 1, 64), "float32")
    prompt, ids = stories_generations()[0]
    (row,) = decode(moved, f"prompt_ids={','.join(map(str, prompt))}", "max_new_tokens=48")
    assert row["ids"] == ids[:48]


def test_a_checkpoint_and_a_config_that_says_where_parameters_are(float_run, text, tmp_path):
    names = ("first", "second")
    quantize(f"{float_run}/checkpoints/1", str(tmp_path / "first"), [NOTHING_HELD_OUT])
    keys = [key for key in KEYS if key not in ("dataset_type=text", "eval_fraction=0.5")]
    tiny = ["mlp_dim=96", "num_query_heads=4", "num_kv_heads=2", "head_dim=16", "dtype=float32", f"dataset_path={text}"]
    quantize("base.yml", str(tmp_path / "second"), [*keys, *tiny, f"load_parameters_path={float_run}"])
    found = [params_of(tmp_path / name)[1] for name in names]
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name])
    saved = load_config(str(tmp_path / "second"), [], {})
    assert saved.checkpoint.load_parameters_path is None and saved.run.directory == tmp_path / "second"


def test_nothing_is_left_of_what_fails(float_run, tmp_path, monkeypatch):
    def fail(*_):
        raise ConversionError("the report broke")

    monkeypatch.setattr(quantize_run, "build_report", fail)
    with pytest.raises(ConversionError, match="the report broke"):
        quantize(str(float_run), str(tmp_path / "out"), [])
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_quantized_is_refused(float_run, moe_int4, tmp_path):
    out, _ = moe_int4
    with pytest.raises(ConversionError, match="int4 exists"):
        quantize(str(float_run), str(out), [])
    again = str(tmp_path / "again")
    with pytest.raises(ConfigError, match="weight_quantization=int4: these kernels are in few bits already"):
        quantize(str(out), again, [])
    with pytest.raises(
        ConfigError, match="weight_quant_module_path='.*/nothing' matches no product(.|\n)*block_0/mlp/up"
    ):
        quantize(str(float_run), again, ["weight_quant_module_path=.*/nothing"])
    with pytest.raises(ConfigError, match="weight_quant_tile_size=7 is odd"):
        quantize(str(float_run), again, ["method=int4", "weight_quant_tile_size=7"])
    with pytest.raises(ConfigError, match="(?s)method.*int8.*gptq"):
        quantize(str(float_run), again, ["method=int3"])
    with pytest.raises(ConfigError, match="Merge them first"):
        quantize(str(float_run), again, ["lora_rank=2"])
    with pytest.raises(CheckpointError, match="wants floats"):
        decode(out, "prompt=a", "max_new_tokens=4", "weight_quantization=null")
    assert not list(tmp_path.iterdir())
