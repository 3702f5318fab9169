"""From our parameters to the safetensors files of a Hugging Face folder, one stacked array at a time."""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from maxlite.errors import ConversionError
from maxlite.hf.chunks import Chunk, Progress, build_pool, chunks_to_write, for_chunks, places_in
from maxlite.hf.copies import copy_values
from maxlite.hf.plan import Piece, Plan, natural_order
from maxlite.hf.shards import Location, NewTensor

# Between the destination's name and the number of the process that makes it.
_UNFINISHED = ".unfinished-"


def check_new(destination: Path) -> None:
    """Raises ConversionError if there is something at `destination`, be it a link that leads nowhere."""
    # Not Path.exists, which raises OSError for a name that is too long.
    if os.path.lexists(destination):
        raise ConversionError(f"{destination} exists: choose another destination, or remove it first.")


@contextlib.contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """Gives a folder to fill, which becomes `destination` if all goes well and is removed if not.

    Raises:
        ConversionError: the destination exists, or something could not be written.
    """
    check_new(destination)
    # Beside it, so that the renaming at the end stays inside one file system.
    unfinished = destination.with_name(f".{destination.name}{_UNFINISHED}{os.getpid()}")
    _remove_litter(destination)
    try:
        unfinished.mkdir(parents=True)
        with _stop_signal_as_exit():
            yield unfinished
        unfinished.rename(destination)
    except OSError as error:
        raise ConversionError(f"{destination} could not be written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _remove_litter(destination: Path) -> None:
    """Removes what conversions to this destination left that were killed; theirs who still run stays."""
    prefix = f".{destination.name}{_UNFINISHED}"
    folder = destination.parent
    entries = [entry for entry in folder.iterdir() if entry.name.startswith(prefix)] if folder.is_dir() else []
    for entry in entries:
        number = entry.name.removeprefix(prefix)
        try:
            os.kill(int(number), 0)
        except (ProcessLookupError, ValueError):
            shutil.rmtree(entry, ignore_errors=True)
        except PermissionError:
            pass  # Another user's process, which runs.


@contextlib.contextmanager
def _stop_signal_as_exit() -> Iterator[None]:
    """SIGTERM ends the process as an exception does, so that what is unfinished is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def new_tensors(plan: Plan, dtype: np.dtype | None) -> list[NewTensor]:
    """Returns the tensors that a plan writes, in the order of the files.

    dtype: of all but those that are float32 in any case; None is that of each parameter.
    """
    pieces = sorted(plan.pieces, key=lambda piece: natural_order(piece.tensor))
    return [NewTensor(piece.tensor, piece.shape, _dtype_of(piece, plan, dtype)) for piece in pieces]


def fill_tensors(
    plan: Plan,
    fetch: Callable[[str], np.ndarray],
    locations: Mapping[str, Location],
    tensors: list[NewTensor],
    progress: Progress,
) -> None:
    """Writes `tensors` (of `new_tensors`) to where `make_shards` has made room for them.

    fetch: path -> value of a parameter, called once for each, in the plan's order; not held after it is written.
    progress: called with how many more bytes have been written.
    """
    dtypes = {tensor.name: tensor.dtype for tensor in tensors}
    with build_pool() as pool:
        for paths, pieces in plan.bundles.items():
            # A transform makes views, so the order in memory must be that of the dimensions.
            arrays = {path: np.ascontiguousarray(fetch(path)) for path in paths}

            def write(chunk: Chunk) -> int:
                name = chunk.piece.tensor
                return _write_chunk(chunk, locations[name], dtypes[name])

            for_chunks(pool, (chunk for piece in pieces for chunk in chunks_to_write(piece, arrays)), write, progress)
            del arrays


def _dtype_of(piece: Piece, plan: Plan, dtype: np.dtype | None) -> np.dtype:
    if piece.float32:
        return np.dtype(np.float32)
    return np.dtype(dtype or plan.parameters[piece.slots[0].path].dtype)


def _write_chunk(chunk: Chunk, location: Location, dtype: np.dtype) -> int:
    rows = np.empty(tuple(stop - start for start, stop in chunk.box), dtype)
    for region, view in places_in(chunk):
        copy_values(rows[(*region, ...)], view)
    _write_bytes(location.file, location.offset + chunk.before * dtype.itemsize, rows)
    return rows.nbytes


def write_array(location: Location, array: np.ndarray) -> None:
    """Writes all of a C-contiguous array."""
    _write_bytes(location.file, location.offset, array)


def _write_bytes(file: Path, offset: int, array: np.ndarray) -> None:
    buffer = array.reshape(-1).view(np.uint8).data
    with file.open("r+b", buffering=0) as opened:
        opened.seek(offset)
        while buffer:
            buffer = buffer[opened.write(buffer) :]
