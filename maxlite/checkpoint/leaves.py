"""The arrays of one step, read one at a time into this machine's memory: no model, no mesh, no accelerator."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from maxlite.checkpoint.bit_sums import leaf_checksum
from maxlite.checkpoint.names import ITEMS
from maxlite.checkpoint.quiet import quiet_orbax
from maxlite.checkpoint.record import Leaf
from maxlite.checkpoint.step_folder import damaged
from maxlite.checkpoint.tree import leaf_paths, nested
from maxlite.errors import CheckpointError


class SavedSharding(NamedTuple):
    """How an array lay when it was saved.

    spec: for each dimension the mesh axes that cut it; trailing ones that nothing cuts are left away. mesh: axis ->
    size.
    """

    spec: tuple[tuple[str, ...], ...]
    mesh: Mapping[str, int]


class LeafReader:
    """Reads single arrays of a step; made by open_leaves."""

    def __init__(self, folder: Path, leaves: Mapping[str, Leaf], reader: ocp.Checkpointer):
        """leaves: path -> what its record says of an array."""
        self._folder, self._leaves, self._reader = folder, leaves, reader

    def read(self, path: str) -> np.ndarray:
        """Returns one array. Raises CheckpointError, which begins with its path, if it is not as it was saved."""
        leaf = self._leaves[path]
        item = nested({path: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))})
        into_numpy = nested({path: ocp.RestoreArgs(restore_type=np.ndarray)})
        arguments = ocp.args.PyTreeRestore(item=item, restore_args=into_numpy, partial_restore=True)
        try:
            (array,) = jax.tree.leaves(self._reader.restore(self._folder / ITEMS, args=arguments))
        except Exception as error:
            lines = str(error).splitlines() or ["no message"]
            raise CheckpointError(f"{path}: it can't be read ({type(error).__name__}: {lines[0][:500]})") from error
        # orbax hands back what it was asked with where it has no such array.
        if not isinstance(array, np.ndarray):
            raise CheckpointError(f"{path}: it is not among the arrays of {self._folder}")
        was, now = f"{list(leaf.shape)} {leaf.dtype}", f"{list(array.shape)} {array.dtype}"
        if was != now:
            raise CheckpointError(f"{path}: it is {now} where {was} was saved")
        found = leaf_checksum(array)
        if found != leaf.checksum:
            raise CheckpointError(
                f"{path}: its values are not those that were saved (checksums {found} and {leaf.checksum})"
            )
        return array


@contextmanager
def open_leaves(folder: Path, leaves: Mapping[str, Leaf]) -> Iterator[LeafReader]:
    """Opens a step's folder for reading; `leaves` is its record's."""
    quiet_orbax()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        yield LeafReader(folder, leaves, reader)


def saved_shardings(folder: Path) -> dict[str, SavedSharding | None]:
    """Returns path -> how that array lay on its mesh; None for one that was on no mesh.

    Raises:
        CheckpointError: the list of arrays can't be read.
    """
    quiet_orbax()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        metadata: Any = reader.metadata(folder / ITEMS).item_metadata
    # orbax reports what it can't read in its log alone.
    if metadata is None:
        raise damaged(folder, "the list of its arrays is unreadable")
    return {path: _sharding(leaf.sharding) for path, leaf in leaf_paths(metadata.tree).items()}


def _sharding(saved: Any) -> SavedSharding | None:
    if not isinstance(saved, ocp.metadata.NamedShardingMetadata):
        return None
    spec = tuple((entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in saved.partition_spec)
    return SavedSharding(spec, dict(zip(saved.axis_names, map(int, saved.shape), strict=True)))
