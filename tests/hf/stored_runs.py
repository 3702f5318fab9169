"""Runs whose kernels are stored in few bits, made of the tiny reference models without the quantize command."""

import dataclasses
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.checkpoint.manager import Checkpointer
from maxlite.checkpoint.tree import leaf_paths, nested
from maxlite.config.load import dump_config, load_config
from maxlite.config.schema import ComputeConfig, Config, ModelConfig
from maxlite.hf.convert import export_run
from maxlite.hf.run_files import config_of_run, keep_files
from maxlite.launcher.resolve import folder_keys
from maxlite.model.build import Model, Params, build_model
from tests.hf.cases import LONG_PROMPTS
from tests.hf.folders import load_folder, read_golden, write_folder
from tests.quantize.two_models import rounded_params


class StoredRun(NamedTuple):
    """A run, and its parameters. floats: the kernels that were rounded."""

    path: Path
    config: Config
    model: Model
    params: Params
    floats: Params


def make_run(name: str, place: Path, *keys: str) -> StoredRun:
    """Writes `place`/run of a reference model; keys: the weight_quant keys and others."""
    write_folder(read_golden(name), place / "given")
    reader = functools.partial(folder_keys, expects_text=False)
    config = load_config("base.yml", [f"load_hf={place / 'given'}", "dtype=float32", *keys], folder_reader=reader)
    model, floats = build_model(config.model, config.compute), load_folder(place / "given").params
    params = _rounded(model, floats)
    run = write_run(config, params, place / "run", name)
    keep_files(place / "given", run)
    return StoredRun(run, config, model, params, floats)


def _rounded(model: Model, floats: Params) -> Params:
    """The parameters of `model`: kernels that it has in few bits are rounded to nearest."""

    @jax.jit
    def rounded(floats: Params) -> Params:
        held = leaf_paths(rounded_params(floats, model))
        return nested({path: held[path].astype(leaf.dtype) for path, leaf in leaf_paths(model.abstract_params).items()})

    return rounded(floats)


def write_run(config: Config, params: Params, run: Path, name: str) -> Path:
    """Writes what a run leaves of parameters that nothing trained: its checkpoint 0 and config.yml. Returns `run`."""
    run.mkdir()
    checkpointer = Checkpointer(run, dataclasses.replace(config.checkpoint, async_checkpointing=False), lean=True)
    checkpointer.save(0, {"step": jnp.int32(0), "params": params}, {})
    checkpointer.close()
    (run / "config.yml").write_text(dump_config(config_of_run(config, run, name)))
    return run


def export(run: StoredRun, folder: Path, max_shard_bytes: int = 10**9) -> str:
    """Writes the run as a folder; returns what was said meanwhile."""
    notes = io.StringIO()
    export_run(run.config, run.path, folder, max_shard_bytes, notes)
    return notes.getvalue()


def logits_of(model: Model, params: Params) -> np.ndarray:
    """Logits of the longest prompt: [T, V] float32."""
    prompt = max(LONG_PROMPTS, key=len)
    tokens = np.array([prompt], np.int32)
    positions = np.arange(len(prompt), dtype=np.int32)[None]
    return np.asarray(_forward(model.config, model.compute)(params, tokens, positions))[0]


@functools.cache
def _forward(config: ModelConfig, compute: ComputeConfig) -> Callable[..., jax.Array]:
    """Models of one architecture share a program."""
    model = build_model(config, compute)
    return jax.jit(lambda params, *tokens: model.logits(params, model.apply(params, *tokens).hidden))
