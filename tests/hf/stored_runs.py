"""Runs whose kernels are stored in few bits, made of the tiny reference models without the quantize command."""

import dataclasses
import functools
import io
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.checkpoint.manager import Checkpointer
from maxlite.checkpoint.tree import leaf_paths, nested
from maxlite.config.load import dump_config, load_config
from maxlite.config.schema import Config
from maxlite.hf.convert import export_run
from maxlite.hf.run_files import config_of_run, keep_files
from maxlite.launcher.resolve import folder_keys
from maxlite.model.build import Model, Params, build_model
from maxlite.ops.stored import quantize_kernel
from tests.hf.cases import LONG_PROMPTS
from tests.hf.folders import load_folder, read_golden, write_folder

_quantize_kernel = jax.jit(quantize_kernel, static_argnums=(1, 2, 3))


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
    held = leaf_paths(floats)
    for product in model.products:
        stored, path = product.equipment.stored, product.params_path
        if stored is not None:
            dims = tuple(dim + 1 for dim in product.summed_dims)
            made = _quantize_kernel(held.pop(f"{path}/kernel"), dims, stored.qtype, stored.tile_size)
            held[f"{path}/codes"], held[f"{path}/scale"] = made
    params = nested({path: held[path].astype(leaf.dtype) for path, leaf in leaf_paths(model.abstract_params).items()})
    run = place / "run"
    run.mkdir()
    checkpointer = Checkpointer(run, dataclasses.replace(config.checkpoint, async_checkpointing=False), lean=True)
    checkpointer.save(0, {"step": jnp.int32(0), "params": params}, {})
    checkpointer.close()
    keep_files(place / "given", run)
    (run / "config.yml").write_text(dump_config(config_of_run(config, run, name)))
    return StoredRun(run, config, model, params, floats)


def export(run: StoredRun, folder: Path, max_shard_bytes: int = 10**9) -> str:
    """Writes the run as a folder; returns what was said meanwhile."""
    notes = io.StringIO()
    export_run(run.config, run.path, folder, max_shard_bytes, notes)
    return notes.getvalue()


def logits_of(model: Model, params: Params) -> np.ndarray:
    """Logits of the longest prompt: [T, V] float32."""
    prompt = max(LONG_PROMPTS, key=len)
    tokens = jnp.asarray([prompt], jnp.int32)
    positions = jnp.arange(len(prompt), dtype=jnp.int32)[None]
    return np.asarray(jax.jit(lambda held: model.logits(held, model.apply(held, tokens, positions).hidden))(params))[0]
