"""From what a command was given to its config: a YAML file, a run directory or a Hugging Face folder comes first."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from maxlite.config.load import load_config
from maxlite.config.schema import Config
from maxlite.data.model_folder import has_tokenizer
from maxlite.errors import ConfigError
from maxlite.hf.folder import is_model_folder, read_folder

# A row of training that suits every model is cut to what a small one may be asked for.
USUAL_ROW = 256


def resolve_config(path: str, overrides: Sequence[str]) -> Config:
    """Returns the config of `base.yml key=value ...`, of a run directory, of a Hugging Face folder or a GGUF file.

    Raises:
        ConfigError: as load_config.
        ConversionError: the folder of load_hf cannot be read.
    """
    if is_model_folder(path):
        reader = functools.partial(folder_keys, expects_text=False)
        return load_config("base.yml", [f"load_hf={path}", *overrides], folder_reader=reader)
    config = load_config(path, overrides, folder_reader=folder_keys)
    folder, data = config.checkpoint.load_hf, config.data
    if folder is not None and data.dataset_type != "synthetic" and data.tokenizer_path is None:
        raise ConfigError(
            f"load_hf={folder} has no tokenizer.json, and bytes would mean nothing to its model: give tokenizer_path=, "
            "or dataset_type=synthetic if there is no text (prompts are ids then)."
        )
    return config


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
