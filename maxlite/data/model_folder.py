"""What a Hugging Face model's folder says about text beside its weights: end ids, and where its tokenizer is."""

from pathlib import Path
from typing import Any

from maxlite.data.gguf_header import is_gguf, read_header
from maxlite.data.gguf_tokenizer import token_ids, tokenizer_problem
from maxlite.data.json_files import read_json
from maxlite.errors import ConfigError

# Where an imported run keeps the model's own JSON files: below its folder, where no program takes them for the run's.
ORIGINALS = "hugging_face"
TOKENIZER_FILE = "tokenizer.json"
# Names that a tokenizer's file has in a folder, the first that is there; a tokenizer.model is SentencePiece's or, as
# Llama 3 has it, a file of tiktoken's.
TOKENIZER_NAMES = (TOKENIZER_FILE, "tokenizer.model", "tekken.json", "*.tiktoken")


def model_end_ids(folder: Path) -> tuple[int, ...]:
    """Returns every end id that config.json or generation_config.json in `folder` names, in rising order.

    The folder is a Hugging Face model's or an imported run's; one without such files has none. Of a GGUF file it is
    the ids that its metadata names.
    Raises ConfigError for a file that is no JSON object, or an end id that is no whole number.
    """
    if is_gguf(folder):
        return tuple(sorted(_ids(token_ids(read_header(folder))["eos_token_id"], folder)))
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        for file in (folder / name, folder / ORIGINALS / name):
            settings = read_settings(file)
            for part in (settings, settings.get("text_config") or {}):
                found.update(_ids(part.get("eos_token_id"), file))
    return tuple(sorted(found))


def tokenizer_file(path: str | Path) -> Path | None:
    """Returns the tokenizer's file that `path` is or, under one of TOKENIZER_NAMES, holds; None where there is none.

    Raises ConfigError for a folder of several *.tiktoken files and none of the other names.
    """
    file = Path(path).expanduser()
    if not file.is_dir():
        return file if file.is_file() else None
    for name in TOKENIZER_NAMES:
        found = sorted(place for place in file.glob(name) if place.is_file())
        if len(found) > 1:
            raise ConfigError(f"{file} has several tokenizers: {', '.join(one.name for one in found)}. Name the file.")
        if found:
            return found[0]
    return None


def has_tokenizer(path: str | Path) -> bool:
    """Says whether a model's folder has a tokenizer, or its GGUF file one that is of a known kind."""
    if is_gguf(path):
        return tokenizer_problem(read_header(path)) is None
    return tokenizer_file(path) is not None


def read_settings(file: Path) -> dict[str, Any]:
    """Returns the JSON object in `file`; a file that is not there is an empty one.

    Raises ConfigError for a file that can't be read or is no JSON object.
    """
    return read_json(file, ConfigError) if file.exists() else {}


def _ids(value: Any, file: Path) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    wrong = next((token for token in ids if not isinstance(token, int) or isinstance(token, bool)), None)
    if wrong is not None:
        raise ConfigError(f"{file}: eos_token_id={value!r} must be a token id, a list of them, or null.")
    return ids
