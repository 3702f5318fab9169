"""The decode command, from a run directory to what it prints."""

import dataclasses

import jax
import numpy as np
import pytest

from maxlite.config.load import load_config
from maxlite.data.tokenizer import ByteTokenizer
from maxlite.decode import run as decode_run
from maxlite.decode.output import printable
from maxlite.decode.run import run_decode, sample_text
from maxlite.errors import CheckpointError, ConfigError, OutOfMemoryError
from maxlite.model.build import build_model
from maxlite.parallel.mesh import build_mesh
from tests.reference import STORIES_KEYS, stories_generations, stories_logits, stories_params

PROMPTS = "prompt_ids=9,8,7;5,4,3,2,1,11,12,13;17"
EIGHT = PROMPTS + ";0,5;2,3,5;4;6,5;7,5,9,9"
FREE = ("prompt=ab", "max_new_tokens=12", "ignore_eos=true")
WEIGHTED = ("prompt_ids=1,2;1,2;9,8,7", "max_new_tokens=12", "decode_sampling_strategy=weighted")


@pytest.fixture(scope="module")
def stories_run(make_run):
    return make_run(
        load_config("base.yml", [*STORIES_KEYS, "cpu_devices=1", "jax_cache_dir=null"], {}), stories_params()
    )


def test_a_trained_model_writes_what_another_program_writes(stories_run, decode):
    expected = stories_generations()
    prompts = ";".join(",".join(map(str, prompt)) for prompt, _ in expected)
    rows = decode(stories_run, f"prompt_ids={prompts}", "max_new_tokens=256", "ignore_eos=true")
    for row, (prompt, ids) in zip(rows, expected, strict=True):
        assert row["prompt_ids"] == prompt
        assert row["ids"][: len(ids)] == ids
        assert (row["text"], row["finish_reason"]) == (None, "length")


def test_a_trained_models_logits_are_those_of_another_program(stories_run, decode, tmp_path):
    expected = stories_logits()
    prompts = ";".join(",".join(map(str, ids)) for ids, _ in expected)
    rows = decode(stories_run, f"prompt_ids={prompts}", "max_new_tokens=0", f"logits_path={tmp_path / 'logits.npz'}")
    assert [row["ids"] for row in rows] == [[], [], []]
    with np.load(tmp_path / "logits.npz") as file:
        for index, (_, logits) in enumerate(expected):
            np.testing.assert_allclose(file[f"logits_{index}"], logits, atol=1e-4)


def test_json_of_a_text_prompt(text_run, decoded):
    (row,) = decoded(text_run, *FREE)
    assert row["prompt"] == "ab"
    assert row["prompt_ids"] == [256, 97, 98]
    assert len(row["ids"]) == 12
    assert row["text"] == bytes(token for token in row["ids"] if token < 256).decode(errors="replace")
    assert row["finish_reason"] == "length"


def test_the_end_mark_ends_a_text(text_run, decode, decoded, monkeypatch):
    (free,) = decoded(text_run, *FREE)
    end = free["ids"][3]
    monkeypatch.setattr(decode_run.build_tokenizer(load_config(str(text_run)).data).__class__, "eos_id", end)
    (row,) = decode(text_run, "prompt=ab", "max_new_tokens=12")
    assert row["ids"] == free["ids"][: free["ids"].index(end)]
    assert row["finish_reason"] == "eos"
    (ignored,) = decode(text_run, *FREE)
    assert ignored == free


def test_text_and_speed_on_standard_output(text_run, capsys):
    run_decode(load_config(str(text_run), ["prompt=ab", "max_new_tokens=5"], {}), str(text_run), json_output=False)
    shown = capsys.readouterr().out
    text, *_, speed = shown.removesuffix("\n").split("\n")
    assert text.startswith("ab")
    assert speed.startswith("prefill: 3 tokens, ")
    assert "compiling: " in speed
    # Nothing of its cache is rounded.
    assert "Cache: " not in shown


def test_rows_beyond_a_batch_follow_in_the_next(tiny_run, decode, decoded):
    assert decode(tiny_run, *WEIGHTED, "per_device_batch_size=2") == decoded(tiny_run, *WEIGHTED)


def test_seeds(tiny_run, decode, decoded):
    first, second, third = (row["ids"] for row in decoded(tiny_run, *WEIGHTED))
    assert first != second
    assert [first, second, third] != [row["ids"] for row in decode(tiny_run, *WEIGHTED, "decode_seed=1")]


@pytest.mark.parametrize(
    ("degrees", "prompts"),
    [
        (["ici_fsdp_parallelism=8"], PROMPTS),
        (["ici_fsdp_parallelism=8"], EIGHT),
        (["ici_tensor_parallelism=8", "ici_fsdp_parallelism=1"], PROMPTS),
        (["ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"], EIGHT),
        (["ici_pipeline_parallelism=2", "ici_context_parallelism=4", "ici_fsdp_parallelism=1"], PROMPTS),
    ],
)
def test_a_mesh_draws_the_ids_of_one_device(tiny_run, decode, decoded, degrees, prompts):
    expected = decoded(tiny_run, prompts, "max_new_tokens=10")
    assert decode(tiny_run, prompts, "max_new_tokens=10", "cpu_devices=8", *degrees) == expected


@pytest.mark.parametrize(
    ("length", "new", "fits"), [(7, 0, True), (7, 1, True), (8, 0, True), (7, 2, False), (9, 0, False)]
)
def test_the_cache_holds_prompt_and_new_tokens(tiny_run, decode, length, new, fits):
    overrides = ["max_target_length=8", "prompt_ids=" + ",".join(["3"] * length), f"max_new_tokens={new}"]
    if fits:
        assert len(decode(tiny_run, *overrides)[0]["ids"]) == new
        return
    with jax.log_compiles(False), pytest.raises(ConfigError) as error:
        decode(tiny_run, *overrides)
    for number in (f"{length} tokens", f"max_new_tokens={new}", f"make {length + new}", "max_target_length=8"):
        assert number in str(error.value)


def test_without_a_given_cache_the_model_is_the_limit(tiny_run, decode):
    # The run trained on rows of 32 tokens; the model may be asked for 4096.
    assert len(decode(tiny_run, "prompt_ids=1,2,3", "max_new_tokens=40")[0]["ids"]) == 40
    with pytest.raises(
        ConfigError, match="prompt 2 does not fit: 3 tokens.* make 4097, but max_position_embeddings=4096"
    ):
        decode(tiny_run, "prompt_ids=1;1,2,3", "max_new_tokens=4094")
    with pytest.raises(ConfigError, match="a prompt of at most 32 tokens"):
        decode(tiny_run, "prompt_ids=" + ",".join(["1"] * 33), "max_position_embeddings=32", "max_new_tokens=0")


def test_parameters_of_another_run(tiny_run, tiny_config, make_run, decode, capsys):
    ids = ["prompt_ids=1,2", "max_new_tokens=4"]
    expected = decode(tiny_run, *ids)
    sizes = ["num_decoder_layers=1", *(f"{key}=8" for key in ("num_query_heads", "num_kv_heads", "head_dim"))]
    config = tiny_config(*sizes, "cpu_devices=1", "jax_cache_dir=null", *ids, f"load_parameters_path={tiny_run}")
    run_decode(config, "base.yml", json_output=False)
    shown = ",".join(map(str, expected[0]["ids"])).replace(",", " ")
    assert f" 1 2 -> {shown}\n" in capsys.readouterr().out
    # A run that began from others' parameters has its own, unless they are asked for now.
    zeros = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype), build_model(config.model, config.compute).abstract_params
    )
    follower = make_run(config, zeros)
    assert decode(follower, *ids)[0]["ids"] == [0, 0, 0, 0]
    assert decode(follower, *ids, f"load_parameters_path={tiny_run}/checkpoints/1") == expected


def test_no_parameters(tiny_config, tiny_run, tmp_path, decode):
    with pytest.raises(ConfigError, match=r"base\.yml is a config without parameters"):
        run_decode(tiny_config("prompt_ids=1", "max_new_tokens=1"), "base.yml", json_output=True)
    with pytest.raises(CheckpointError, match="there is no such folder"):
        decode(tiny_run, "prompt_ids=1", f"load_parameters_path={tmp_path / 'missing'}")
    with pytest.raises(CheckpointError, match="embedding/table"):
        decode(tiny_run, "prompt_ids=1", "vocab_size=72")


def test_out_of_memory_names_what_helps(tiny_run, decode, monkeypatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    monkeypatch.setattr(decode_run, "load_parameters", fail)
    with pytest.raises(OutOfMemoryError, match="(?s)allocating 9 bytes.*per_device_batch_size=1"):
        decode(tiny_run, "prompt_ids=1")


def test_sample_of_a_model_in_memory(tiny_config, text_run, decoded, noisy_params):
    sizes = ("num_decoder_layers=1", "vocab_size=264")
    config = tiny_config(*sizes, "dataset_type=text", "cpu_devices=1", "prompt=ab", "max_new_tokens=5")
    model = build_model(config.model, config.compute)
    mesh = build_mesh(config.parallel, jax.devices()[:1])
    (row,) = decoded(text_run, *FREE)
    params = noisy_params(model)
    assert sample_text(config, mesh, model, params) == printable("ab" + ByteTokenizer().decode(row["ids"][:5]))
    assert sample_text(tiny_config(), mesh, model, {}) is None
    # A row of training, and even the model's longest sequence, may be shorter than the sample.
    given = {**config.sources, "max_target_length": "command line"}
    short = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, max_target_length=4),
        model=dataclasses.replace(config.model, max_position_embeddings=5),
        sources=given,
    )
    two = row["ids"][:2]
    assert sample_text(short, mesh, model, params) == printable("ab" + ByteTokenizer().decode(two))
    full = dataclasses.replace(short, model=dataclasses.replace(config.model, max_position_embeddings=3))
    assert sample_text(full, mesh, model, params) is None
