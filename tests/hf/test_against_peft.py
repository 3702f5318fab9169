"""Adapters that PEFT has made compute the same here, those written here do there, and merged they stay equal."""

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from safetensors.numpy import load_file  # noqa: E402

from maxlite.hf.convert import host_sharding  # noqa: E402
from maxlite.hf.load import load_parameters  # noqa: E402
from maxlite.hf.peft_json import ADAPTER_FILE  # noqa: E402
from maxlite.launcher.adapters import convert_adapters  # noqa: E402
from maxlite.launcher.convert import convert  # noqa: E402
from maxlite.launcher.resolve import resolve_config  # noqa: E402
from maxlite.model.build import build_model  # noqa: E402
from scripts.make_goldens import logits_of, open_folder  # noqa: E402
from tests.hf.cases import LONG_PROMPTS  # noqa: E402
from tests.hf.folders import Loaded, all_logits, read_golden, write_folder  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 2e-5
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES = {
    "llama": [*ATTENTION, "gate_proj", "up_proj", "down_proj"],
    "qwen3": ["q_proj", "v_proj"],
    "gemma2": [*ATTENTION, "down_proj"],
    "mixtral": ATTENTION,
    "deepseek-v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
}


@pytest.fixture(autouse=True)
def quiet_and_on_one_thread():
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def our_logits(run) -> list[np.ndarray]:
    config = resolve_config(str(run), ["dtype=float32"])
    model = build_model(config.model, config.compute)
    shardings = jax.tree.map(lambda _: host_sharding(), model.abstract_params)
    return all_logits(Loaded(config, model, load_parameters(run, model, shardings), None))


def assert_equal(model, expected: list[np.ndarray]) -> None:
    for prompt, logits in zip(LONG_PROMPTS, expected, strict=True):
        np.testing.assert_allclose(logits_of(model, prompt), logits, atol=TOLERANCE * np.abs(logits).max(), rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_peft_and_maxlite_agree_both_ways(name, tmp_path):
    base, given, run = (tmp_path / part for part in ("base", "given", "run"))
    write_folder(read_golden(name), base)
    torch.manual_seed(0)
    # Not fresh: both matrices are drawn, and so the adapters count.
    asked = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=CASES[name], task_type="CAUSAL_LM", init_lora_weights=False
    )
    plain = [logits_of(open_folder(base), prompt) for prompt in LONG_PROMPTS]
    model = peft.get_peft_model(open_folder(base), asked).eval()
    model.save_pretrained(given)
    convert_adapters(str(given), str(run), [f"load_hf={base}"])
    found = our_logits(run)
    assert_equal(model, found)
    assert all(np.abs(logits - without).max() > 0.05 for logits, without in zip(found, plain, strict=True))

    convert_adapters(str(run), str(tmp_path / "written"), [])
    before, after = (load_file(folder / ADAPTER_FILE) for folder in (given, tmp_path / "written"))
    assert before.keys() == after.keys()
    assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())
    opened = peft.PeftModel.from_pretrained(open_folder(base), tmp_path / "written").eval()
    assert_equal(opened, found)

    convert(str(run), str(tmp_path / "merged"), [], "5GB", {"explain": False, "check": False})
    assert_equal(open_folder(tmp_path / "merged"), found)


def test_adapters_of_some_kinds_of_layers_name_their_modules(tmp_path):
    """Gemma 2 has a window in every second layer, and each kind is a block of its own."""
    base, run = tmp_path / "base", tmp_path / "run"
    write_folder(read_golden("gemma2"), base)
    names = ["model.layers.1.self_attn.q_proj"]
    torch.manual_seed(0)
    asked = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)
    model = peft.get_peft_model(open_folder(base), asked).eval()
    model.save_pretrained(tmp_path / "given")
    convert_adapters(str(tmp_path / "given"), str(run), [f"load_hf={base}"])
    assert resolve_config(str(run), []).compute.lora_module_path == "group_0/block_1/attention/query"
    convert_adapters(str(run), str(tmp_path / "written"), [])
    opened = peft.PeftModel.from_pretrained(open_folder(base), tmp_path / "written").eval()
    assert sorted(opened.peft_config["default"].target_modules) == names
    assert_equal(opened, our_logits(run))
