"""Reads arrays of a step, each straight into its new sharding, and checks that they are those that were saved."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import options as orbax_options

from maxlite.checkpoint.checksums import device_checksums
from maxlite.checkpoint.device_sums import device_sharding
from maxlite.checkpoint.names import ITEMS
from maxlite.checkpoint.quiet import quiet_orbax
from maxlite.checkpoint.record import StepRecord
from maxlite.checkpoint.step_folder import damaged
from maxlite.checkpoint.tree import leaf_paths, nested
from maxlite.processes.group import num_processes, process_index, together

Wanted = Mapping[str, jax.ShapeDtypeStruct]


def read_arrays(folder: Path, record: StepRecord, wanted: Wanted) -> dict[str, jax.Array]:
    """Returns path -> array as `wanted` has it, sharding and dtype.

    What is to have another dtype is read in its own, checked, and cast: so many arrays at a time that they are no
    larger together than the largest is.

    Args:
        folder: of the step.
        record: of that step; has all paths that are wanted, with the shapes that are wanted.
        wanted: path -> abstract array with a sharding.

    Raises:
        CheckpointError: an array can't be read or is not as it was saved, naming it.
    """
    quiet_orbax()
    found = {}
    for group in _groups(record, wanted):
        saved = {path: _as_saved(record, path, wanted[path]) for path in group}
        arrays = together("checkpoint arrays", partial(_read, folder, saved))
        _check(folder, record, arrays)
        for path in group:
            found[path] = _cast(arrays.pop(path), wanted[path])
    return found


def _groups(record: StepRecord, wanted: Wanted) -> Iterator[list[str]]:
    """Paths to be read at once: first all that need no cast."""
    casts = [path for path, leaf in wanted.items() if jnp.dtype(record.leaves[path].dtype) != leaf.dtype]
    yield [path for path in wanted if path not in set(casts)]
    most = max((record.leaves[path].num_bytes() for path in casts), default=0)
    group, size = [], 0
    for path in casts:
        size += record.leaves[path].num_bytes()
        if size > most:
            yield group
            group, size = [], record.leaves[path].num_bytes()
        group.append(path)
    yield group


def _as_saved(record: StepRecord, path: str, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    dtype = jnp.dtype(record.leaves[path].dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)


def _read(folder: Path, wanted: Wanted) -> dict[str, jax.Array]:
    """Each process reads what its own devices hold."""
    if not wanted:
        return {}
    try:
        return _read_by_orbax(folder, wanted)
    except Exception as error:
        cause = f"orbax failed ({_first_line(error)})"
        raise damaged(folder, f"{_unreadable(folder, wanted)}: {cause}") from error


def _unreadable(folder: Path, wanted: Wanted) -> str:
    """The first array that can't be read alone."""
    for path, leaf in wanted.items():
        try:
            _read_by_orbax(folder, {path: leaf})
        except Exception:
            return path
    return "all arrays together"


def _read_by_orbax(folder: Path, wanted: Wanted) -> dict[str, jax.Array]:
    item = nested(wanted)
    arguments = ocp.args.PyTreeRestore(
        item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
    )
    # Alone, so that a process which can't read does not leave the others waiting in orbax.
    alone = orbax_options.MultiprocessingOptions(
        primary_host=process_index(),
        active_processes={process_index()} if num_processes() > 1 else None,
        barrier_sync_key_prefix=str(process_index()) if num_processes() > 1 else None,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), multiprocessing_options=alone) as reader:
        return leaf_paths(reader.restore(folder / ITEMS, args=arguments))


def _check(folder: Path, record: StepRecord, arrays: Mapping[str, jax.Array]) -> None:
    """Every process gets the same sums, and so comes to the same end."""
    sums = device_checksums("sums of what was read", arrays)
    differing = [path for path, checksum in sums.items() if checksum != record.leaves[path].checksum]
    if differing:
        more = f" and {len(differing) - 1} more arrays" if len(differing) > 1 else ""
        raise damaged(folder, f"the values of {differing[0]}{more} are not those that were saved (checksums differ)")


def _cast(array: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    if array.dtype == wanted.dtype:
        return array
    on_device = device_sharding(array)
    cast = jax.jit(lambda x: x.astype(wanted.dtype), out_shardings=on_device)
    return jax.device_put(cast(jax.device_put(array, on_device)), wanted.sharding)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
