"""Compares a conversion with transformers, where that is installed: the same ids, the logits of both."""

import dataclasses
import gc
import importlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config.schema import Config
from maxlite.data.gguf_header import is_gguf
from maxlite.errors import ConversionError
from maxlite.hf.convert import host_sharding
from maxlite.hf.load import load_parameters
from maxlite.model.build import build_model

LENGTH = 48
# Logits differ by rounding alone, which grows with their size: this much of their standard deviation is allowed.
TOLERANCE = 1e-3


class Difference(NamedTuple):
    """largest: of two logits, absolute; deviation: standard deviation of transformers' logits; positions compared."""

    largest: float
    deviation: float
    positions: int


def compare_with_transformers(config: Config, source: Path, folder: Path) -> Difference:
    """Runs the parameters at `source` here, and those of a Hugging Face `folder` in transformers, both in float32.

    Both are rounded to weight_dtype first, since one of the two may hold more than the other was asked to.

    Raises:
        ConversionError: transformers is not installed, or the logits differ by more than rounding.
    """
    expected = _transformers_logits(folder, _token_ids(config), config.compute.weight_dtype)
    found = _our_logits(config, source)
    largest = float(np.abs(found - expected).max())
    difference = Difference(largest, float(expected.std()), len(expected))
    if not largest <= TOLERANCE * max(difference.deviation, 1.0):
        raise ConversionError(
            f"the logits of {source} and of transformers for {folder} differ by up to {largest:.3g} (their standard "
            f"deviation is {difference.deviation:.3g}); one of the two computes another model."
        )
    return difference


def _token_ids(config: Config) -> np.ndarray:
    """Ids that do not repeat soon, as many as the model takes: [T]."""
    steps = np.arange(min(LENGTH, config.model.max_position_embeddings), dtype=np.int64)
    return (7 * steps * steps + 3 * steps + 5) % config.model.vocab_size


def _our_logits(config: Config, source: Path) -> np.ndarray:
    compute = dataclasses.replace(config.compute, dtype="float32")
    model = build_model(config.model, compute)
    params = load_parameters(source, model, jax.tree.map(lambda _: host_sharding(), model.abstract_params))
    tokens = jnp.asarray(_token_ids(config)[None], jnp.int32)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

    @jax.jit
    def logits(params: Any) -> jax.Array:
        return model.logits(params, model.apply(params, tokens, positions).hidden)[0]

    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(logits(params))


def _transformers_logits(folder: Path, ids: np.ndarray, weight_dtype: str) -> np.ndarray:
    place, options = folder, {}
    try:
        # Never needed to run maxlite, so they are looked for only when they are asked for.
        torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
        if is_gguf(folder):
            place, options = folder.parent, {"gguf_file": folder.name}
            # What transformers reads such files with.
            importlib.import_module("accelerate")
    except ImportError as error:
        raise ConversionError(
            f"--check needs torch and transformers, of a GGUF file accelerate too; {error.name} is not installed."
        ) from error
    model = transformers.AutoModelForCausalLM.from_pretrained(
        place, **options, dtype=getattr(torch, weight_dtype), attn_implementation="eager", local_files_only=True
    )
    model = model.float().eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None]).logits[0].float().numpy()
    del model
    gc.collect()
    return logits
