"""Golden files of the tiny reference models, the folders that they describe, and maxlite's way in and out of them."""

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from maxlite.checkpoint.tree import leaf_paths
from maxlite.config.schema import Config, ModelConfig
from maxlite.hf.config_json import write_config
from maxlite.hf.family_canonical import default_config
from maxlite.hf.family_lines import Family
from maxlite.hf.folder import read_folder
from maxlite.hf.load import load_folder as read_weights
from maxlite.hf.load import plan_of
from maxlite.hf.shards import make_shards
from maxlite.hf.writer import fill_tensors, new_folder, new_tensors
from maxlite.model.build import Model, Params, build_model
from tests.hf.cases import LONG_PROMPTS
from tests.hf.noise import noisy_tensors

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"


class Golden(NamedTuple):
    """What transformers says about one model. logits: of each long prompt, [T, a third of V]."""

    prompt: Sequence[int]
    greedy: Sequence[int]
    bfloat16_drift: float
    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]
    old_config: Mapping[str, Any]
    logits: Sequence[np.ndarray]


def read_golden(name: str) -> Golden:
    held = json.loads((GOLDEN / f"{name}.json").read_text())
    shapes = {tensor: tuple(map(int, shape.split("x"))) for tensor, shape in held["tensors"].items()}
    with np.load(GOLDEN / f"{name}.npz") as file:
        logits = [file[f"logits_{index}"] for index in range(2)]
    return Golden(
        held["prompt"], held["greedy"], held["bfloat16_drift"], shapes, held["config"], held["old_config"], logits
    )


def write_folder(golden: Golden, folder: Path, config: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
    """Writes the model's folder, with another config.json if one is given, and returns its tensors."""
    tensors = noisy_tensors(golden.shapes, golden.config["model_type"])
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text = json.dumps(golden.config if config is None else config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text)
    return tensors


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder's safetensors files."""
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found = load_file(file)
        assert not found.keys() & tensors.keys()
        tensors |= found
    return tensors


class Loaded(NamedTuple):
    """A folder as maxlite has it."""

    config: Config
    model: Model
    params: Params
    family: Family


def load_folder(path: Path, dtype: str = "float32") -> Loaded:
    """Opens a Hugging Face folder through maxlite, to compute in `dtype` with weights in float32."""
    folder = read_folder(path)
    plain = default_config()
    compute = dataclasses.replace(plain.compute, dtype=dtype)
    config = dataclasses.replace(plain, model=ModelConfig(**folder.keys), compute=compute)
    model = build_model(config.model, config.compute)
    here = SingleDeviceSharding(jax.devices()[0])
    params = read_weights(folder, model, jax.tree.map(lambda _: here, model.abstract_params), io.StringIO())
    return Loaded(config, model, params, folder.family)


def export_folder(loaded: Loaded, path: Path) -> None:
    """Writes a folder that transformers opens, in float32."""
    plan = plan_of(loaded.family.table, loaded.model)
    values = leaf_paths(loaded.params)
    with new_folder(path) as unfinished:
        config = write_config(loaded.family, loaded.config.model, "float32")
        (unfinished / "config.json").write_text(json.dumps(config))
        tensors = new_tensors(plan, None)
        locations = make_shards(unfinished, tensors, 10**9)
        fill_tensors(plan, lambda name: np.asarray(values[name]), locations, tensors, lambda count: None)


def all_logits(loaded: Loaded) -> list[np.ndarray]:
    """The logits of each long prompt, [T, V] float32, from one batch in which the shorter one is padded."""
    length = max(map(len, LONG_PROMPTS))
    tokens = np.array([[*prompt, *[0] * (length - len(prompt))] for prompt in LONG_PROMPTS], np.int32)
    segment_ids = np.array([[1] * len(prompt) + [0] * (length - len(prompt)) for prompt in LONG_PROMPTS], np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)

    @jax.jit
    def forward(params: Params) -> jax.Array:
        return loaded.model.logits(params, loaded.model.apply(params, tokens, positions, segment_ids).hidden)

    logits = np.asarray(forward(loaded.params))
    return [rows[: len(prompt)] for rows, prompt in zip(logits, LONG_PROMPTS, strict=True)]
