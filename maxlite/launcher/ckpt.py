"""`maxlite ckpt`: ls, show, diff, verify and prune. Nothing but a checkpoint's own files is needed to read it."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import jax

from maxlite.checkpoint.compare import compare_steps
from maxlite.checkpoint.leaves import saved_shardings
from maxlite.checkpoint.listing import folder_bytes, list_steps, why_kept
from maxlite.checkpoint.names import CHECKPOINTS
from maxlite.checkpoint.place import is_bucket, place_of
from maxlite.checkpoint.restore import parameters_folder
from maxlite.checkpoint.run_directory import RunDirectory
from maxlite.checkpoint.step_folder import find_checkpoints, read_data_state, remove_step, verify_files
from maxlite.checkpoint.verify import verify_step
from maxlite.config.load import load_config
from maxlite.config.schema import CheckpointConfig
from maxlite.config.yaml_file import read_yaml
from maxlite.errors import CheckpointError, ConfigError
from maxlite.launcher.ckpt_shown import (
    about_step,
    comparison_as_json,
    difference_lines,
    leaf_as_json,
    leaf_table,
    record_as_json,
    sharding_as_json,
    size_text,
    step_as_json,
    step_table,
    verified_lines,
)

# The keys that say which checkpoints are kept.
KEEP_KEYS = (
    "max_num_checkpoints_to_keep",
    "checkpoint_keep_period",
    "checkpoint_keep_minutes",
    "checkpoint_keep_best",
    "checkpoint_best_metric",
    "checkpoint_best_mode",
)


def print_list(path: str, json_output: bool) -> None:
    """Prints the saves of a run, complete or not.

    Raises:
        CheckpointError: there is no such run.
    """
    run = _run_folder(path)
    steps, keep = list_steps(find_checkpoints(run)), keep_config(run)
    kept = why_kept(steps, keep)
    if json_output:
        print(json.dumps([step_as_json(entry, kept) for entry in steps]))
    elif steps:
        print(step_table(steps, kept, keep.checkpoint_best_metric))
    else:
        print(f"{run} has no checkpoints")


def print_step(path: str, json_output: bool) -> None:
    """Prints what one checkpoint holds: every array and how it lay on its mesh, the data position.

    path: a run, whose newest complete checkpoint is meant, or RUN/checkpoints/<n>.

    Raises:
        CheckpointError: there is none, or it can't be read.
    """
    _leave_accelerators_alone()
    folder = parameters_folder(path)
    record, data_state = verify_files(folder), read_data_state(folder)
    shardings = saved_shardings(folder)
    if json_output:
        arrays = {name: leaf_as_json(leaf) | sharding_as_json(shardings[name]) for name, leaf in record.leaves.items()}
        print(json.dumps({"folder": str(folder), **record_as_json(record), "data_state": data_state, "arrays": arrays}))
        return
    in_memory = size_text(sum(leaf.num_bytes() for leaf in record.leaves.values()))
    print(f"{folder}: {len(record.leaves)} arrays, {in_memory} in memory, {size_text(folder_bytes(folder))} on disk")
    print(*about_step(record), f"data position: {json.dumps(data_state)}", sep="\n")
    print(leaf_table(record.leaves, shardings))


def print_diff(first: str, second: str, json_output: bool) -> None:
    """Prints in which arrays two checkpoints differ, and how much.

    Raises:
        CheckpointError: one of them is not there, or can't be read.
    """
    _leave_accelerators_alone()
    folders = parameters_folder(first), parameters_folder(second)
    data_states = [read_data_state(folder) for folder in folders]
    found = compare_steps(*folders)
    if json_output:
        print(json.dumps(comparison_as_json(found) | {"data_state": data_states}))
        return
    print("\n".join(difference_lines(found, first, second)))
    if data_states[0] != data_states[1]:
        print(f"data position: {json.dumps(data_states[0])} -> {json.dumps(data_states[1])}")


def verify(path: str, json_output: bool) -> None:
    """Reads all complete checkpoints of a run, or one, and prints for each whether it is as it was saved.

    Raises:
        CheckpointError: one is not, after all have been printed; or there is none.
    """
    _leave_accelerators_alone()
    newest = parameters_folder(path)
    is_run = newest.parent == find_checkpoints(path)
    listed = list_steps(newest.parent) if is_run else []
    folders = [entry.folder for entry in listed if entry.step is not None] if is_run else [newest]
    rows = []
    for folder in folders:
        rows.append(verify_step(folder))
        if not json_output:
            print("\n".join(verified_lines(rows[-1])))
    if json_output:
        print(json.dumps([dataclasses.asdict(row) | {"folder": str(row.folder)} for row in rows]))
    damaged = [row.folder.name for row in rows if row.problems]
    if damaged:
        raise CheckpointError(
            f"of {len(rows)} checkpoints in {newest.parent} these are not as they were saved: {', '.join(damaged)}."
        )


def prune(path: str, overrides: Sequence[str], *, dry_run: bool, json_output: bool) -> None:
    """Removes the complete checkpoints that the keep keys do not keep, or with dry_run says which.

    overrides: keep keys, `key=value`; the others are those of the run's config.

    Raises:
        ConfigError: another key, or a value that does not fit.
        CheckpointError: there is no such run, or a process is training in it.
    """
    run = _run_folder(path)
    if is_bucket(run):
        raise CheckpointError(f"{run} has no lock against the run that may be saving there; give the run's own folder.")
    if dry_run:
        _prune_locked(run, overrides, dry_run=True, json_output=json_output)
        return
    with RunDirectory(run.parent, run.name).lock():
        _prune_locked(run, overrides, dry_run=False, json_output=json_output)


def keep_config(run: Path, overrides: Sequence[str] = ()) -> CheckpointConfig:
    """Returns the keep keys of a run's config.yml, and base.yml's where it has none, with `overrides`.

    The other keys of that file are left alone: they are for the machine that trains.

    Raises:
        ConfigError: another key, or a value that does not fit.
    """
    strange = [text for text in overrides if text.partition("=")[0] not in KEEP_KEYS]
    if strange:
        raise ConfigError(f"{strange[0]} says nothing of what is kept; the keys that do: {', '.join(KEEP_KEYS)}.")
    file = run / "config.yml"
    entries = read_yaml(file, str(file))[0] if file.is_file() else {}
    saved = {name: entries[name].value for name in KEEP_KEYS if name in entries}
    keys = [f"{name}={'null' if value is None else value}" for name, value in saved.items()]
    given = {text.partition("=")[0] for text in overrides}
    keys = [text for text in keys if text.partition("=")[0] not in given]
    # A dtype that is named needs no device.
    return load_config("base.yml", ["dtype=float32", "dataset_type=synthetic", *keys, *overrides], {}).checkpoint


def _prune_locked(run: Path, overrides: Sequence[str], *, dry_run: bool, json_output: bool) -> None:
    steps = list_steps(find_checkpoints(run))
    kept = why_kept(steps, keep_config(run, overrides))
    removed = [entry for entry in steps if entry.problem is None and entry.step not in kept]
    for entry in removed if not dry_run else ():
        remove_step(entry.folder)
    num_bytes = sum(entry.num_bytes for entry in removed)
    if json_output:
        numbers = [entry.step for entry in removed]
        print(json.dumps({"removed": numbers, "num_bytes": num_bytes, "kept": dict(kept), "dry_run": dry_run}))
        return
    for step, why in kept.items():
        print(f"kept {step}: {why}")
    listed = ", ".join(str(entry.step) for entry in removed) or "nothing"
    print(f"{'would remove' if dry_run else 'removed'} {listed}{f' ({size_text(num_bytes)})' if removed else ''}")


def _run_folder(path: str) -> Path:
    run = place_of(path)
    if not find_checkpoints(run).is_dir() and not (run / "config.yml").is_file():
        found = f"it has no folder '{CHECKPOINTS}'" if run.is_dir() else "there is no such folder"
        raise CheckpointError(f"no run at {run}: {found}. Give the folder of a run.")
    return run


def _leave_accelerators_alone() -> None:
    """Arrays are read on the CPU: a run may be using the chips at this moment."""
    jax.config.update("jax_platforms", "cpu")
