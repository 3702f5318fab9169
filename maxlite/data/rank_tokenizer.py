"""Byte-level tokenizers that are published as ranks of byte strings: tiktoken's files and Mistral's tekken.json."""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import normalizers

from maxlite.data.json_files import read_json
from maxlite.data.tokenizer_bytes import NUM_BYTES
from maxlite.data.tokenizer_files import byte_characters
from maxlite.data.tokenizer_parts import (
    LLAMA3_CUT,
    O200K_CUT,
    QWEN_CUT,
    add_special,
    build_byte_level,
    pair_merges,
)
from maxlite.errors import ConfigError

# tiktoken's name for the pattern of the parts of a text.
PATTERN = "pat_str"
# What the library that runs patterns reads otherwise than tiktoken does: {1,3}+ repeats, $ is also a line's end.
_READ_OTHERWISE = re.compile(r"\{[0-9]+(?:,[0-9]*)?\}\+|\$")


class RankFile(NamedTuple):
    """What a file and those beside it say.

    ranks: byte string -> id; what has the lowest is merged first. cut: a pattern; None is GPT-2's.
    special: token -> id. settings: what a tokenizer_config.json would say.
    composes: whether letters and their accents become one character first (Unicode's NFC).
    """

    ranks: Mapping[bytes, int]
    cut: str | None
    special: Mapping[str, int]
    settings: Mapping[str, Any]
    composes: bool = False


class _Known(NamedTuple):
    name: str
    cut: str | None
    special: Mapping[str, int]
    settings: Mapping[str, Any]
    composes: bool = False


def _numbered(first: int, names: Iterable[str]) -> dict[str, int]:
    return {name: first + place for place, name in enumerate(names)}


def _reserved(start: int, stop: int) -> list[str]:
    return [f"<|reserved_special_token_{number}|>" for number in range(start, stop)]


# Llama 3.1's names; Llama 3 called some of them reserved.
_LLAMA3 = [
    *("<|begin_of_text|>", "<|end_of_text|>", *_reserved(0, 2), "<|finetune_right_pad_id|>", *_reserved(2, 3)),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", *_reserved(3, 248)),
]
_QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))]
_FIM = ("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_END = {"eos_token": "<|endoftext|>"}
# A file of ranks says neither where it cuts a text nor what is special: known files, by how many ranks they have.
_KNOWN = {
    50_256: _Known("r50k_base", None, {"<|endoftext|>": 50_256}, _END),
    100_256: _Known("cl100k_base", LLAMA3_CUT, {**_numbered(100_257, _FIM), "<|endofprompt|>": 100_276}, _END),
    199_998: _Known("o200k_base", O200K_CUT, {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018}, _END),
    128_000: _Known(
        "Llama 3",
        LLAMA3_CUT,
        _numbered(128_000, _LLAMA3),
        {"bos_token": _LLAMA3[0], "eos_token": _LLAMA3[1], "add_bos_token": True},
    ),
    151_643: _Known("Qwen", QWEN_CUT, _numbered(151_643, _QWEN), _END, composes=True),
}
# The marks of tekken.json files that do not list their own.
_TEKKEN = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def read_tiktoken(file: Path, beside: Mapping[str, Any]) -> RankFile:
    """Returns what a file of lines of base64 and rank says, with the cut and the marks of known files.

    beside: settings of a tokenizer_config.json there; its pat_str takes the place of the known cut.
    Raises ConfigError for a garbled file, or where nothing tells the cut.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ConfigError(f"{file}:{number}: {line[:60]!r} is no base64 and rank. Fetch the file anew.") from error
    known = _KNOWN.get(len(ranks))
    if PATTERN in beside:
        return RankFile(ranks, _checked_pattern(file, beside[PATTERN]), {}, {})
    if known is None:
        names = ", ".join(f"{known.name} ({count})" for count, known in _KNOWN.items())
        raise ConfigError(
            f"{file} has {len(ranks)} ranks, and nothing says where its text is cut before merging. Known by their "
            f"number of ranks are {names}. Write the pattern as {PATTERN} into a tokenizer_config.json beside the "
            "file, or give a tokenizer.json."
        )
    return RankFile(ranks, known.cut, known.special, known.settings, known.composes)


def is_tekken(content: bytes) -> bool:
    """Says whether a JSON file may be Mistral's; a tokenizer.json may have such words in its vocabulary."""
    return b'"token_bytes"' in content and b'"default_num_special_tokens"' in content


def read_tekken(file: Path) -> RankFile:
    """Returns what a tekken.json says: special tokens first, and ranks above them.

    Raises ConfigError for a garbled file.
    """
    content = read_json(file, ConfigError)
    try:
        config = content["config"]
        num_special = config["default_num_special_tokens"]
        listed = content.get("special_tokens") or [
            {"rank": rank, "token_str": token} for rank, token in enumerate(_TEKKEN)
        ]
        named = {entry["rank"]: entry["token_str"] for entry in listed}
        special = {named.get(rank, f"<SPECIAL_{rank}>"): rank for rank in range(num_special)}
        entries = content["vocab"][: config["default_vocab_size"] - num_special]
        ranks = {
            base64.b64decode(entry["token_bytes"], validate=True): num_special + entry["rank"] for entry in entries
        }
        cut = _checked_pattern(file, config["pattern"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{file} is no tekken.json that can be read: {error!r}. Fetch it anew.") from error
    marks = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    marks = {name: token for name, token in marks.items() if token in special}
    return RankFile(ranks, cut, special, {**marks, "add_bos_token": True})


def build_ranks(file: Path, found: RankFile, added: Mapping[str, int], special: frozenset[str]) -> tokenizers.Tokenizer:
    """Returns the tokenizer, by which text has the ids that tiktoken gives it.

    added: tokens that files beside it add, and their ids; where there are any, they stand for all special tokens.
    special: those of them that have no text.
    Raises ConfigError for ranks that lack a byte or have an id twice.
    """
    alphabet = byte_characters()
    vocabulary = {"".join(map(alphabet.__getitem__, token)): number for token, number in found.ranks.items()}
    merges = pair_merges(vocabulary, {token: rank for token, rank in vocabulary.items() if len(token) > 1})
    tokens = dict(added) or dict(found.special)
    missing = next((byte for byte in range(NUM_BYTES) if alphabet[byte] not in vocabulary), None)
    ids = [*vocabulary.values(), *(number for token, number in tokens.items() if token not in vocabulary)]
    twice = len(ids) - len(set(ids)) + sum(vocabulary.get(token, number) != number for token, number in tokens.items())
    if missing is not None or twice:
        problem = f"{twice} ids twice" if missing is None else f"no rank for the byte {missing}"
        raise ConfigError(f"{file} has {problem}. Fetch it, and the files beside it, anew.")
    try:
        backend = build_byte_level(vocabulary | tokens, merges, found.cut, keeps_whole=True)
    except Exception as error:  # The library has no class of its own.
        raise ConfigError(f"{file}: its pattern {found.cut!r} can't be used: {error}.") from error
    if found.composes:
        backend.normalizer = normalizers.NFC()
    words = [token for token in tokens if token not in special] if added else []
    add_special(backend, [token for token in tokens if token not in words])
    backend.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in words])
    return backend


def _checked_pattern(file: Path, pattern: Any) -> str:
    if not isinstance(pattern, str):
        raise ConfigError(f"{file}: {pattern!r} must be a pattern, as text.")
    part = _READ_OTHERWISE.search(pattern)
    if part is not None:
        raise ConfigError(
            f"{file}: the pattern {pattern!r} has {part.group()}, which tokenizers does not read as tiktoken does. "
            "Write it without, or give a tokenizer.json."
        )
    return pattern
