"""Compares a conversion with transformers, where that is installed: the same ids, the logits of both."""

import dataclasses
import gc
import importlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.checkpoint.restore import parameter_reader
from maxlite.checkpoint.tree import leaf_paths, nested
from maxlite.config.schema import Config
from maxlite.data.gguf_header import is_gguf
from maxlite.data.json_files import read_json
from maxlite.errors import ConversionError
from maxlite.hf.compressed_json import METHOD as COMPRESSED
from maxlite.hf.convert import host_abstract, host_sharding
from maxlite.hf.folder import CONFIG
from maxlite.hf.kernels import kernel_reader, plain_model
from maxlite.hf.load import load_parameters
from maxlite.hf.quantization_json import quantization_method
from maxlite.model.build import build_model

LENGTH = 48
# Logits differ by rounding alone, which grows with their size: this much of their standard deviation is allowed.
TOLERANCE = 1e-3
_OPTIONS = {"attn_implementation": "eager", "local_files_only": True}


class Difference(NamedTuple):
    """largest: of two logits, absolute; deviation: standard deviation of transformers' logits; positions compared."""

    largest: float
    deviation: float
    positions: int


def compare_with_transformers(config: Config, source: Path, folder: Path) -> Difference:
    """Runs the parameters at `source` here, and those of a Hugging Face `folder` in transformers, both in float32.

    Both are rounded to weight_dtype first, since one of the two may hold more than the other was asked to. Kernels
    in few bits are on both sides what their codes and scales say, and activations are not rounded.

    Raises:
        ConversionError: transformers is not installed, or the logits differ by more than rounding.
    """
    dtype = config.compute.weight_dtype
    compressed = not is_gguf(folder) and quantization_method(read_json(folder / CONFIG, ConversionError)) == COMPRESSED
    if compressed:
        rounded_to = None if config.compute.weight_quantization else dtype
        expected = _compressed_logits(folder, _token_ids(config), rounded_to)
    else:
        expected = _transformers_logits(folder, _token_ids(config), dtype)
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
    if compute.lora_rank:
        # As a folder has them: adapters merged into their kernels, which are rounded then.
        read = kernel_reader(model, parameter_reader(source, host_abstract(model)))
        model = plain_model(model)
        params = nested({path: read(path) for path in leaf_paths(model.abstract_params)})
    else:
        params = load_parameters(source, model, jax.tree.map(lambda _: host_sharding(), model.abstract_params))
    tokens = jnp.asarray(_token_ids(config)[None], jnp.int32)
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

    @jax.jit
    def logits(params: Any) -> jax.Array:
        return model.logits(params, model.apply(params, tokens, positions).hidden)[0]

    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(logits(params))


def _compressed_logits(folder: Path, ids: np.ndarray, rounded_to: str | None) -> np.ndarray:
    """rounded_to: what all weights are rounded to once they are floats; None leaves them as they are."""
    torch, transformers = _torch_and_transformers("compressed_tensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **_OPTIONS).eval()
    for module in model.modules():
        module.quantization_enabled = False
    with torch.no_grad():
        # The first call makes the weights floats.
        logits = model(torch.from_numpy(ids)[None]).logits
        if rounded_to is not None:
            for parameter in model.parameters():
                parameter.copy_(parameter.to(getattr(torch, rounded_to)).float())
            logits = model(torch.from_numpy(ids)[None]).logits
    found = logits[0].float().numpy()
    del model
    gc.collect()
    return found


def _torch_and_transformers(*others: str) -> tuple[Any, Any]:
    """Never needed to run maxlite, so they are looked for only when they are asked for; others: what they need."""
    try:
        for name in others:
            importlib.import_module(name)
        return importlib.import_module("torch"), importlib.import_module("transformers")
    except ImportError as error:
        raise ConversionError(
            "--check needs torch and transformers, of a GGUF file accelerate too, of weights in few bits "
            f"compressed-tensors; {error.name} is not installed."
        ) from error


def _transformers_logits(folder: Path, ids: np.ndarray, weight_dtype: str) -> np.ndarray:
    place, options, needed = folder, {}, ()
    if is_gguf(folder):
        place, options = folder.parent, {"gguf_file": folder.name}
        # What transformers reads such files with.
        needed = ("accelerate",)
    torch, transformers = _torch_and_transformers(*needed)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        place, dtype=getattr(torch, weight_dtype), **options, **_OPTIONS
    )
    model = model.float().eval()
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None]).logits[0].float().numpy()
    del model
    gc.collect()
    return logits
