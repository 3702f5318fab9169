"""Folder -> run -> folder, by the command's own function, and what is said when that cannot be."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from maxlite.checkpoint.restore import parameter_shapes
from maxlite.decode.run import run_decode
from maxlite.errors import CheckpointError, ConfigError, ConversionError
from maxlite.launcher.convert import convert, parse_size
from maxlite.launcher.resolve import resolve_config
from maxlite.train.run import run_train
from tests.hf.folders import read_golden, read_tensors, write_folder
from tests.reference import STORIES

NO_FLAGS = {"explain": False, "check": False}


def run_convert(source, destination, *overrides, max_shard_size="5GB", **flags):
    target = None if destination is None else str(destination)
    convert(str(source), target, list(overrides), max_shard_size, {**NO_FLAGS, **flags})


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tiny Llama's folder, without a tokenizer."""
    write_folder(read_golden("llama"), tmp_path / "tiny")
    return tmp_path / "tiny"


def assert_same_tensors(first: Path, second: Path) -> None:
    left, right = read_tensors(first), read_tensors(second)
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype and value.tobytes() == right[name].tobytes(), name


def test_a_folder_comes_back_as_it_was(tmp_path):
    run_convert(STORIES, tmp_path / "run")
    run_convert(tmp_path / "run", tmp_path / "back")
    assert_same_tensors(STORIES, tmp_path / "back")
    before, after = (json.loads((path / "config.json").read_text()) for path in (STORIES, tmp_path / "back"))
    said = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"}
    said |= {"rms_norm_eps", "tie_word_embeddings", "bos_token_id", "intermediate_size", "max_position_embeddings"}
    assert {name: before[name] for name in said} == {name: after[name] for name in said}
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        assert json.loads((tmp_path / "back" / name).read_text()) == json.loads((STORIES / name).read_text())


def test_a_run_says_all_that_is_needed_to_go_on(tmp_path):
    run_convert(STORIES, tmp_path / "run")
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    shutil.move(tmp_path / "run", moved)
    config = resolve_config(str(moved), [])
    assert config.model == resolve_config("base.yml", [f"model={moved}/model.yml"]).model
    assert config.data.tokenizer_path == str(moved) and config.checkpoint.load_hf is None
    assert config.run.model == "stories260K" and config.compute.weight_dtype == "float32"
    assert set(parameter_shapes(moved)) == set(parameter_shapes(moved / "checkpoints" / "0"))


def test_training_begins_from_an_imported_run_and_does_not_resume_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_convert(STORIES, "imported")
    keys = ["cpu_devices=1", "steps=1", "max_target_length=32", "per_device_batch_size=1", "eval_interval=0",
            "dataset_type=synthetic", "enable_tensorboard=false"]  # fmt: skip
    with pytest.raises(CheckpointError, match="load_parameters_path=.*imported"):
        run_train(resolve_config("imported", keys))
    begin = ["model=imported/model.yml", "load_parameters_path=imported", "run_name=next", "learning_rate=0", *keys]
    result = run_train(resolve_config("base.yml", begin))
    before = load_file(STORIES / "model.safetensors")
    np.testing.assert_array_equal(result.params["final_norm"]["scale"], before["model.norm.weight"])
    # What the model came with goes from run to run.
    assert Path("runs/next/tokenizer.json").is_file() and Path("runs/next/hugging_face/config.json").is_file()


def test_text_goes_through_the_tokenizer_that_came_with_the_parameters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_convert(STORIES, "imported")
    begin = ["model=imported/model.yml", "load_parameters_path=imported"]
    assert resolve_config("base.yml", begin).data.tokenizer_path == "imported"
    assert resolve_config("base.yml", [begin[0], "load_parameters_path=imported/checkpoints/0"]).data.tokenizer_path
    other = [*begin, "tokenizer_path=null", "dataset_type=synthetic"]
    assert resolve_config("base.yml", other).data.tokenizer_path is None
    (tmp_path / "imported" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="imported has no tokenizer.json"):
        resolve_config("base.yml", begin)


def test_a_folder_without_a_tokenizer_is_not_fed_bytes(folder, tmp_path):
    with pytest.raises(ConfigError, match="no tokenizer.json.*tokenizer_path=.*dataset_type=synthetic"):
        resolve_config("base.yml", [f"load_hf={folder}", "vocab_size=300"])
    assert resolve_config("base.yml", [f"load_hf={folder}", "dataset_type=synthetic"]).model.vocab_size == 128
    run_convert(folder, tmp_path / "run")
    begin = [f"model={tmp_path}/run/model.yml", f"load_parameters_path={tmp_path}/run"]
    with pytest.raises(ConfigError, match="run has no tokenizer.json"):
        resolve_config("base.yml", [*begin, "vocab_size=300"])
    # Decoding needs no text, whatever form it is asked in.
    for path, given in ((str(folder), []), ("base.yml", [f"load_hf={folder}"]), ("base.yml", begin)):
        assert resolve_config(path, given, prompts_may_be_ids=True).data.dataset_type == "synthetic"


def test_a_checkpoint_of_a_run_decodes(folder, tmp_path):
    run_convert(folder, tmp_path / "run")
    place = tmp_path / "run" / "checkpoints" / "0"
    config = resolve_config(str(place), [], prompts_may_be_ids=True)
    assert config.checkpoint.load_parameters_path == str(place) and config.model.vocab_size == 128


def test_tied_embeddings_stay_one_tensor_through_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ["cpu_devices=1", "steps=3", "max_target_length=32", "per_device_batch_size=1", "eval_interval=0",
                 "dataset_type=synthetic", "run_name=trained", "enable_tensorboard=false"]  # fmt: skip
    result = run_train(resolve_config("base.yml", [f"load_hf={STORIES}", *overrides]))
    run_convert("runs/trained", "out")
    tensors, before = load_file("out/model.safetensors"), load_file(STORIES / "model.safetensors")
    assert "lm_head.weight" not in tensors and tensors.keys() == before.keys()
    assert json.loads(Path("out/config.json").read_text())["tie_word_embeddings"] is True
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], result.params["embedding"]["table"])
    assert not np.array_equal(tensors["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert Path("out/tokenizer.json").read_bytes() == (STORIES / "tokenizer.json").read_bytes()


def test_shards_have_the_size_and_dtype_that_was_asked_for(folder, tmp_path):
    run_convert(folder, tmp_path / "run")
    run_convert(tmp_path / "run", tmp_path / "out", "dtype=bfloat16", max_shard_size="40KB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert len(files) > 1 and {file.name for file in files} == set(index["weight_map"].values())
    tensors = read_tensors(tmp_path / "out")
    assert all(value.dtype.name == "bfloat16" for value in tensors.values())
    assert sum(value.nbytes for value in tensors.values()) == index["metadata"]["total_size"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    # What bfloat16 holds, it gives back to the bit.
    run_convert(tmp_path / "out", tmp_path / "run16")
    assert resolve_config(str(tmp_path / "run16"), []).compute.weight_dtype == "bfloat16"
    run_convert(tmp_path / "run16", tmp_path / "out16")
    assert_same_tensors(tmp_path / "out", tmp_path / "out16")


@pytest.fixture(scope="module")
def trained_on_bytes(tmp_path_factory) -> Path:
    """A run that was trained on bytes of text."""
    place = tmp_path_factory.mktemp("bytes")
    (place / "text.txt").write_text("some words to train on, again and again\n" * 40)
    overrides = ["cpu_devices=1", "smoke=true", "steps=1", "eval_interval=0", f"dataset_path={place}/text.txt",
                 "enable_tensorboard=false", "run_name=small", f"base_output_directory={place}/runs"]  # fmt: skip
    return run_train(resolve_config("base.yml", overrides)).run_directory


def test_a_trained_run_exports_with_the_byte_tokenizer(trained_on_bytes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_convert(trained_on_bytes, "out")
    settings = json.loads(Path("out/config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"]
    assert (settings["bos_token_id"], settings["eos_token_id"]) == (256, 257)
    config = resolve_config("out", [])
    assert config.data.tokenizer_path == "out" and config.model == resolve_config(str(trained_on_bytes), []).model


def test_a_checkpoint_of_a_run_exports_too(folder, tmp_path):
    run_convert(folder, tmp_path / "run")
    run_convert(tmp_path / "run" / "checkpoints" / "0", tmp_path / "out")
    assert_same_tensors(folder, tmp_path / "out")
    with pytest.raises(CheckpointError, match="checkpoints/7"):
        run_convert(tmp_path / "run" / "checkpoints" / "7", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_explain_names_every_tensor_and_writes_nothing(folder, tmp_path, capsys):
    before = sorted(tmp_path.rglob("*"))
    run_convert(folder, None, explain=True)
    lines = capsys.readouterr().out.splitlines()
    for name, value in read_tensors(folder).items():
        (line,) = [line for line in lines if line.split()[0] == name]
        assert "x".join(map(str, value.shape)) in line
    assert sorted(tmp_path.rglob("*")) == before
    run_convert(folder, tmp_path / "run")
    capsys.readouterr()
    run_convert(tmp_path / "run", None, explain=True)
    assert capsys.readouterr().out.splitlines() == lines


def change(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def rewrite(folder, change_tensors):
    tensors = load_file(folder / "model.safetensors")
    change_tensors(tensors)
    save_file(tensors, folder / "model.safetensors")


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


GATE = "model.layers.1.mlp.gate_proj.weight"
# What is done to a sound folder, and the words that its refusal must hold.
BROKEN = {
    "stray tensor": (
        lambda f: rewrite(f, lambda t: t.update({"model.layers.0.foo.weight": np.ones(3, np.float32)})),
        ["model.layers.0.foo.weight", "model.safetensors"],
    ),
    "missing tensor": (lambda f: rewrite(f, lambda t: t.pop(GATE)), [GATE, "missing"]),
    "wrong shape": (
        lambda f: rewrite(f, lambda t: t.update({GATE: np.ones((96, 60), np.float32)})),
        [GATE, "[96, 60]", "[96, 64]"],
    ),
    "config and weights disagree": (lambda f: change(f, intermediate_size=112), [GATE, "[96, 64]", "[112, 64]"]),
    "untied, but no head": (
        lambda f: rewrite(f, lambda t: t.pop("lm_head.weight")),
        ["lm_head.weight", "missing"],
    ),
    "tied, but another head": (lambda f: change(f, tie_word_embeddings=True), ["lm_head.weight", "tied"]),
    "rope type": (
        lambda f: change(f, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        ["config.json", "spiral"],
    ),
    "activation": (lambda f: change(f, hidden_act="swoosh"), ["config.json", "hidden_act", "swoosh"]),
    "architecture": (
        lambda f: change(f, model_type="falcon", architectures=["FalconForCausalLM"]),
        ["config.json", "falcon", "llama"],
    ),
    "unknown key": (lambda f: change(f, residual_multiplier=0.5), ["config.json", "residual_multiplier"]),
    "cut short": (cut, ["model.safetensors"]),
    "no json": (lambda f: (f / "config.json").write_text("{"), ["config.json", "JSON"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["safetensors"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_bad_folder_is_one_error_and_leaves_nothing(case, folder, tmp_path):
    spoil, words = BROKEN[case]
    spoil(folder)
    with pytest.raises(ConversionError) as caught:
        run_convert(folder, tmp_path / "run")
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["tiny"]


def test_a_missing_shard_is_named(folder, tmp_path):
    run_convert(folder, tmp_path / "run")
    run_convert(tmp_path / "run", tmp_path / "out", max_shard_size="40KB")
    lost = sorted(tmp_path.glob("out/*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ConversionError, match=lost.name):
        run_convert(tmp_path / "out", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_destination_that_exists_is_left_alone(folder, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("x")
    with pytest.raises(ConversionError, match="run exists"):
        run_convert(folder, tmp_path / "run")
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["precious"]


def test_what_is_no_source_is_said(tmp_path):
    with pytest.raises(ConversionError, match="neither"):
        run_convert(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match="destination"):
        run_convert(STORIES, None)
    with pytest.raises(ConfigError, match="float16"):
        run_convert(STORIES, tmp_path / "out", "dtype=float16")


def test_a_model_that_no_family_has_is_refused_by_its_keys(trained_on_bytes, tmp_path):
    # The key that no family has changes no parameter.
    shutil.copytree(trained_on_bytes, tmp_path / "odd")
    file = tmp_path / "odd" / "config.yml"
    text, count = re.subn(r"(?m)^attn_logits_soft_cap: null", "attn_logits_soft_cap: 5.0", file.read_text())
    assert count == 1
    file.write_text(text)
    with pytest.raises(ConversionError, match="attn_logits_soft_cap"):
        run_convert(tmp_path / "odd", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("40KB", 40_000), ("1.5M", 1_500_000), ("7", 7), ("2 gb", 2 * 10**9)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "big", "0", "-3KB", "3XB"])
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match="max-shard-size"):
        parse_size(text)


def test_a_vocabulary_that_no_axis_divides_is_copied(tmp_path, monkeypatch):
    """131 tokens on 8 devices: the logits have 131 columns and are those of one device."""
    golden = read_golden("llama-vocab")
    write_folder(golden, tmp_path / "odd")
    monkeypatch.chdir(tmp_path)
    ids = ",".join(str(token) for token in golden.prompt)
    found = []
    for tensor, fsdp in ((1, 1), (2, 4)):
        degrees = [f"ici_tensor_parallelism={tensor}", f"ici_fsdp_parallelism={fsdp}", f"cpu_devices={tensor * fsdp}"]
        keys = [f"prompt_ids={ids}", "max_new_tokens=4", "logits_path=logits.npz", *degrees]
        run_decode(resolve_config("odd", keys), "odd", json_output=True)
        with np.load("logits.npz") as file:
            found.append(file["logits_0"])
    assert found[0].shape[1] == 131
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
