"""Parameters of a model, wherever they are: a run, a checkpoint, or a Hugging Face folder."""

import dataclasses
import io
import sys
from pathlib import Path
from typing import TextIO

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from maxlite.checkpoint.restore import restore_parameters
from maxlite.checkpoint.tree import leaf_paths
from maxlite.config.layers import layer_groups, layer_places
from maxlite.config.schema import ModelConfig
from maxlite.hf.boxes import Box
from maxlite.hf.folder import ModelFolder, is_model_folder, read_folder
from maxlite.hf.plan import Plan, Skipped, check_tensors, plan_tensors
from maxlite.hf.reader import num_bytes, read_parameters
from maxlite.hf.rules import Table
from maxlite.hf.source import Source
from maxlite.metrics.byte_progress import ByteProgress
from maxlite.model.build import Model, Params
from maxlite.processes.group import is_primary, num_processes, on_primary, process_index, together


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
    notes = notes if is_primary() else io.StringIO()
    return restore_parameters(path, abstract, lambda report: print(report.line(), file=notes))


def load_folder(folder: ModelFolder, model: Model, shardings: Params, notes: TextIO = sys.stdout) -> Params:
    """Returns the parameters of a Hugging Face folder, as load_parameters.

    Each process reads and holds only what its devices do, but for one tensor: where a folder has a copy of the
    embedding that the model does not, process 0 reads both to compare them. All processes must call this.

    Raises:
        ConversionError: names every tensor that is missing, not known or misshapen, or the file that is damaged.
    """
    notes = notes if is_primary() else io.StringIO()
    plan, source = plan_of(folder.family.table, model), together(f"open {folder.path}", folder.open_tensors)
    checked = on_primary(
        f"check {folder.path}", lambda: [dataclasses.astuple(one) for one in check_tensors(plan, source)]
    )
    for line in (*differing_keys(folder, model.config), *describe_skipped([Skipped(*one) for one in checked])):
        print(line, file=notes)
    placed = leaf_paths(shardings)
    values = together(f"read {folder.path}", lambda: _read(plan, source, placed, notes))
    return jax.tree.unflatten(jax.tree.structure(model.abstract_params), values)


def _read(plan: Plan, source: Source, placed: dict[str, Sharding], notes: TextIO) -> list[jax.Array]:
    """Returns the parameters in the plan's order."""
    own = {path: own_boxes(placed[path], leaf.shape) for path, leaf in plan.parameters.items()}
    boxes = {path: set(parts.values()) for path, parts in own.items()}
    found = {}
    part = f", what process {process_index()} of {num_processes()} needs" if num_processes() > 1 else ""
    with ByteProgress(f"Read {source.place}{part}", num_bytes(plan, source, boxes), notes) as progress:
        for path, arrays in read_parameters(plan, source, boxes, progress):
            found[path] = _place(arrays, own[path], plan.parameters[path].shape, placed[path])
            del arrays
    return [found[path] for path in plan.parameters]


def own_boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[jax.Device, Box]:
    """Returns which part of an array each of this process's devices holds."""
    indices = sharding.addressable_devices_indices_map(shape)
    return {
        device: tuple(along.indices(size)[:2] for along, size in zip(index or (), shape, strict=True))
        for device, index in indices.items()
    }


def _place(
    arrays: dict[Box, np.ndarray], own: dict[jax.Device, Box], shape: tuple[int, ...], sharding: Sharding
) -> jax.Array:
    """Returns an array of which this process has `arrays`."""
    singles = [SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in own]
    # The arrays are nobody else's: jax may keep them as they are.
    parts = jax.device_put([arrays[box] for box in own.values()], singles, may_alias=True)
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


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
