"""From what a command was given to its config: a YAML file, a run directory or a Hugging Face folder comes first."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxlite.config.load import load_config
from maxlite.config.schema import Config
from maxlite.data.model_folder import ORIGINALS, has_tokenizer
from maxlite.errors import ConfigError
from maxlite.hf.folder import is_model_folder, read_folder
from maxlite.hf.run_files import run_of

# A row of training that suits every model is cut to what a small one may be asked for.
USUAL_ROW = 256


def resolve_config(path: str, overrides: Sequence[str], *, prompts_may_be_ids: bool = False) -> Config:
    """Returns the config of `base.yml key=value ...`, of a run directory, of a Hugging Face folder or a GGUF file.

    prompts_may_be_ids: for decoding. A model without a tokenizer takes ids then, and a checkpoint of a run may come
        first too.

    Raises:
        ConfigError: as load_config; or text would go as bytes into a model that was not trained on bytes.
        ConversionError: the folder of load_hf cannot be read.
    """
    reader = functools.partial(folder_keys, expects_text=not prompts_may_be_ids)
    if is_model_folder(path):
        reader = functools.partial(folder_keys, expects_text=False)
        return load_config("base.yml", [f"load_hf={path}", *overrides], folder_reader=reader)
    if prompts_may_be_ids:
        path, overrides = from_run(path, overrides)
    without_text = _without_text(overrides) if prompts_may_be_ids else []
    config = load_config(path, [*overrides, *without_text], folder_reader=reader)
    start, data = config.checkpoint.start, config.data
    if start is not None and data.dataset_type != "synthetic" and data.tokenizer_path is None and _is_foreign(start):
        raise ConfigError(
            f"{start} has no tokenizer.json, and bytes would mean nothing to its model: give tokenizer_path=, or "
            "dataset_type=synthetic if there is no text (prompts are ids then)."
        )
    return config


def from_run(path: str, overrides: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Returns the run that a checkpoint of it is of, with the key that names the checkpoint; others as they are."""
    run = run_of(Path(path))
    if run != Path(path).expanduser().absolute() and (run / "config.yml").is_file():
        return str(run), [f"load_parameters_path={path}", *overrides]
    return path, overrides


def _without_text(overrides: Sequence[str]) -> list[str]:
    """Keys for prompts of ids, where the parameters are those of an imported run without a tokenizer."""
    given = {name: value for name, _, value in (text.partition("=") for text in overrides)}
    path = given.get("load_parameters_path")
    if path is None or {"dataset_type", "tokenizer_path"} & given.keys():
        return []
    return ["dataset_type=synthetic"] if _is_foreign(path) and not has_tokenizer(run_of(Path(path))) else []


def _is_foreign(start: str) -> bool:
    """Says whether parameters come from elsewhere: a Hugging Face folder, a GGUF file, or a run that began there."""
    return is_model_folder(start) or (run_of(Path(start)) / ORIGINALS).is_dir()


def folder_keys(folder: str, *, expects_text: bool = True) -> Mapping[str, Any]:
    """Returns the keys that a Hugging Face folder decides: the architecture, the tokenizer, a row that fits.

    expects_text: whether, without a tokenizer in the folder, text is expected all the same; else prompts are ids.
    """
    keys = dict(read_folder(folder).keys)
    if keys["max_position_embeddings"] < USUAL_ROW:
        keys["max_target_length"] = keys["max_position_embeddings"]
    if has_tokenizer(folder):
        keys["tokenizer_path"] = folder
    elif not expects_text:
        keys["dataset_type"] = "synthetic"
    return keys
