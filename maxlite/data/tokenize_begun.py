"""What a folder of tokens was begun with, and whether a command may go on in it."""

import contextlib
import fcntl
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from maxlite.config.schema import DataConfig
from maxlite.data.files import File
from maxlite.data.json_files import read_json, write_json
from maxlite.data.token_folder import BEGUN, FORMAT, shown
from maxlite.data.token_store import SMALL_VOCABULARY
from maxlite.data.tokenizer import Tokenizer
from maxlite.errors import ConfigError, DataError

# Keys that decide which rows there are and what tokens they become.
KEYS = (
    "objective",
    "dataset_type",
    "dataset_path",
    "dataset_name",
    "train_split",
    "train_data_columns",
    "tokenize_train_data",
    "sft_train_on_completion_only",
    "chat_template_path",
    "tokenizer_path",
    "add_bos",
    "add_eos",
)
SFT_KEYS = frozenset({"sft_train_on_completion_only", "chat_template_path"})
# Not compared themselves, but what they name is: data and tokenizers may be moved.
PATH_KEYS = frozenset({"dataset_path", "chat_template_path", "tokenizer_path"})


def describe(data: DataConfig, tokenizer: Tokenizer | None, files: Iterable[File], vocab_size: int) -> dict[str, Any]:
    """Returns what the tokens depend on, fit for JSON."""
    template = None
    if data.objective == "sft" and tokenizer is not None:
        path = data.chat_template_path
        template = tokenizer.chat_template if path is None else Path(path).expanduser().read_text(encoding="utf-8")
    values = {key: getattr(data, key) for key in KEYS if data.objective == "sft" or key not in SFT_KEYS}
    return {
        "format": FORMAT,
        "token_bytes": 2 if vocab_size <= SMALL_VOCABULARY else 4,
        "tokenizer": None if tokenizer is None else tokenizer.digest,
        "chat_template": None if template is None else digest_of([template.encode()]),
        "files": digest_of(file.name.encode("utf-8", "surrogateescape") for file in files),
        "keys": {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in values.items()
            if value is not None
        },
    }


@contextlib.contextmanager
def begin(folder: Path, begun: Mapping[str, Any]) -> Iterator[None]:
    """Makes the folder or goes on in it; no other process writes there meanwhile.

    Raises:
        ConfigError: it holds something else, or was begun in another way.
        DataError: another process writes there, or nobody can.
    """
    file = folder / BEGUN
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not file.is_file() and any(path.name != BEGUN + ".part" for path in folder.iterdir()):
            raise ConfigError(f"{folder} holds other files. Name a new folder, or one that data tokenize began.")
        if not file.is_file():
            write_whole(file, begun)
        lock = open(file, "rb")
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}. Mend that or name another folder.") from error
    with lock:
        try:
            # Given back by the system however this process ends.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"Another process writes to {folder}. Wait for it, or end it.") from error
        _check_begun(folder, read_json(file, DataError), begun)
        yield


def _check_begun(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    end = f"Give what {folder} was begun with, or name another folder."
    if before.get("format") != now["format"]:
        raise ConfigError(f"{folder} was begun by another version of this program. Name another folder.")
    for key in KEYS:
        then, given = before["keys"].get(key), now["keys"].get(key)
        if key not in PATH_KEYS and then != given:
            raise ConfigError(f"{folder} was begun with {key}={shown(then)}, not {key}={shown(given)}. {end}")
    differ = {
        "tokenizer": "another tokenizer",
        "chat_template": "another chat template",
        "files": "other files (dataset_path)",
        "token_bytes": "another size of vocabulary (vocab_size)",
    }
    for name, words in differ.items():
        if before[name] != now[name]:
            raise ConfigError(f"{folder} was begun with {words}. {end}")


def write_whole(file: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON file that has its name only when it is whole."""
    part = file.with_name(file.name + ".part")
    write_json(part, content)
    part.rename(file)


def digest_of(parts: Iterable[bytes]) -> str:
    """Returns a digest that differs where one of `parts` does."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
