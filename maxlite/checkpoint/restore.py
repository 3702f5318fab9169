"""Reads a checkpoint: a whole step, or its parameters alone, into the shardings that are wanted now."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from maxlite.checkpoint.quiet import quiet_orbax
from maxlite.checkpoint.step_folder import (
    CHECKPOINTS,
    DATA_STATE,
    ITEMS,
    complete_steps,
    damaged,
    step_numbers,
    verify_files,
)
from maxlite.checkpoint.tree import ArrayShape, check_shapes, leaf_paths, nested
from maxlite.errors import CheckpointError

PARAMS = "params"
OPTIMIZER_STATE = "opt_state"


def restore_step(folder: Path, abstract_items: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the items, shaped and sharded as `abstract_items`, and the data state of one step's folder.

    Raises CheckpointError if a file is damaged, if the arrays are not those of `abstract_items`, or if
    there are parameters alone.
    """
    verify_files(folder)
    saved, wanted = _shapes(folder), leaf_paths(abstract_items)
    if _has_training(wanted) and not _has_training(saved):
        run = folder.parents[1]
        raise CheckpointError(
            f"checkpoint {folder} holds parameters alone, as an imported model's does: there is no training to go on "
            f"with. Begin one from them: maxlite train base.yml model={run}/model.yml load_parameters_path={run} "
            "run_name=NEW."
        )
    check_shapes(saved, wanted, f"checkpoint {folder}")
    return _read_arrays(folder, abstract_items), _read_data_state(folder)


def restore_parameters(path: str | Path, abstract_params: Any) -> Any:
    """Returns the parameters of a run directory (its newest complete step) or of RUN/checkpoints/<n>.

    Args:
        path: what `load_parameters_path` was given.
        abstract_params: pytree of jax.ShapeDtypeStruct with shardings; another dtype than the saved one is a cast.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or its parameters have other shapes.
    """
    folder = _checked_folder(path, abstract_params)
    return _read_arrays(folder, {PARAMS: abstract_params})[PARAMS]


def parameter_reader(path: str | Path, abstract_params: Any) -> Callable[[str], jax.Array]:
    """As restore_parameters, one at a time: returns a function from a parameter's path to its value.

    Raises:
        CheckpointError: as restore_parameters, before anything is read.
    """
    folder, abstract = _checked_folder(path, abstract_params), leaf_paths({PARAMS: abstract_params})

    def read(name: str) -> jax.Array:
        (array,) = jax.tree.leaves(_read_arrays(folder, nested({f"{PARAMS}/{name}": abstract[f"{PARAMS}/{name}"]})))
        return array

    return read


def _checked_folder(path: str | Path, abstract_params: Any) -> Path:
    """The step's folder, its files sound and its parameters those that are wanted."""
    folder = parameters_folder(path)
    verify_files(folder)
    saved = {name: shape for name, shape in _shapes(folder).items() if name.startswith(f"{PARAMS}/")}
    check_shapes(saved, leaf_paths({PARAMS: abstract_params}), f"checkpoint {folder}")
    return folder


def parameter_shapes(path: str | Path) -> dict[str, ArrayShape]:
    """Returns slash-joined path -> (shape, dtype) of the saved parameters, without reading an array."""
    prefix = f"{PARAMS}/"
    shapes = _shapes(parameters_folder(path))
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def parameters_folder(path: str | Path) -> Path:
    """Returns the step's folder that `path` means. Raises CheckpointError if it means none."""
    given = Path(path).expanduser().absolute()
    if given.parent.name == CHECKPOINTS and given.name.isdecimal():
        if given.is_dir():
            return given
        steps = ", ".join(map(str, step_numbers(given.parent))) or "none"
        raise CheckpointError(f"there is no checkpoint {given}; steps that exist there: {steps}")
    steps_complete = complete_steps(given / CHECKPOINTS)
    if steps_complete:
        return given / CHECKPOINTS / str(steps_complete[-1])
    if not given.exists():
        found = "there is no such folder"
    elif not (given / CHECKPOINTS).is_dir():
        found = f"it has no folder '{CHECKPOINTS}'"
    else:
        found = f"its folder '{CHECKPOINTS}' holds no complete step"
    raise CheckpointError(
        f"no parameters at {given}: {found}. Give a run directory (its newest checkpoint is read) "
        f"or one checkpoint, RUN/{CHECKPOINTS}/<step>."
    )


def _has_training(paths: Iterable[str]) -> bool:
    return any(path.startswith(f"{OPTIMIZER_STATE}/") for path in paths)


def _shapes(folder: Path) -> dict[str, ArrayShape]:
    quiet_orbax()
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            metadata = reader.metadata(folder / ITEMS).item_metadata
    except Exception as error:
        raise damaged(folder, f"the list of its arrays is unreadable ({_first_line(error)})") from error
    return {path: (tuple(leaf.shape), leaf.dtype) for path, leaf in leaf_paths(metadata.tree).items()}


def _read_arrays(folder: Path, abstract: Any) -> Any:
    quiet_orbax()
    wanted = nested(leaf_paths(abstract))
    arguments = ocp.args.PyTreeRestore(
        item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            found = leaf_paths(reader.restore(folder / ITEMS, args=arguments))
    except Exception as error:
        raise damaged(folder, f"orbax failed ({_first_line(error)})") from error
    return jax.tree.unflatten(jax.tree.structure(abstract), [found[path] for path in leaf_paths(abstract)])


def _read_data_state(folder: Path) -> dict[str, Any]:
    try:
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as reader:
            return reader.restore(folder / DATA_STATE, args=ocp.args.JsonRestore())
    except (OSError, json.JSONDecodeError) as error:
        raise damaged(folder, f"the data position is unreadable ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
