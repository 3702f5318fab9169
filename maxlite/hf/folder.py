"""A Hugging Face model's folder, or a GGUF file: what its JSON files say, and its tensors as floats. Imports no jax."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlite.data.gguf_header import is_gguf
from maxlite.data.json_files import read_json
from maxlite.errors import ConversionError
from maxlite.hf.compressed import CompressedSource
from maxlite.hf.compressed_json import METHOD as COMPRESSED
from maxlite.hf.compressed_json import read_schemes, rounds_activations
from maxlite.hf.config_json import read_config
from maxlite.hf.dequantize import dequantize
from maxlite.hf.family_lines import Family
from maxlite.hf.gguf import open_gguf, read_json_files
from maxlite.hf.quantization_json import quantization_method
from maxlite.hf.safetensors import SafetensorsSource
from maxlite.hf.source import Respelled, Source

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
# What a tokenizer is made of, in any of its forms.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


@dataclasses.dataclass(frozen=True)
class ModelFolder:
    """A folder, or a GGUF file in its place, that has been read, but for its tensors.

    config, generation_config: the JSON objects; the latter is empty where there is no such file.
    family: whose table also knows what tensors of this folder are left out. keys: every key of ModelConfig.
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    family: Family
    keys: Mapping[str, Any]

    @property
    def remarks(self) -> list[str]:
        """Lines on what the model does differently here, whatever its keys say."""
        if quantization_method(self.config) != COMPRESSED or not rounds_activations(self.config["quantization_config"]):
            return []
        return [f"Activations stay as they are; {self.path} would have them rounded to few bits too."]

    def open_tensors(self) -> Source:
        """Returns the tensors, under the family's names and as floats, however they are stored.

        Raises:
            ConversionError: a file is missing, cut short or garbled.
        """
        if is_gguf(self.path):
            return Respelled(open_gguf(self.path), self.family.table.spellings)
        source = Respelled(SafetensorsSource(self.path), self.family.table.spellings)
        method = quantization_method(self.config)
        if method is None:
            return source
        if method == COMPRESSED:
            return CompressedSource(source, read_schemes(self.config["quantization_config"]))
        return dequantize(source, self.config["quantization_config"])


def is_model_folder(path: str | Path) -> bool:
    """Says whether `path` is a folder with a config.json, and no run directory; or a GGUF file."""
    folder = Path(path).expanduser()
    return is_gguf(folder) or (folder / CONFIG).is_file() and not (folder / "config.yml").is_file()


def read_folder(path: str | Path) -> ModelFolder:
    """Reads the JSON files of a folder, or the metadata of a GGUF file.

    Raises:
        ConversionError: it is not there, or its config.json cannot be read or honoured.
    """
    folder = Path(path).expanduser()
    if is_gguf(folder):
        config, generation = read_json_files(folder)
        return ModelFolder(folder, config, generation, *read_config(config, str(folder)))
    if not (folder / CONFIG).is_file():
        found = "has no config.json" if folder.is_dir() else "is not there"
        raise ConversionError(f"{folder} {found}; give a Hugging Face model's folder.")
    config = read_json(folder / CONFIG, ConversionError)
    file = folder / GENERATION_CONFIG
    generation = read_json(file, ConversionError) if file.exists() else {}
    family, keys = read_config(config, str(folder / CONFIG))
    return ModelFolder(folder, config, generation, family, keys)
