"""Writes the float32 logits of prompts, so that a model can be compared with any other program."""

import contextlib
import os
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.decode.generate import padded_length
from maxlite.decode.model import compiler_options
from maxlite.decode.prompts import Prompt
from maxlite.errors import ConfigError
from maxlite.model.build import Model, Params
from maxlite.parallel.devices import host_value


def write_logits(path: str, model: Model, params: Params, prompts: Sequence[Prompt]) -> None:
    """Writes logits_0 [T, V], logits_1, ... of each prompt's own positions to an uncompressed npz file.

    The forward pass is the one of training, without a cache; one prompt is in memory at a time.

    Raises:
        ConfigError: the file can't be written; then none is left behind.
    """
    length = padded_length(max(len(prompt.ids) for prompt in prompts))

    @partial(jax.jit, compiler_options=compiler_options(model))
    def prompt_logits(params: Params, tokens: jax.Array, segment_ids: jax.Array) -> jax.Array:
        positions = jnp.arange(length)[None]
        return model.logits(params, model.apply(params, tokens, positions, segment_ids).hidden)[0]

    with _replaced_whole(path) as archive:
        for index, prompt in enumerate(prompts):
            tokens, segment_ids = np.zeros((2, 1, length), np.int32)
            tokens[0, : len(prompt.ids)], segment_ids[0, : len(prompt.ids)] = prompt.ids, 1
            values = host_value(prompt_logits(params, tokens, segment_ids))[: len(prompt.ids)]
            with archive.open(f"logits_{index}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, values, allow_pickle=False)


def check_writable(path: str) -> None:
    """Raises ConfigError if no file can be made in the folder of `path`, before any work is done for it."""
    folder = Path(path).expanduser().absolute().parent
    if Path(path).expanduser().is_dir():
        raise ConfigError(f"logits_path={path} is a folder; give the name of a file in it.")
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"logits_path={path}: the folder {folder} is not there or can't be written.")


@contextlib.contextmanager
def _replaced_whole(path: str) -> Iterator[zipfile.ZipFile]:
    target = Path(path).expanduser().absolute()
    scratch = None
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            scratch = Path(file.name)
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                yield archive
        scratch.chmod(0o644)
        scratch.replace(target)
    except OSError as error:
        raise ConfigError(f"logits_path={path} can't be written: {error.strerror}.") from error
    finally:
        if scratch is not None:
            scratch.unlink(missing_ok=True)
