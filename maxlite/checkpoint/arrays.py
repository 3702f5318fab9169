"""How arrays go to disk: orbax's handler, the size of chunks and files, how much is on the way at once."""

from typing import Any

import jax
import orbax.checkpoint as ocp

# Chunks of this size are compressed and read by several threads.
CHUNK_BYTES = 16 << 20
# A conversion's chunks and files are smaller: what waits to be compressed or written is in memory.
LEAN_CHUNK_BYTES, LEAST_FILE_BYTES, MOST_FILES = 4 << 20, 4 << 20, 128


def array_handler(largest_bytes: int | None) -> ocp.PyTreeCheckpointHandler:
    """Returns the handler of a pytree of arrays.

    largest_bytes: of the arrays, if no more bytes than that may be on the way at once: a conversion has memory for one
        model only. Training has room and wants to be quick.
    """
    # Floats shrink by a few percent, and saving takes three times as long; but what is compressed waits in less memory.
    # orbax refuses an array that is as large as the limit.
    limit = None if largest_bytes is None else 1 + largest_bytes
    implementation = ocp.BasePyTreeCheckpointHandler(save_concurrent_bytes=limit, use_compression=limit is not None)
    return ocp.PyTreeCheckpointHandler(handler_impl=implementation)


def save_arguments(arrays: Any, *, lean: bool) -> ocp.args.PyTreeSave:
    """Returns what orbax needs to save a nested dict of arrays."""
    size = LEAN_CHUNK_BYTES if lean else CHUNK_BYTES
    chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=size), arrays)
    if not lean:
        return ocp.args.PyTreeSave(arrays, save_args=chunks)
    total = sum(array.nbytes for array in jax.tree.leaves(arrays))
    file_bytes = max(LEAST_FILE_BYTES, total // MOST_FILES)
    return ocp.args.PyTreeSave(arrays, save_args=chunks, ocdbt_target_data_file_size=file_bytes)


def is_on_cpu(array: jax.Array) -> bool:
    """Says whether an array lies on devices that are the host's own cores."""
    return all(device.platform == "cpu" for device in array.sharding.device_set)
