"""Writes tests/golden/hf: what transformers computes for every tiny model of tests/hf/cases.py.

Needs torch and transformers. `python scripts/make_goldens.py [CASE ...]` from the root of the repository. A case is two
files: NAME.json (config.json as transformers writes it and as its version 4 wrote it, the tensors of the file, greedy
continuation, bfloat16 drift, versions) and NAME.npz (logits).
"""

import json
import math
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.hf.cases import CASES, LONG_PROMPTS, SHORT_PROMPTS, Case, kept_columns  # noqa: E402
from tests.hf.noise import drift, noisy_tensors  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "hf"
NEW_TOKENS = 20
# Two programs add in different orders: a greedy choice by less than this could go either way.
LEAST_MARGIN = 0.02


def build_config(case: Case, changes: Mapping[str, Any] | None = None) -> transformers.PreTrainedConfig:
    """The config object of a case, some settings changed."""
    config_class = getattr(transformers, case.config_class)
    # Config classes write into the dicts that they are given.
    settings = json.loads(json.dumps({**case.settings, **(changes or {})}))
    return config_class(**settings)


def write_folder(config: transformers.PreTrainedConfig, folder: Path, silenced: str | None = None) -> dict[str, Any]:
    """Writes a model of noise as transformers would, and returns its tensors. silenced: a part of names to zero."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    shapes = {name: tensor.shape for name, tensor in sorted(load_file(folder / "model.safetensors").items())}
    tensors = noisy_tensors(shapes, config.model_type)
    if silenced is not None:
        chosen = [name for name in tensors if silenced in name]
        assert chosen, f"no tensor is called {silenced}"
        tensors |= {name: np.zeros_like(tensors[name]) for name in chosen}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def open_folder(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a folder, and nothing missing or left over in its files."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    problems = {kind: found for kind, found in info.items() if found}
    assert not problems, problems
    return model.eval()


def logits_of(model: Any, prompt: Sequence[int]) -> np.ndarray:
    """[T, V] float32."""
    with torch.no_grad():
        return model(torch.tensor([list(prompt)])).logits[0].float().numpy()


def greedy_of(model: Any, prompt: Sequence[int]) -> tuple[list[int], float]:
    """The ids of NEW_TOKENS greedy tokens by `generate`, and the least margin by which one of them won."""
    model.generation_config.eos_token_id = None
    found = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = [torch.topk(scores[0].float(), 2).values for scores in found.logits]
    return found.sequences[0, len(prompt) :].tolist(), min(float(first - second) for first, second in best)


def continuation_of(model: Any) -> tuple[list[int], list[int], float]:
    """A short prompt, its greedy ids and their least margin: of several, the one with the most different ids."""
    found = [(prompt, *greedy_of(model, prompt)) for prompt in SHORT_PROMPTS]
    return max((row for row in found if row[2] > LEAST_MARGIN), key=lambda row: len(set(row[1])))


def old_spelling(config: Mapping[str, Any], case: Case) -> dict[str, Any]:
    """config.json as a file of transformers 4 spells the same model, or as the first files of a younger family do."""
    if config["model_type"].startswith("gemma4"):
        return {key: value for key, value in config.items() if key != "per_layer_config"} | dict(case.old)
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    old |= {"torch_dtype": config["dtype"], "transformers_version": "4.46.0"}
    ropes = config["rope_parameters"]
    main = ropes.get("full_attention", ropes)
    scaling = {key: value for key, value in main.items() if key not in ("rope_theta", "partial_rotary_factor")}
    old |= {"rope_theta": main["rope_theta"], "rope_scaling": None if scaling["rope_type"] == "default" else scaling}
    if "partial_rotary_factor" in main:
        old["partial_rotary_factor"] = main["partial_rotary_factor"]
    model_type = config["model_type"]
    if model_type == "gemma3_text":
        old |= {"rope_local_base_freq": ropes["sliding_attention"]["rope_theta"], "sliding_window_pattern": 6}
    if model_type.startswith("deepseek") and old["rope_scaling"] is not None:
        scaling["type"] = scaling.pop("rope_type")
    if model_type == "gemma2":
        old["hidden_act"] = config["hidden_activation"]
    if model_type not in ("gpt_oss", "olmo3", "ministral"):
        old.pop("layer_types", None)
    return old | dict(case.old)


def write_old_config(golden: Mapping[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(golden["old_config"], indent=2, sort_keys=True) + "\n")


def config_text(golden: Mapping[str, Any]) -> str:
    """config.json as save_pretrained writes it."""
    return json.dumps(golden["config"], indent=2, sort_keys=True) + "\n"


def make_golden(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Everything that the files of a case hold."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tensors = write_folder(build_config(case), folder)
        model = open_folder(folder)
        logits = [logits_of(model, prompt) for prompt in LONG_PROMPTS]
        prompt, greedy, margin = continuation_of(model)
        golden: dict[str, Any] = {
            "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
            "prompt": prompt,
            "greedy": greedy,
            "least_margin": round(margin, 4),
            "rounding": rounding_of(folder, logits),
            "bfloat16_drift": drift_of(folder, logits),
            "tensors": {key: "x".join(map(str, tensor.shape)) for key, tensor in tensors.items()},
            "config": json.loads((folder / "config.json").read_text()),
        }
        golden["old_config"] = old_spelling(golden["config"], case)
        check_golden(golden, folder, model, tensors, logits[0])
    return golden, {f"logits_{index}": found[:, kept_columns(index)] for index, found in enumerate(logits)}


def rounding_of(folder: Path, logits: Sequence[np.ndarray]) -> float:
    """The largest difference between float32 and float64, which no other program can be expected to stay under."""
    model = open_folder(folder, torch.float64)
    differences = [
        np.abs(logits_of(model, prompt) - found).max() for prompt, found in zip(LONG_PROMPTS, logits, strict=True)
    ]
    return float(f"{max(differences):.2g}")


def drift_of(folder: Path, logits: Sequence[np.ndarray]) -> float:
    """How far bfloat16 is from float32: the `drift` of the tests."""
    model = open_folder(folder, torch.bfloat16)
    return float(f"{drift([logits_of(model, prompt) for prompt in LONG_PROMPTS], logits):.4g}")


def check_golden(
    golden: Mapping[str, Any], folder: Path, model: Any, tensors: Mapping[str, np.ndarray], logits: np.ndarray
) -> None:
    """The text of config.json can be made again, the folder survives a save, and the old spelling is the same model."""
    assert config_text(golden) == (folder / "config.json").read_text()
    assert logits.std() > 0.5, "logits that hardly differ hide mistakes"
    assert golden["rounding"] < 1e-4, f"float32 is {golden['rounding']} from float64: a near tie of a router?"
    saved = folder / "saved"
    model.save_pretrained(saved)
    again = load_file(saved / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(np.array_equal(again[key], tensor) for key, tensor in tensors.items())
    write_old_config(golden, saved)
    assert np.abs(logits_of(open_folder(saved), LONG_PROMPTS[0]) - logits).max() < 1e-5, "old spelling"


def movements(name: str) -> dict[str, float]:
    """How far transformers' logits move at most when a setting of the case is turned, or a weight silenced."""
    case = CASES[name]

    def logits(config: transformers.PreTrainedConfig, silenced: str | None = None) -> np.ndarray:
        with tempfile.TemporaryDirectory() as temporary:
            write_folder(config, Path(temporary), silenced)
            return logits_of(open_folder(Path(temporary)), LONG_PROMPTS[0])

    still = logits(build_config(case))
    moved = {json.dumps(dict(change)): logits(build_config(case, change)) for change in case.turned}
    moved |= {part: logits(build_config(case), part) for part in case.silenced}
    return {what: float(np.abs(found - still).max()) for what, found in moved.items()}


def main(names: Sequence[str]) -> None:
    # So little work is slower on several threads.
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name in names or CASES:
        golden, logits = make_golden(name)
        # Lists of numbers on one line.
        text = re.sub(r"\[[\d,\s]+\]", lambda found: re.sub(r"\s+", " ", found[0]), json.dumps(golden, indent=1))
        (GOLDEN / f"{name}.json").write_text(text + "\n")
        np.savez_compressed(GOLDEN / f"{name}.npz", **logits)
        moved = movements(name)
        least = min(moved.values(), default=math.inf)
        print(
            f"{name:24} std {logits['logits_0'].std():.2f} rounding {golden['rounding']:.1e} "
            f"bf16 {golden['bfloat16_drift']:.4f} margin {golden['least_margin']} moved {least:.3f}",
            flush=True,
        )
        for what, distance in moved.items():
            if distance < 0.05:
                print(f"  moves the logits by {distance:.4f} only: {what}")


if __name__ == "__main__":
    main(sys.argv[1:])
