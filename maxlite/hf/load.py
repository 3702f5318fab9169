"""Parameters of a model, wherever they are: a run, a checkpoint, or a Hugging Face folder."""

import sys
from pathlib import Path
from typing import TextIO

import jax

from maxlite.checkpoint.restore import restore_parameters
from maxlite.checkpoint.tree import leaf_paths
from maxlite.config.layers import layer_groups, layer_places
from maxlite.config.schema import ModelConfig
from maxlite.hf.folder import ModelFolder, is_model_folder, read_folder
from maxlite.hf.plan import Plan, Skipped, check_tensors, plan_tensors
from maxlite.hf.reader import num_bytes, read_parameters
from maxlite.hf.rules import Table
from maxlite.metrics.byte_progress import ByteProgress
from maxlite.model.build import Model, Params


def load_parameters(path: str | Path, model: Model, shardings: Params, notes: TextIO = sys.stdout) -> Params:
    """Returns the parameters at `path`, each in its sharding and in the dtype that `model` has for it.

    path: a run directory, RUN/checkpoints/<n>, or a Hugging Face folder.
    notes: where a line about what was read goes, and a bar if it is a terminal.

    Raises:
        CheckpointError, ConversionError: there are none, or they are another model's.
    """
    if is_model_folder(path):
        return load_folder(read_folder(path), model, shardings, notes)
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        model.abstract_params,
        shardings,
    )
    return restore_parameters(path, abstract)


def load_folder(folder: ModelFolder, model: Model, shardings: Params, notes: TextIO = sys.stdout) -> Params:
    """Returns the parameters of a Hugging Face folder, as load_parameters.

    Raises:
        ConversionError: names every tensor that is missing, not known or misshapen, or the file that is damaged.
    """
    plan, source = plan_of(folder.family.table, model), folder.open_tensors()
    for line in (*differing_keys(folder, model.config), *describe_skipped(check_tensors(plan, source))):
        print(line, file=notes)
    placed, found = leaf_paths(shardings), {}
    with ByteProgress(f"Read {folder.path}", num_bytes(plan, source), notes) as progress:
        for name, array in read_parameters(plan, source, progress):
            # The array is nobody else's: jax may keep it as it is.
            found[name] = jax.device_put(array, placed[name], may_alias=True)
            del array
    structure = jax.tree.structure(model.abstract_params)
    return jax.tree.unflatten(structure, [found[name] for name in leaf_paths(model.abstract_params)])


def plan_of(table: Table, model: Model) -> Plan:
    """Returns which tensors of a family's files hold which parameters of `model`."""
    return plan_tensors(table, model.abstract_params, layer_places(layer_groups(model.config)))


def differing_keys(folder: ModelFolder, model: ModelConfig) -> list[str]:
    """Returns a line about the keys in which the model is not that of config.json: allowed, but worth a look."""
    differing = {name: value for name, value in folder.keys.items() if value != getattr(model, name)}
    changed = [f"{name} {value} -> {getattr(model, name)}" for name, value in differing.items()]
    return [f"Changed from what {folder.path} says: {', '.join(changed)}"] if changed else []


def describe_skipped(skipped: list[Skipped]) -> list[str]:
    """Returns a line for each reason why tensors were not read."""
    reasons: dict[str, list[str]] = {}
    for one in skipped:
        reasons.setdefault(one.reason, []).append(one.tensor)
    return [
        f"Left out {len(names)} tensor{'s' if len(names) > 1 else ''} ({names[0]}{', ...' if len(names) > 1 else ''}): "
        f"{reason}"
        for reason, names in reasons.items()
    ]
