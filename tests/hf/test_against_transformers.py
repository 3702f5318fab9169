"""The golden files against transformers itself, and folders that maxlite writes opened by it."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from scripts.make_goldens import (  # noqa: E402
    build_config,
    greedy_of,
    logits_of,
    movements,
    open_folder,
)
from scripts.make_goldens import write_folder as write_reference  # noqa: E402
from tests.hf.cases import CASES, LONG_PROMPTS, kept_columns  # noqa: E402
from tests.hf.folders import all_logits, export_folder, load_folder, read_golden, write_folder  # noqa: E402
from tests.hf.noise import drift  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

# The same program, perhaps on another machine.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def quiet_and_on_one_thread():
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def assert_logits_are_golden(model, golden) -> None:
    for index, prompt in enumerate(LONG_PROMPTS):
        found = logits_of(model, prompt)[:, kept_columns(index)]
        np.testing.assert_allclose(found, golden.logits[index], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_golden_files_are_what_transformers_computes(name, tmp_path):
    golden = read_golden(name)
    tensors = write_reference(build_config(CASES[name]), tmp_path)
    assert {key: tensor.shape for key, tensor in tensors.items()} == golden.shapes
    config = json.loads((tmp_path / "config.json").read_text())
    assert {**config, "transformers_version": ""} == {**golden.config, "transformers_version": ""}
    model = open_folder(tmp_path)
    assert_logits_are_golden(model, golden)
    assert greedy_of(model, golden.prompt)[0] == golden.greedy


@pytest.mark.parametrize("name", CASES)
def test_the_older_spelling_is_the_same_model(name, tmp_path):
    golden = read_golden(name)
    write_folder(golden, tmp_path, golden.old_config)
    assert_logits_are_golden(open_folder(tmp_path), golden)


@pytest.mark.parametrize("name", CASES)
def test_every_setting_under_test_moves_the_logits(name):
    moved = movements(name)
    assert moved, "a case must name what it tests"
    assert not {what: distance for what, distance in moved.items() if distance < 0.05}


@pytest.mark.parametrize("name", CASES)
def test_transformers_opens_what_maxlite_writes(name, tmp_path):
    golden = read_golden(name)
    write_folder(golden, tmp_path / "given")
    export_folder(load_folder(tmp_path / "given"), tmp_path / "exported")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not {kind: found for kind, found in info.items() if found}
    assert type(model).__name__ == golden.config["architectures"][0]
    assert model.dtype == torch.float32
    assert_logits_are_golden(model.eval(), golden)


@pytest.mark.parametrize("name", ["llama", "gemma", "gemma2", "mixtral", "deepseek-v3", "gpt-oss", "olmo2"])
def test_bfloat16_stays_close_to_that_of_transformers(name, tmp_path):
    golden = read_golden(name)
    write_folder(golden, tmp_path)
    theirs = open_folder(tmp_path, torch.bfloat16)
    ours = all_logits(load_folder(tmp_path, "bfloat16"))
    assert drift(ours, [logits_of(theirs, prompt) for prompt in LONG_PROMPTS]) <= 1.5 * golden.bfloat16_drift
