"""Which format a tokenizer's file has, and the tokenizer with the settings beside it, whatever the format."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from maxlite.data.gguf_header import is_gguf, read_header
from maxlite.data.gguf_tokenizer import build_backend, tokenizer_settings
from maxlite.data.json_files import write_json
from maxlite.data.model_folder import TOKENIZER_FILE, read_settings
from maxlite.data.rank_tokenizer import build_ranks, is_tekken, read_tekken, read_tiktoken
from maxlite.data.sentencepiece_tokenizer import (
    add_pieces,
    build_sentencepiece,
    read_sentencepiece,
    sentencepiece_settings,
)
from maxlite.data.tokenizer_parts import add_template, token_text
from maxlite.errors import ConfigError

GGUF, JSON, SENTENCEPIECE, TIKTOKEN, TEKKEN = "GGUF", "tokenizer.json", "SentencePiece", "tiktoken", "tekken.json"
# The first field of a SentencePiece model is its first piece; a file of ranks is lines of base64 and a number.
_FIRST_PIECE = b"\x0a"
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\s*(\n|\Z)")
_OF_THE_FORMAT = ("auto_map", "add_bos_token", "add_eos_token", "legacy", "sp_model_kwargs", "vocab_file")


def tokenizer_format(file: Path) -> str:
    """Returns the format of a tokenizer's file, by its content. Raises ConfigError for any other file."""
    if is_gguf(file):
        return GGUF
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} can't be read: {error.strerror}.") from error
    if content.startswith(_FIRST_PIECE) and not content.lstrip().startswith(b"{"):
        return SENTENCEPIECE
    if content.lstrip().startswith(b"{"):
        return TEKKEN if is_tekken(content) else JSON
    if _RANK_LINE.match(content):
        return TIKTOKEN
    raise ConfigError(
        f"{file} is no tokenizer that can be read: neither a tokenizer.json, nor a SentencePiece model, tiktoken's "
        "ranks, Mistral's tekken.json or a GGUF file. Fetch or write it anew."
    )


def open_tokenizer(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Returns the tokenizer of a file and its settings, as a tokenizer_config.json has them.

    Raises ConfigError for a file that can't be read, and ConversionError for a GGUF file whose tokenizer is not known.
    """
    kind = tokenizer_format(file)
    if kind == GGUF:
        header = read_header(file)
        return build_backend(header), tokenizer_settings(header)
    beside = _settings(file.parent)
    if kind == JSON:
        return _open_json(file), beside
    added = _added_tokens(file.parent, beside)
    special = frozenset(token for token, is_special in added.values() if is_special)
    ids = {token: number for number, (token, _) in added.items()}
    if kind == SENTENCEPIECE:
        model = read_sentencepiece(file)
        settings = sentencepiece_settings(model) | beside
        backend = build_sentencepiece(add_pieces(model, ids, special))
    else:
        found = read_tekken(file) if kind == TEKKEN else read_tiktoken(file, beside)
        settings = {**found.settings, **beside}
        backend = build_ranks(file, found, ids, special)
    marks = {name: token_text(settings.get(f"{name}_token")) for name in ("bos", "eos")}
    begin, end = (marks[name] if settings.get(f"add_{name}_token") else None for name in ("bos", "eos"))
    for mark in (begin, end):
        if mark is not None and backend.token_to_id(mark) is None:
            raise ConfigError(f"{file} has no token {mark!r}, which tokenizer_config.json beside it puts around texts.")
    add_template(backend, begin, end)
    return backend, settings


def write_tokenizer(file: Path, folder: Path) -> None:
    """Writes the tokenizer of a file of any other format as tokenizer.json and tokenizer_config.json.

    Raises as open_tokenizer.
    """
    backend, settings = open_tokenizer(file)
    save_tokenizer(backend, settings, folder)


def save_tokenizer(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, as transformers opens them."""
    backend.save(str(folder / TOKENIZER_FILE))
    kept = {name: value for name, value in settings.items() if name not in _OF_THE_FORMAT}
    general = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / "tokenizer_config.json", {**kept, **general})


def _open_json(file: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # The library has no class of its own.
        raise ConfigError(f"{file} is no tokenizer that can be read: {error}. Fetch or write it anew.") from error
    # A file may hold how its last user cut and filled texts.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _settings(folder: Path) -> dict[str, Any]:
    settings = read_settings(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        # Files with this key repeat there what the older file says.
        settings |= read_settings(folder / "special_tokens_map.json")
    template = folder / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = _text(template)
    return settings


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read as text: {error}. Write it anew.") from error


def _added_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """Returns id -> token, and whether it is special, that files beside a tokenizer add to it."""
    listed = settings.get("added_tokens_decoder")
    try:
        if listed is not None:
            return {int(number): (about["content"], bool(about.get("special"))) for number, about in listed.items()}
        older = read_settings(folder / "added_tokens.json")
        return {int(number): (token, False) for token, number in older.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder}: the tokens that its files add can't be read: {error!r}.") from error
