"""Adapters to and from PEFT's folders, and what can't go there."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxlite.checkpoint.restore import parameter_reader, parameter_shapes
from maxlite.checkpoint.tree import leaf_paths
from maxlite.errors import ConfigError, ConversionError
from maxlite.hf.convert import host_abstract, host_sharding
from maxlite.hf.load import load_parameters
from maxlite.hf.peft_json import ADAPTER_CONFIG, ADAPTER_FILE, read_adapter_config
from maxlite.launcher.adapters import convert_adapters
from maxlite.launcher.resolve import resolve_config
from maxlite.model.build import build_model
from maxlite.train.run import run_train
from tests.hf.folders import read_golden, write_folder
from tests.hf.stored_runs import write_run
from tests.reference import STORIES

PREFIX = "base_model.model.model.layers."


def write_adapters(folder, modules, rank=4, seed=0, **keys) -> dict[str, np.ndarray]:
    """A folder of PEFT's: modules: name of a linear layer -> its [out, in]."""
    folder.mkdir()
    draw = np.random.default_rng(seed)
    tensors = {}
    for name, (made, given) in modules.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = draw.normal(size=(rank, given)).astype(np.float32)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = draw.normal(size=(made, rank)).astype(np.float32)
    save_file(tensors, folder / ADAPTER_FILE)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "base_model_name_or_path": str(STORIES), **keys}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    return tensors


def attention(*names, layers=range(5)) -> dict[str, tuple[int, int]]:
    """Linear layers of stories260K."""
    sizes = {"q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64)}
    return {f"{layer}.self_attn.{name}": sizes[name] for layer in layers for name in names}


def read_params(run) -> tuple[dict, object]:
    config = resolve_config(str(run), [])
    model = build_model(config.model, config.compute)
    read = parameter_reader(run, host_abstract(model))
    return {path: np.asarray(read(path)) for path in leaf_paths(model.abstract_params)}, config


def test_a_folder_comes_back_bit_for_bit(tmp_path, capsys):
    given = write_adapters(tmp_path / "given", attention("q_proj", "v_proj", "o_proj"))
    convert_adapters(str(tmp_path / "given"), str(tmp_path / "run"), [])
    said = capsys.readouterr().out
    assert "rank 4, alpha 8" in said and "begin anew" not in said
    assert "'lora_module_path=.*/(attention/out|attention/query|attention/value)'" in said
    params, config = read_params(tmp_path / "run")
    assert (config.compute.lora_rank, config.compute.lora_alpha) == (4, 8.0)
    name, place = f"{PREFIX}3.self_attn.o_proj.lora_", "group_0/layers/block_0/attention/out/lora_"
    np.testing.assert_array_equal(params[f"{place}a"][3].reshape(64, 4), given[f"{name}A.weight"].T)
    np.testing.assert_array_equal(params[f"{place}b"][3], given[f"{name}B.weight"].T)
    convert_adapters(str(tmp_path / "run"), str(tmp_path / "back"), [])
    back = load_file(tmp_path / "back" / ADAPTER_FILE)
    assert back.keys() == given.keys()
    assert all(back[name].tobytes() == value.tobytes() for name, value in given.items())
    config = json.loads((tmp_path / "back" / ADAPTER_CONFIG).read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(STORIES))
    assert config["target_modules"] == ["o_proj", "q_proj", "v_proj"]
    assert "linear layers: 15" in capsys.readouterr().out


def test_training_goes_on_from_an_adapter_and_writes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = write_adapters(tmp_path / "given", attention("q_proj", "v_proj"))
    convert_adapters("given", "run", [])
    words = capsys.readouterr().out.splitlines()[-1].split()
    keys = [word.strip("'") for word in words[words.index("base.yml") + 1 :]]
    more = ["cpu_devices=1", "steps=1", "max_target_length=32", "per_device_batch_size=1", "eval_interval=0",
            "dataset_type=synthetic", "run_name=next", "enable_tensorboard=false"]  # fmt: skip
    trained = run_train(resolve_config("base.yml", [*keys, *more, "learning_rate=0"]))
    np.testing.assert_array_equal(
        trained.params["group_0"]["layers"]["block_0"]["attention"]["value"]["lora_b"][2].reshape(4, 32),
        given[f"{PREFIX}2.self_attn.v_proj.lora_B.weight"].T,
    )
    convert_adapters("runs/next", "out", [])
    assert json.loads((tmp_path / "out" / ADAPTER_CONFIG).read_text())["base_model_name_or_path"] == str(STORIES)


def test_rank_stabilized_adapters_count_as_often(tmp_path):
    write_adapters(tmp_path / "given", attention("q_proj"), use_rslora=True)
    config = read_adapter_config(tmp_path / "given")
    assert config.alpha / config.rank == pytest.approx(8 / np.sqrt(4))


def test_a_stored_base_may_come_below_an_adapter(tmp_path):
    given = write_adapters(tmp_path / "given", attention("q_proj"))
    convert_adapters(str(tmp_path / "given"), str(tmp_path / "run"), ["weight_quantization=int8"])
    shapes = parameter_shapes(tmp_path / "run")
    assert shapes["group_0/layers/block_0/attention/query/codes"][1] == "int8"
    params, _ = read_params(tmp_path / "run")
    found = params["group_0/layers/block_0/attention/query/lora_a"][0]
    np.testing.assert_array_equal(found, given[f"{PREFIX}0.self_attn.q_proj.lora_A.weight"].T)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"peft_type": "IA3"}, ["peft_type 'IA3'"]),
        ({"use_dora": True}, ["use_dora True", "merge_and_unload"]),
        ({"bias": "all"}, ["bias 'all'"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save", "lm_head"]),
        ({"rank_pattern": {"q_proj": 2}}, ["rank_pattern"]),
        ({"init_lora_weights": "pissa"}, ["init_lora_weights 'pissa'"]),
        ({"r": 0}, ["r and lora_alpha"]),
        ({"base_model_name_or_path": "someone/model"}, ["'someone/model'", "load_hf=FOLDER"]),
        ({"base_model_name_or_path": None}, ["load_hf=FOLDER"]),
    ],
)  # fmt: skip
def test_what_a_config_asks_in_vain_is_named(tmp_path, keys, words):
    write_adapters(tmp_path / "given", attention("q_proj"), **keys)
    with pytest.raises(ConversionError) as caught:
        convert_adapters(str(tmp_path / "given"), str(tmp_path / "run"), [])
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not (tmp_path / "run").exists()


def test_tensors_that_are_not_the_models_are_named(tmp_path):
    write_adapters(tmp_path / "stray", {**attention("q_proj"), "9.self_attn.q_proj": (64, 64)})
    with pytest.raises(ConversionError, match=r"9\.self_attn\.q_proj\.lora_A\.weight \[4, 64\]"):
        convert_adapters(str(tmp_path / "stray"), str(tmp_path / "run"), [])
    write_adapters(tmp_path / "wide", {**attention("q_proj"), "0.self_attn.v_proj": (64, 64)})
    with pytest.raises(ConversionError, match=r"v_proj.*is \[64, 4\], this model's is \[32, 4\]"):
        convert_adapters(str(tmp_path / "wide"), str(tmp_path / "run"), [])
    write_adapters(tmp_path / "some", attention("q_proj", layers=range(3)))
    with pytest.raises(ConversionError, match="some of the layers of group_0/block_0/attention/query"):
        convert_adapters(str(tmp_path / "some"), str(tmp_path / "run"), [])
    write_adapters(tmp_path / "older", attention("q_proj"))
    (tmp_path / "older" / ADAPTER_FILE).rename(tmp_path / "older" / "adapter_model.bin")
    with pytest.raises(ConversionError, match="safe_serialization=True"):
        convert_adapters(str(tmp_path / "older"), str(tmp_path / "run"), [])


def config_beside(tmp_path, name, *keys):
    """The config of a run that begins from a golden model's folder."""
    write_folder(read_golden(name), tmp_path / "folder")
    more = ["cpu_devices=1", "steps=1", "max_target_length=16", "per_device_batch_size=1", "eval_interval=0",
            "dataset_type=synthetic", "run_name=run", "enable_tensorboard=false", f"base_output_directory={tmp_path}",
            *keys]  # fmt: skip
    return resolve_config("base.yml", [f"load_hf={tmp_path}/folder", *more])


def untrained_run(tmp_path, name, *keys):
    config = config_beside(tmp_path, name, *keys)
    shapes = build_model(config.model, config.compute).abstract_params
    params = jax.tree.map(lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), shapes)
    return write_run(config, params, tmp_path / "run", name)


def test_adapters_that_share_a_tensor_have_no_place(tmp_path):
    run = untrained_run(tmp_path, "mixtral", "lora_rank=2")
    with pytest.raises(ConversionError) as caught:
        convert_adapters(str(run), str(tmp_path / "out"), [])
    assert all(word in str(caught.value) for word in ("group_0/block_0/mlp/experts/gate", "lora_module_path", "merged"))
    assert not (tmp_path / "out").exists()


def test_a_run_without_adapters_says_so_and_a_destination_is_needed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_adapters(tmp_path / "given", attention("q_proj"))
    with pytest.raises(ConfigError, match="needs a destination"):
        convert_adapters("given", None, [])
    run = untrained_run(tmp_path, "llama", "lora_rank=0")
    with pytest.raises(ConversionError, match="has no adapters"):
        convert_adapters(str(run), "out", [])
    with pytest.raises(ConversionError, match=r"no config\.yml"):
        convert_adapters(str(tmp_path), "out", [])


def test_adapters_begin_from_a_folder_and_are_loaded_again(tmp_path):
    run = run_train(config_beside(tmp_path, "llama", "lora_rank=2", "learning_rate=0.01")).run_directory
    config = resolve_config(str(run), [])
    model = build_model(config.model, config.compute)
    params = load_parameters(run, model, jax.tree.map(lambda _: host_sharding(), model.abstract_params))
    moved = leaf_paths(params)["group_0/layers/block_0/attention/query/lora_b"]
    assert np.abs(moved).max() > 0
