"""The tokenizer that a GGUF file's metadata describes, as a tokenizer.json and a tokenizer_config.json have it."""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from maxlite.data.gguf_header import GgufHeader
from maxlite.data.tokenizer_parts import (
    CONTROL,
    LLAMA3_CUT,
    QWEN_CUT,
    SPACE,
    USER_DEFINED,
    Pieces,
    add_special,
    add_template,
    build_byte_level,
    build_piece_backend,
    build_piece_model,
)
from maxlite.errors import ConversionError

_KEY = "tokenizer.ggml."
_BYTE_LEVEL, _PIECES = "gpt2", "llama"
# Names of the marks in a tokenizer_config.json and here.
_MARKS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}

_LLAMA3 = ("llama3", "llama-v3", "llama-bpe")
# Where a byte-level tokenizer cuts a text before merging; None: where GPT-2's does.
_CUTS: dict[str, str | pre_tokenizers.PreTokenizer | None] = {
    "gpt-2": None,
    "default": None,
    "smollm": pre_tokenizers.Digits(individual_digits=True),
    **dict.fromkeys(_LLAMA3, LLAMA3_CUT),
    "qwen2": QWEN_CUT,
}


def tokenizer_problem(header: GgufHeader) -> str | None:
    """Returns why the file has no tokenizer that can be built; None if it has one."""
    kind, cut = header.metadata.get(f"{_KEY}model"), header.metadata.get(f"{_KEY}pre")
    if kind not in (_BYTE_LEVEL, _PIECES):
        return f"{_KEY}model={kind!r} is not known; known are {_BYTE_LEVEL} and {_PIECES}"
    if kind == _BYTE_LEVEL and cut not in _CUTS:
        return f"{_KEY}pre={cut!r} is not known; known are {', '.join(_CUTS)}"
    return None


def build_backend(header: GgufHeader) -> tokenizers.Tokenizer:
    """Returns the tokenizer itself.

    Raises:
        ConversionError: it is of a kind that is not known, or its parts do not fit together.
    """
    problem = tokenizer_problem(header)
    if problem is not None:
        raise ConversionError(
            f"{header.path}: {problem}. Give token ids, or tokenizer_path= of the model's own folder."
        )
    try:
        byte_level = header.metadata[f"{_KEY}model"] == _BYTE_LEVEL
        backend = _byte_level(header.metadata) if byte_level else _sentencepiece(header.metadata)
        _add_marks(backend, header.metadata)
        tokenizer_settings(header)
    except Exception as error:  # The library has no class of its own.
        raise ConversionError(f"{header.path} has a garbled tokenizer: {error!r}.") from error
    return backend


def tokenizer_settings(header: GgufHeader) -> dict[str, Any]:
    """Returns what a tokenizer_config.json says: which tokens are the marks, and how a chat is written."""
    tokens = header.metadata[f"{_KEY}tokens"]
    marks = {name: header.metadata.get(f"{_KEY}{key}_token_id") for name, key in _MARKS.items()}
    template = header.metadata.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": tokens[token] for name, token in marks.items() if token is not None},
        **({} if template is None else {"chat_template": template}),
    }


def token_ids(header: GgufHeader) -> dict[str, int | list[int] | None]:
    """Returns the ids of marks as a config.json has them: eos_token_id are those that end a text, turn or message."""
    known = {name: header.metadata.get(f"{_KEY}{name}_token_id") for name in ("bos", "eos", "eot", "eom", "padding")}
    ends: list[Any] = list(dict.fromkeys(known[name] for name in ("eos", "eot", "eom") if known[name] is not None))
    return {
        "bos_token_id": known["bos"],
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": known["padding"],
    }


def _byte_level(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    cut = metadata[f"{_KEY}pre"]
    vocabulary = {token: number for number, token in enumerate(metadata[f"{_KEY}tokens"])}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in metadata[f"{_KEY}merges"])]
    backend = build_byte_level(vocabulary, merges, _CUTS[cut], keeps_whole=cut in _LLAMA3)
    if cut == "qwen2":
        backend.normalizer = normalizers.NFC()
    pieces = _pieces(metadata)
    add_special(backend, pieces.of_kind(CONTROL))
    backend.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in pieces.of_kind(USER_DEFINED)])
    return backend


def _sentencepiece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    pieces = _pieces(metadata)
    model = build_piece_model(pieces, metadata.get(f"{_KEY}unknown_token_id", 0))
    return build_piece_backend(model, pieces, add_space_prefix=metadata.get(f"{_KEY}add_space_prefix", True))


def _pieces(metadata: Mapping[str, Any]) -> Pieces:
    tokens = [_spelled(token, metadata) for token in metadata[f"{_KEY}tokens"]]
    scores = metadata.get(f"{_KEY}scores", ())
    if str(metadata.get("general.architecture")).startswith("gemma"):
        # Its scores do not follow the order in which its pieces were learnt; their numbers do.
        scores = range(0, -len(tokens), -1)
    return Pieces(tokens, scores, metadata[f"{_KEY}token_type"])


def _spelled(token: str, metadata: Mapping[str, Any]) -> str:
    """Runs of spaces are written as such in files of Gemma, and as every other space in the pieces of a text."""
    spaces = metadata[f"{_KEY}model"] == _PIECES and token and not token.strip(" ")
    return SPACE * len(token) if spaces else token


def _add_marks(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
    tokens = _pieces(metadata).texts
    begins = metadata[f"{_KEY}model"] == _PIECES or metadata.get(f"{_KEY}pre") in _LLAMA3
    marks = {}
    for name, usual in (("bos", begins), ("eos", False)):
        token = metadata.get(f"{_KEY}{name}_token_id")
        if metadata.get(f"{_KEY}add_{name}_token", usual) and token is not None:
            marks[name] = tokens[token]
    add_template(backend, marks.get("bos"), marks.get("eos"))
