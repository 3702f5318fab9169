"""Turns running out of memory, of a device or of the host, into advice."""

import contextlib
from collections.abc import Iterator

import jax

from maxlite.config.schema import Config
from maxlite.errors import OutOfMemoryError
from maxlite.metrics.out_of_memory import is_out_of_memory, out_of_memory_advice


@contextlib.contextmanager
def memory_advice(config: Config) -> Iterator[None]:
    """Raises OutOfMemoryError, which says what to change in `config`, where the block ran out of memory."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not (isinstance(error, MemoryError) or is_out_of_memory(str(error))):
            raise
        sections = (config.compute, config.data, config.train, config.parallel, config.optimizer)
        raise OutOfMemoryError(out_of_memory_advice(str(error) or "the host's memory", *sections)) from error
