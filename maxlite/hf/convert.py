"""Hugging Face folder -> run, and run -> Hugging Face folder. Each is made whole or not at all."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.checkpoint.manager import Checkpointer
from maxlite.checkpoint.restore import parameter_reader
from maxlite.checkpoint.tree import leaf_paths, nested
from maxlite.config.load import dump_config, dump_model
from maxlite.config.schema import Config, ModelConfig
from maxlite.data.json_files import read_json, write_json
from maxlite.data.model_folder import ORIGINALS
from maxlite.data.tokenizer import build_tokenizer
from maxlite.data.tokenizer_files import write_byte_tokenizer
from maxlite.errors import CheckpointError, ConversionError
from maxlite.hf.compressed_export import (
    compressed_tensors,
    describe_compressed,
    plan_compressed,
    remarks,
    write_compressed,
)
from maxlite.hf.config_json import IGNORED_KEYS, family_for, inexpressible_keys, write_config
from maxlite.hf.families import BY_MODEL_TYPE
from maxlite.hf.family_lines import Family
from maxlite.hf.folder import CONFIG, GENERATION_CONFIG, ModelFolder
from maxlite.hf.kernels import kernel_reader, plain_model
from maxlite.hf.load import load_folder, plan_of
from maxlite.hf.plan import Plan, natural_order
from maxlite.hf.run_files import config_of_run, keep_adapter_config, keep_files, keep_tokenizer, run_of
from maxlite.hf.shards import make_shards
from maxlite.hf.writer import fill_tensors, new_folder, new_tensors
from maxlite.metrics.byte_progress import ByteProgress
from maxlite.model.build import Model, Params, build_model

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys of the folder that a run came from which say something of that folder's files, and not of the model.
_NOT_KEPT = frozenset(
    {"architectures", "auto_map", "model_type", "transformers_version", "_name_or_path", "_commit_hash"}
    | {"dtype", "torch_dtype", "quantization_config", *TOKEN_IDS}
)


class Adapters(NamedTuple):
    """Adapters that come from a folder of their own. arrays: path of a parameter -> its value."""

    folder: Path
    arrays: Mapping[str, np.ndarray]


def import_folder(
    folder: ModelFolder,
    config: Config,
    destination: Path,
    notes: TextIO = sys.stdout,
    adapters: Adapters | None = None,
) -> Model:
    """Makes a run whose step 0 has the parameters of `folder`.

    config: with the architecture of the folder; weight_dtype is that of the checkpoint.
    adapters: all that the model has; None lets them begin anew.

    Raises:
        ConversionError: the folder can't be converted, or the destination exists.
    """
    model = build_model(config.model, config.compute)
    with new_folder(destination) as unfinished:
        params = _read_folder(folder, model, notes, adapters)
        if adapters is not None:
            keep_adapter_config(adapters.folder, unfinished)
        save_parameters(config, params, unfinished, destination)
        keep_files(folder.path, unfinished)
        name = folder.path.resolve().name
        (unfinished / "model.yml").write_text(dump_model(config, f"{name}, converted"))
        (unfinished / "config.yml").write_text(dump_config(config_of_run(config, destination, name)))
    return model


def save_parameters(config: Config, params: Params, folder: Path, destination: Path) -> None:
    """Writes parameters as step 0 of a run that is being made in `folder`, to become `destination`.

    Raises:
        ConversionError: they can't be written.
    """
    checkpoint = dataclasses.replace(config.checkpoint, async_checkpointing=False)
    try:
        checkpointer = Checkpointer(folder, checkpoint, lean=True)
        checkpointer.save(0, {"step": jnp.int32(0), "params": params}, {})
        checkpointer.close()
    except CheckpointError as error:
        # What that says of other steps and of training means nothing here.
        raise ConversionError(f"{destination} could not be written: {str(error).splitlines()[0]}") from error


def export_run(
    config: Config, source: Path, destination: Path, max_shard_bytes: int, notes: TextIO = sys.stdout
) -> Model:
    """Writes the parameters of a run (or of RUN/checkpoints/<n>) as a folder that transformers opens.

    Kernels that are stored in few bits stay so, in the form of compressed-tensors; adapters are merged.

    config: the run's; weight_dtype is that of the files.

    Raises:
        CheckpointError: there are no parameters.
        ConversionError: no family can express the model, or the destination exists.
    """
    run, model = run_of(source), build_model(config.model, config.compute)
    original = _original_config(run)
    family = export_family(original, config.model)
    plan = plan_compressed(plan_of(family.table, plain_model(model)), model)
    described = {**_describe(family, config, original), **describe_compressed(plan)}
    for line in remarks(plan):
        print(line, file=notes)
    with new_folder(destination) as unfinished:
        read = parameter_reader(source, host_abstract(model))
        tensors = [*new_tensors(plan.plain, None), *compressed_tensors(plan)]
        tensors.sort(key=lambda tensor: natural_order(tensor.name))
        with ByteProgress(f"Write {destination}", sum(tensor.nbytes for tensor in tensors), notes) as progress:
            locations = make_shards(unfinished, tensors, max_shard_bytes)
            fill_tensors(plan.plain, kernel_reader(model, read), locations, tensors, progress)
            write_compressed(plan, read, locations, progress)
        write_json(unfinished / CONFIG, described)
        write_json(unfinished / GENERATION_CONFIG, _generation_config(run, described))
        _write_tokenizer(config, run, unfinished)
    return plain_model(model)


def import_plan(folder: ModelFolder, config: Config) -> Plan:
    """Returns which tensors hold which parameters, for a folder."""
    return plan_of(folder.family.table, plain_model(build_model(config.model, config.compute)))


def export_plan(config: Config, source: Path) -> Plan:
    """Returns which tensors hold which parameters, for a run."""
    family = export_family(_original_config(run_of(source)), config.model)
    return plan_of(family.table, plain_model(build_model(config.model, config.compute)))


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


def host_abstract(model: Model) -> Params:
    """Returns the parameters' shapes and dtypes, in the host's memory."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=host_sharding()), model.abstract_params
    )


def _read_folder(folder: ModelFolder, model: Model, notes: TextIO, adapters: Adapters | None) -> Params:
    if adapters is None:
        return load_folder(folder, model, jax.tree.map(lambda _: host_sharding(), model.abstract_params), notes)
    base = build_model(model.config, dataclasses.replace(model.compute, lora_rank=0))
    params = load_folder(folder, base, jax.tree.map(lambda _: host_sharding(), base.abstract_params), notes)
    dtype = jnp.dtype(model.compute.weight_dtype)
    return nested(leaf_paths(params) | {path: jnp.asarray(value, dtype) for path, value in adapters.arrays.items()})


def _original_config(run: Path) -> dict[str, Any]:
    """config.json of the folder that the run was imported from; empty if there is none."""
    file = run / ORIGINALS / CONFIG
    return read_json(file, ConversionError) if file.is_file() else {}


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
