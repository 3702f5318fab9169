"""Reads a checkpoint: a whole step, or its parameters alone, into the shardings that are wanted now."""

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from maxlite.checkpoint.names import CHECKPOINTS
from maxlite.checkpoint.place import place_of
from maxlite.checkpoint.read_arrays import read_arrays
from maxlite.checkpoint.record import StepRecord, record_from_json
from maxlite.checkpoint.report import RestoreReport
from maxlite.checkpoint.step_folder import complete_steps, find_checkpoints, read_data_state, step_numbers, verify_files
from maxlite.checkpoint.tree import ArrayShape, check_shapes, leaf_paths
from maxlite.errors import CheckpointError
from maxlite.processes.group import on_primary

PARAMS = "params"
OPTIMIZER_STATE = "opt_state"

Report = Callable[[RestoreReport], object]


def restore_step(folder: Path, abstract_items: Any, report: Report | None = None) -> tuple[Any, dict[str, Any]]:
    """Returns the items, shaped and sharded as `abstract_items`, and the data state of one step's folder.

    report: is given what was read.

    Raises CheckpointError if a file or an array is damaged, if the arrays are not those of `abstract_items`, or if
    there are parameters alone.
    """
    record, wanted = _verified(folder), leaf_paths(abstract_items)
    if _has_training(wanted) and not _has_training(record.leaves):
        run = folder.parents[1]
        raise CheckpointError(
            f"checkpoint {folder} holds parameters alone, as an imported model's does: there is no training to go on "
            f"with. Begin one from them: maxlite train base.yml model={run}/model.yml load_parameters_path={run} "
            "run_name=NEW."
        )
    check_shapes(record.shapes(), wanted, f"checkpoint {folder}")
    data_state = on_primary("data position", lambda: read_data_state(folder))
    return _read(folder, record, abstract_items, report), data_state


def restore_parameters(path: str | Path, abstract_params: Any, report: Report | None = None) -> Any:
    """Returns the parameters of a run directory (its newest complete step) or of RUN/checkpoints/<n>.

    Args:
        path: what `load_parameters_path` was given.
        abstract_params: pytree of jax.ShapeDtypeStruct with shardings; another dtype than the saved one is a cast.
        report: is given what was read.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or its parameters have other shapes.
    """
    folder, record = _checked(path, abstract_params)
    return _read(folder, record, {PARAMS: abstract_params}, report)[PARAMS]


def parameter_reader(path: str | Path, abstract_params: Any) -> Callable[[str], jax.Array]:
    """As restore_parameters, one at a time: returns a function from a parameter's path to its value.

    Raises:
        CheckpointError: as restore_parameters, before anything is read; and the function, for a damaged array.
    """
    folder, record = _checked(path, abstract_params)
    abstract = leaf_paths({PARAMS: abstract_params})

    def read(name: str) -> jax.Array:
        whole = f"{PARAMS}/{name}"
        return read_arrays(folder, record, {whole: abstract[whole]})[whole]

    return read


def parameter_shapes(path: str | Path) -> dict[str, ArrayShape]:
    """Returns slash-joined path -> (shape, dtype) of the saved parameters, without reading an array."""
    shapes = _parameters(_verified(parameters_folder(path)))
    return {name.removeprefix(f"{PARAMS}/"): shape for name, shape in shapes.items()}


def parameters_folder(path: str | Path) -> Path:
    """Returns the step's folder that `path` means. Raises CheckpointError if it means none."""
    return place_of(on_primary("parameters folder", lambda: str(_find_parameters(place_of(path)))))


def _find_parameters(given: Path) -> Path:
    if given.parent.name == CHECKPOINTS and given.name.isdecimal():
        if given.is_dir():
            return given
        steps = ", ".join(map(str, step_numbers(given.parent))) or "none"
        raise CheckpointError(f"there is no checkpoint {given}; steps that exist there: {steps}")
    checkpoints = find_checkpoints(given)
    steps_complete = complete_steps(checkpoints)
    if steps_complete:
        return checkpoints / str(steps_complete[-1])
    if not given.exists():
        found = "there is no such folder"
    elif not checkpoints.is_dir():
        found = f"it has no folder '{CHECKPOINTS}'"
    else:
        found = f"its folder '{CHECKPOINTS}' holds no complete step"
    raise CheckpointError(
        f"no parameters at {given}: {found}. Give a run directory (its newest checkpoint is read) "
        f"or one checkpoint, RUN/{CHECKPOINTS}/<step>."
    )


def _checked(path: str | Path, abstract_params: Any) -> tuple[Path, StepRecord]:
    """The step's folder and record, its files sound and its parameters those that are wanted."""
    folder = parameters_folder(path)
    record = _verified(folder)
    check_shapes(_parameters(record), leaf_paths({PARAMS: abstract_params}), f"checkpoint {folder}")
    return folder, record


def _verified(folder: Path) -> StepRecord:
    """Process 0 looks at the files, for all: one reader is enough, and all go by the same record."""
    return record_from_json(on_primary("checkpoint files", lambda: verify_files(folder).as_json()))


def _parameters(record: StepRecord) -> dict[str, ArrayShape]:
    return {path: shape for path, shape in record.shapes().items() if path.startswith(f"{PARAMS}/")}


def _has_training(paths: Iterable[str]) -> bool:
    return any(path.startswith(f"{OPTIMIZER_STATE}/") for path in paths)


def _read(folder: Path, record: StepRecord, abstract: Any, report: Report | None) -> Any:
    """Reads the arrays of a tree, and reports."""
    began, wanted = time.perf_counter(), leaf_paths(abstract)
    found = jax.block_until_ready(read_arrays(folder, record, wanted))
    if report is not None:
        report(_report(record, wanted, time.perf_counter() - began))
    return jax.tree.unflatten(jax.tree.structure(abstract), [found[path] for path in wanted])


def _report(record: StepRecord, wanted: Mapping[str, jax.ShapeDtypeStruct], seconds: float) -> RestoreReport:
    pairs = {path: (record.leaves[path].dtype, str(leaf.dtype)) for path, leaf in wanted.items()}
    return RestoreReport(
        restored=tuple(wanted),
        cast={path: pair for path, pair in pairs.items() if pair[0] != pair[1]},
        not_used=tuple(path for path in record.leaves if path not in wanted),
        num_bytes=sum(record.leaves[path].num_bytes() for path in wanted),
        seconds=seconds,
    )
