"""`maxlite quantize`: a run or a Hugging Face folder becomes a run with its kernels in few bits."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlite.config.load import load_config
from maxlite.config.schema import Config
from maxlite.hf.folder import is_model_folder, read_folder
from maxlite.hf.writer import check_new
from maxlite.launcher.convert import stored_dtype
from maxlite.launcher.resolve import folder_keys, from_run, resolve_config
from maxlite.quantize.run import run_quantize


def quantize(source: str, destination: str, overrides: list[str]) -> None:
    """Makes the run `destination` and prints what rounding costs.

    source: a run, its checkpoint, a Hugging Face folder, a GGUF file, or a YAML file that says where parameters are.

    Raises:
        MaxliteError: its children say what went wrong; then there is no destination.
    """
    check_new(Path(destination))
    config = _config(source, overrides)
    run_quantize(config, source, Path(destination), sys.stdout)
    print(f"Run: {destination}")
    print(f"Go on: maxlite decode {shlex.quote(destination)}")


def _config(source: str, overrides: list[str]) -> Config:
    if not is_model_folder(source):
        return resolve_config(*from_run(source, overrides))
    dtype = stored_dtype(read_folder(source))

    def keys(path: str) -> Mapping[str, Any]:
        # What is not rounded stays as the files have it.
        return {**folder_keys(path, expects_text=False), "weight_dtype": dtype}

    return load_config("base.yml", [f"load_hf={source}", *overrides], folder_reader=keys)
