"""Every family against what transformers computed, without it: logits, cached greedy text, both ways through a file.

`scripts/make_goldens.py` writes what is compared with; tests/hf/cases.py holds the models.
"""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from maxlite.decode.generate import BatchShape, Generator, Programs, padded_length
from maxlite.decode.sampling import build_sampler
from tests.hf.cases import CASES, kept_columns
from tests.hf.folders import (
    GOLDEN,
    all_logits,
    export_folder,
    load_folder,
    read_golden,
    read_tensors,
    write_folder,
)
from tests.hf.noise import drift

# Logits have a deviation of one. In float32 transformers itself is up to 8e-6 away from float64 in these models.
TOLERANCE = 2e-5
# What decoding has a cache or a step of its own for; the other cases wait for the slow run.
DECODED = (
    "llama", "mistral-window", "qwen3", "qwen3-next", "gemma2", "gemma4", "llama4-scout", "deepseek-v3", "gpt-oss",
)  # fmt: skip
# Their settings are those of other cases, taken together or left out; their logits wait for the slow run.
COMBINED = ("mixtral-window", "gemma3-unscaled", "olmo3-unscaled", "deepseek-v2-unscaled")
# Name of a case -> model_type, class and a part of such folders besides the text model.
MULTIMODAL = {
    "gemma3": ("gemma3", "Gemma3ForConditionalGeneration", "vision_tower.post_layernorm.weight"),
    "llama4-scout": ("llama4", "Llama4ForConditionalGeneration", "vision_model.class_embedding"),
}


@pytest.fixture(scope="module")
def open_case(tmp_path_factory):
    """open_case(name): a case's golden file, its folder, and the model that maxlite makes of that."""
    opened: dict[str, tuple] = {}

    def open_once(name: str):
        if name not in opened:
            golden, folder = read_golden(name), tmp_path_factory.mktemp(name)
            write_folder(golden, folder)
            opened[name] = (golden, folder, load_folder(folder))
        return opened[name]

    return open_once


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in COMBINED)) for name in CASES])
def test_logits(name, open_case):
    golden, _, loaded = open_case(name)
    for index, found in enumerate(all_logits(loaded)):
        np.testing.assert_allclose(found[:, kept_columns(index)], golden.logits[index], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in DECODED)) for name in CASES]
)
def test_cached_greedy_decoding(name, open_case):
    golden, _, (config, model, params, _) = open_case(name)
    shape = BatchShape(1, padded_length(len(golden.prompt)), len(golden.greedy))
    # Arrays of the host are taken apart without a program for each of their shapes.
    layers = model.unstack(jax.tree.map(np.asarray, params))
    generator = Generator(Programs(model, build_sampler(config.decode), (), shape), layers)
    drawn = np.concatenate(list(generator.stream([golden.prompt])), axis=1)
    assert drawn[0].tolist() == golden.greedy


@pytest.mark.parametrize("name", CASES)
def test_round_trip(name, open_case, tmp_path):
    golden, folder, loaded = open_case(name)
    exported = tmp_path / "exported"
    export_folder(loaded, exported)
    given, found = read_tensors(folder), read_tensors(exported)
    assert found.keys() == given.keys()
    for tensor, values in given.items():
        assert found[tensor].dtype == values.dtype, tensor
        np.testing.assert_array_equal(found[tensor], values, err_msg=tensor)
    again = load_folder(exported)
    assert again.config.model == loaded.config.model
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)


@pytest.mark.parametrize("name", CASES)
def test_the_spelling_of_older_files_is_the_same_model(name, open_case, tmp_path):
    golden, _, loaded = open_case(name)
    write_folder(golden, tmp_path / "old", golden.old_config)
    assert load_folder(tmp_path / "old").config.model == loaded.config.model


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_text_part_of_a_multimodal_folder(name, open_case, tmp_path):
    golden, folder, loaded = open_case(name)
    model_type, architecture, other = MULTIMODAL[name]
    tensors = {f"language_model.{key}": tensor for key, tensor in read_tensors(folder).items()}
    save_file({**tensors, other: np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    config = {"model_type": model_type, "architectures": [architecture], "text_config": golden.config}
    config |= {"vision_config": {"hidden_size": 4}, "dtype": "float32", "boi_token_index": 120}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_folder(tmp_path)
    assert found.config.model == loaded.config.model
    jax.tree.map(np.testing.assert_array_equal, found.params, loaded.params)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_bfloat16_drifts_no_further_than_in_transformers(name, open_case):
    golden, folder, loaded = open_case(name)
    lower = all_logits(load_folder(folder, "bfloat16"))
    assert drift(lower, all_logits(loaded)) <= 1.1 * golden.bfloat16_drift + 1e-4


def test_every_case_has_its_golden_files_and_none_is_left_over():
    assert {file.name for file in GOLDEN.iterdir()} == {f"{name}.{kind}" for name in CASES for kind in ("json", "npz")}


def test_the_comparison_notices_one_wrong_weight(open_case):
    golden, _, loaded = open_case("llama")
    damaged = jax.tree.map(np.array, loaded.params)
    damaged["final_norm"]["scale"][7] += 0.01
    found = all_logits(loaded._replace(params=damaged))[0]
    assert np.abs(found[:, kept_columns(0)] - golden.logits[0]).max() > 10 * TOLERANCE
