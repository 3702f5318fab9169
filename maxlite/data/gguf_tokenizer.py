"""The tokenizer that a GGUF file's metadata describes, as a tokenizer.json and a tokenizer_config.json have it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from maxlite.data.gguf_header import GgufHeader
from maxlite.data.json_files import write_json
from maxlite.errors import ConversionError

_KEY = "tokenizer.ggml."
_BYTE_LEVEL, _PIECES = "gpt2", "llama"
# The format's numbers for kinds of tokens: marks, and words that are cut out of a text before anything else.
_CONTROL, _USER_DEFINED = 3, 4
# Names of the marks in a tokenizer_config.json and here.
_MARKS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SPACE = "\u2581"

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = ("llama3", "llama-v3", "llama-bpe")
# Where a byte-level tokenizer cuts a text before merging; None: where GPT-2's does.
_CUTS: dict[str, tokenizers.pre_tokenizers.PreTokenizer | None] = {
    "gpt-2": None,
    "default": None,
    "smollm": pre_tokenizers.Digits(individual_digits=True),
    **{
        name: pre_tokenizers.Split(tokenizers.Regex(rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"), "isolated")
        for name in _LLAMA3
    },
    "qwen2": pre_tokenizers.Split(tokenizers.Regex(rf"{_WORDS}|\p{{N}}|{_REST}"), "isolated"),
}
_OWN_WORDS = ("gpt-2", "default", "smollm")


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
        backend = _byte_level(header.metadata) if byte_level else _pieces(header.metadata)
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


def write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, as transformers opens them.

    Raises:
        ConversionError: as build_backend.
    """
    build_backend(header).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_settings(header))


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
    merges = [tuple(merge.split(" ")) for merge in metadata[f"{_KEY}merges"]]
    model = models.BPE(vocab=_vocabulary(metadata), merges=merges, ignore_merges=cut in _LLAMA3)
    backend = tokenizers.Tokenizer(model)
    if cut == "qwen2":
        backend.normalizer = normalizers.NFC()
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut in _OWN_WORDS)
    first = _CUTS[cut]
    backend.pre_tokenizer = bytes_of if first is None else pre_tokenizers.Sequence([first, bytes_of])
    backend.decoder = decoders.ByteLevel()
    return backend


def _pieces(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """SentencePiece's: pairs are merged by the score of what they make, and a character without a piece is bytes."""
    vocabulary = _vocabulary(metadata)
    merges = _merges(vocabulary, metadata)
    unknown = metadata[f"{_KEY}tokens"][metadata.get(f"{_KEY}unknown_token_id", 0)]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    undone: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(f"{_KEY}add_space_prefix", True):
        steps = [normalizers.Prepend(_SPACE), *steps]
        undone = [*undone, decoders.Strip(content=" ", left=1)]
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(undone)
    return backend


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {_spelled(token, metadata): number for number, token in enumerate(metadata[f"{_KEY}tokens"])}


def _spelled(token: str, metadata: Mapping[str, Any]) -> str:
    """Runs of spaces are written as such in files of Gemma, and as every other space in the pieces of a text."""
    spaces = metadata[f"{_KEY}model"] == _PIECES and token and not token.strip(" ")
    return _SPACE * len(token) if spaces else token


def _merges(vocabulary: Mapping[str, int], metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, best first."""
    scores = metadata[f"{_KEY}scores"]
    if str(metadata.get("general.architecture")).startswith("gemma"):
        # Its scores do not follow the order in which its pieces were learnt; their numbers do.
        scores = range(0, -len(scores), -1)
    ranked = [
        (-scores[number], -cut, piece[:cut], piece[cut:])
        for piece, number in vocabulary.items()
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    return [(left, right) for _, _, left, right in sorted(ranked, key=lambda entry: entry[:2])]


def _add_marks(backend: tokenizers.Tokenizer, metadata: Mapping[str, Any]) -> None:
    tokens = [_spelled(token, metadata) for token in metadata[f"{_KEY}tokens"]]
    kinds = metadata[f"{_KEY}token_type"]
    for kind, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
        its = [token for token, of in zip(tokens, kinds, strict=True) if of == kind and token]
        add([tokenizers.AddedToken(token, normalized=False) for token in its])
    begins = metadata[f"{_KEY}model"] == _PIECES or metadata.get(f"{_KEY}pre") in _LLAMA3
    marks = {}
    for name, usual in (("bos", begins), ("eos", False)):
        token = metadata.get(f"{_KEY}{name}_token_id")
        if metadata.get(f"{_KEY}add_{name}_token", usual) and token is not None:
            marks[name] = (tokens[token], token)
    if marks:
        begin, end = ([marks[name][0]] if name in marks else [] for name in ("bos", "eos"))
        backend.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end], special_tokens=list(marks.values())
        )
