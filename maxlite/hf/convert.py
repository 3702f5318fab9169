"""Hugging Face folder -> run, and run -> Hugging Face folder. Each is made whole or not at all."""

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.checkpoint.manager import Checkpointer
from maxlite.checkpoint.restore import parameter_reader
from maxlite.config.load import dump_config, dump_model
from maxlite.config.schema import Config, ModelConfig
from maxlite.data.json_files import read_json, write_json
from maxlite.data.model_folder import ORIGINALS
from maxlite.data.tokenizer import build_tokenizer
from maxlite.data.tokenizer_files import write_byte_tokenizer
from maxlite.errors import CheckpointError, ConversionError
from maxlite.hf.config_json import IGNORED_KEYS, family_for, inexpressible_keys, write_config
from maxlite.hf.families import BY_MODEL_TYPE
from maxlite.hf.family_lines import Family
from maxlite.hf.folder import CONFIG, GENERATION_CONFIG, ModelFolder
from maxlite.hf.load import load_folder, plan_of
from maxlite.hf.plan import Plan
from maxlite.hf.run_files import keep_files, keep_tokenizer, run_of
from maxlite.hf.writer import new_folder, new_tensors, write_tensors
from maxlite.metrics.byte_progress import ByteProgress
from maxlite.model.build import Model, build_model

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys of the folder that a run came from which say something of that folder's files, and not of the model.
_NOT_KEPT = frozenset(
    {"architectures", "auto_map", "model_type", "transformers_version", "_name_or_path", "_commit_hash"}
    | {"dtype", "torch_dtype", "quantization_config", *TOKEN_IDS}
)


def import_folder(folder: ModelFolder, config: Config, destination: Path, notes: TextIO = sys.stdout) -> Model:
    """Makes a run whose step 0 has the parameters of `folder`.

    config: with the architecture of the folder; weight_dtype is that of the checkpoint.

    Raises:
        ConversionError: the folder can't be converted, or the destination exists.
    """
    model = build_model(config.model, config.compute)
    with new_folder(destination) as unfinished:
        params = load_folder(folder, model, jax.tree.map(lambda _: host_sharding(), model.abstract_params), notes)
        checkpoint = dataclasses.replace(config.checkpoint, async_checkpointing=False)
        try:
            checkpointer = Checkpointer(unfinished, checkpoint, lean=True)
            checkpointer.save(0, {"step": jnp.int32(0), "params": params}, {})
            checkpointer.close()
        except CheckpointError as error:
            # What that says of other steps and of training means nothing here.
            raise ConversionError(f"{destination} could not be written: {str(error).splitlines()[0]}") from error
        keep_files(folder.path, unfinished)
        (unfinished / "model.yml").write_text(dump_model(config, f"{folder.path.resolve().name}, converted"))
        (unfinished / "config.yml").write_text(dump_config(_config_of_run(config, folder, destination)))
    return model


def export_run(
    config: Config, source: Path, destination: Path, max_shard_bytes: int, notes: TextIO = sys.stdout
) -> Model:
    """Writes the parameters of a run (or of RUN/checkpoints/<n>) as a folder that transformers opens.

    config: the run's; weight_dtype is that of the files.

    Raises:
        CheckpointError: there are no parameters.
        ConversionError: no family can express the model, or the destination exists.
    """
    run, model = run_of(source), build_model(config.model, config.compute)
    original = _original_config(run)
    family = export_family(original, config.model)
    plan = plan_of(family.table, model)
    described = _describe(family, config, original)
    with new_folder(destination) as unfinished:
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host_sharding()), model.abstract_params
        )
        read = parameter_reader(source, abstract)
        tensors = new_tensors(plan, None)
        with ByteProgress(f"Write {destination}", sum(tensor.nbytes for tensor in tensors), notes) as progress:

            def fetch(name: str) -> np.ndarray:
                return np.asarray(read(name))

            write_tensors(plan, fetch, unfinished, tensors, progress, max_shard_bytes)
        write_json(unfinished / CONFIG, described)
        write_json(unfinished / GENERATION_CONFIG, _generation_config(run, described))
        _write_tokenizer(config, run, unfinished)
    return model


def import_plan(folder: ModelFolder, config: Config) -> Plan:
    """Returns which tensors hold which parameters, for a folder."""
    return plan_of(folder.family.table, build_model(config.model, config.compute))


def export_plan(config: Config, source: Path) -> Plan:
    """Returns which tensors hold which parameters, for a run."""
    family = export_family(_original_config(run_of(source)), config.model)
    return plan_of(family.table, build_model(config.model, config.compute))


def export_family(original: Mapping[str, Any], model: ModelConfig) -> Family:
    """Returns the family that the model came from if it can still express it, else the first that can.

    original: config.json of the folder that the run was imported from, empty if there is none.

    Raises:
        ConversionError: none can.
    """
    text = original.get("text_config") or original
    family = BY_MODEL_TYPE.get(text.get("model_type", ""))
    if family is not None and not inexpressible_keys(family, model):
        return family
    return family_for(model)


def host_sharding() -> jax.sharding.SingleDeviceSharding:
    """Conversions use the host's memory, whatever devices there are."""
    return jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])


def _original_config(run: Path) -> dict[str, Any]:
    """config.json of the folder that the run was imported from; empty if there is none."""
    file = run / ORIGINALS / CONFIG
    return read_json(file, ConversionError) if file.is_file() else {}


def _config_of_run(config: Config, folder: ModelFolder, destination: Path) -> Config:
    """What the run's own config.yml says: itself in place of the folder that it came from."""
    given = Path(os.path.abspath(destination.expanduser()))
    run = dataclasses.replace(
        config.run, model=folder.path.resolve().name, run_name=given.name, base_output_directory=str(given.parent)
    )
    tokenizer = None if config.data.tokenizer_path is None else str(given)
    return dataclasses.replace(
        config,
        run=run,
        checkpoint=dataclasses.replace(config.checkpoint, load_hf=None),
        data=dataclasses.replace(config.data, tokenizer_path=tokenizer),
    )


def _describe(family: Family, config: Config, original: Mapping[str, Any]) -> dict[str, Any]:
    """config.json: what the model is, and what the folder that it came from said besides."""
    text = original.get("text_config") or original
    tokenizer = None if original else build_tokenizer(config.data)
    ids = {name: text.get(name, original.get(name)) for name in TOKEN_IDS}
    if tokenizer is not None:
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": None}
    written = write_config(family, config.model, config.compute.weight_dtype, ids)
    ignored = (IGNORED_KEYS | family.ignored_keys) - _NOT_KEPT
    return {**{name: value for name, value in text.items() if name in ignored}, **written}


def _generation_config(run: Path, described: Mapping[str, Any]) -> dict[str, Any]:
    file = run / ORIGINALS / GENERATION_CONFIG
    if file.is_file():
        return read_json(file, ConversionError)
    return {name: described[name] for name in TOKEN_IDS if described.get(name) is not None}


def _write_tokenizer(config: Config, run: Path, folder: Path) -> None:
    """The tokenizer's own files; those of the byte tokenizer, which has none, are made."""
    if config.data.tokenizer_path is not None:
        keep_tokenizer(Path(config.data.tokenizer_path).expanduser(), folder)
    elif config.data.dataset_type != "synthetic":
        write_byte_tokenizer(folder, add_bos=config.data.add_bos)
    else:
        keep_tokenizer(run, folder)
