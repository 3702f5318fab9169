"""Parameters of a model, wherever they are: a run, a checkpoint, or a Hugging Face folder."""

import dataclasses
import functools
import io
import sys
from pathlib import Path
from typing import TextIO

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from maxlite.checkpoint.report import RestoreReport
from maxlite.checkpoint.restore import parameter_reader, parameter_shapes, restore_parameters
from maxlite.checkpoint.tree import leaf_paths, nested
from maxlite.config.layers import layer_groups, layer_places
from maxlite.config.schema import ModelConfig
from maxlite.hf.boxes import Box
from maxlite.hf.equip_load import Intake, check_forms
from maxlite.hf.folder import ModelFolder, is_model_folder, read_folder
from maxlite.hf.plan import Plan, Skipped, check_tensors, plan_tensors
from maxlite.hf.reader import num_bytes, read_parameters
from maxlite.hf.rules import Table
from maxlite.hf.source import Source
from maxlite.metrics.byte_progress import ByteProgress
from maxlite.model.build import Model, Params
from maxlite.processes.group import is_primary, num_processes, on_primary, process_index, together


def load_parameters(
    path: str | Path, model: Model, shardings: Params, notes: TextIO = sys.stdout, seed: int = 0
) -> Params:
    """Returns the parameters at `path`, each in its sharding and in the dtype that `model` has for it.

    Where the model stores kernels in few bits and the source has floats, these are rounded to nearest.

    path: a run directory, RUN/checkpoints/<n>, or a Hugging Face folder.
    notes: where a line about what was read goes, and a bar if it is a terminal.
    seed: of adapters that the model has and the source has not.

    Raises:
        CheckpointError, ConversionError: there are none, or they are another model's.
    """
    if is_model_folder(path):
        return load_folder(read_folder(path), model, shardings, notes, seed)
    notes = notes if is_primary() else io.StringIO()
    saved = parameter_shapes(path)
    check_forms(saved, model, path)
    intake = Intake(model, shardings, saved)
    found: dict[str, jax.Array] = {}
    if intake.rounded:
        read = parameter_reader(path, nested(intake.wanted))
        for name in intake.wanted:
            found.update(intake.take(name, read(name)))
    else:
        report = functools.partial(_print_report, notes)
        found = leaf_paths(restore_parameters(path, nested(intake.wanted), report))
    return _complete(intake, found, notes, path, seed)


def load_folder(
    folder: ModelFolder, model: Model, shardings: Params, notes: TextIO = sys.stdout, seed: int = 0
) -> Params:
    """Returns the parameters of a Hugging Face folder, as load_parameters.

    Each process reads and holds only what its devices do, but for one tensor: where a folder has a copy of the
    embedding that the model does not, process 0 reads both to compare them. All processes must call this.

    Raises:
        ConversionError: names every tensor that is missing, not known or misshapen, or the file that is damaged.
    """
    notes = notes if is_primary() else io.StringIO()
    intake = Intake(model, shardings, None)
    plan = plan_tensors(folder.family.table, nested(intake.wanted), layer_places(layer_groups(model.config)))
    source = together(f"open {folder.path}", folder.open_tensors)
    checked = on_primary(
        f"check {folder.path}", lambda: [dataclasses.astuple(one) for one in check_tensors(plan, source)]
    )
    skipped = describe_skipped([Skipped(*one) for one in checked])
    for line in (*differing_keys(folder, model.config), *folder.remarks, *skipped):
        print(line, file=notes)
    found = together(f"read {folder.path}", lambda: _read(plan, source, intake, notes))
    return _complete(intake, found, notes, folder.path, seed)


def _print_report(notes: TextIO, report: RestoreReport) -> None:
    print(report.line(), file=notes)


def _complete(intake: Intake, found: dict[str, jax.Array], notes: TextIO, path: str | Path, seed: int) -> Params:
    text = intake.describe()
    if text is not None:
        print(f"Of {path}: {text}", file=notes)
    return intake.complete(found, seed)


def _read(plan: Plan, source: Source, intake: Intake, notes: TextIO) -> dict[str, jax.Array]:
    """Returns the parameters by their paths."""
    placed = {path: leaf.sharding for path, leaf in intake.wanted.items()}
    own = {path: own_boxes(placed[path], leaf.shape) for path, leaf in plan.parameters.items()}
    boxes = {path: set(parts.values()) for path, parts in own.items()}
    found: dict[str, jax.Array] = {}
    part = f", what process {process_index()} of {num_processes()} needs" if num_processes() > 1 else ""
    with ByteProgress(f"Read {source.place}{part}", num_bytes(plan, source, boxes), notes) as progress:
        for path, arrays in read_parameters(plan, source, boxes, progress):
            array = _place(arrays, own[path], plan.parameters[path].shape, placed[path])
            del arrays
            found.update(intake.take(path, array))
            del array
    return found


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
