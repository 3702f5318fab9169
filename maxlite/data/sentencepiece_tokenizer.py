"""The tokenizer in a SentencePiece .model file, run by the tokenizers library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import tokenizers
from tokenizers import Regex, models, normalizers

from maxlite.data.tokenizer_parts import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Pieces,
    build_piece_backend,
    build_piece_model,
)
from maxlite.data.wire_format import read_fields
from maxlite.errors import ConfigError

# The format's numbers for fields and for values.
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE, _IS_SUFFIX, _MARKS = 3, 24, {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}
_MARK_KINDS = (CONTROL, USER_DEFINED)
_CHARACTERS, _ADDS_SPACE, _REMOVES_SPACES, _ESCAPES_SPACES = 2, 3, 4, 5
_UNIGRAM, _BPE = 1, 2
# So much below the worst piece that no text has such pieces, and near enough for sums of long texts to be exact.
_NEVER = 100.0

Fields = Mapping[int, int | float | bytes]


class SentencePieceModel(NamedTuple):
    """What `file` says. marks: the ids of unk, bos, eos and pad, those that there are."""

    file: Path
    pieces: Pieces
    is_unigram: bool
    marks: Mapping[str, int]
    normalizer: Fields


def read_sentencepiece(file: Path) -> SentencePieceModel:
    """Returns what is in a .model file.

    Raises ConfigError for one that is cut short or garbled, or that has a kind of model that is not known.
    """
    try:
        found, trainer, normalizer = _read_messages(file.read_bytes())
        texts = [cast(bytes, piece.get(_TEXT, b"")).decode() for piece in found]
        kinds = [cast(int, piece.get(_KIND, NORMAL)) for piece in found]
        # Nine digits tell every such score, and are read back as they are from a tokenizer.json, which more are not.
        scores = [float(f"{piece.get(_SCORE, 0.0):.9g}") for piece in found]
        marks = {name: _signed(cast(int, trainer.get(number, usual))) for name, (number, usual) in _MARKS.items()}
        marks = {
            name: token for name, token in marks.items() if 0 <= token < len(texts) and kinds[token] in _MARK_KINDS
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is no SentencePiece model that can be read: {error}. Fetch it anew.") from error
    pieces = Pieces(texts, scores, kinds)
    _check(file, pieces, trainer)
    unknown = pieces.kinds.index(UNKNOWN)
    return SentencePieceModel(
        file, pieces, trainer.get(_MODEL_TYPE, _UNIGRAM) == _UNIGRAM, marks | {"unk": unknown}, normalizer
    )


def sentencepiece_settings(model: SentencePieceModel) -> dict[str, Any]:
    """Returns what a tokenizer_config.json would say: the names of the marks, and that a prompt begins with one."""
    names = {f"{name}_token": model.pieces.texts[token] for name, token in model.marks.items()}
    return {**names, "add_bos_token": True}


def build_sentencepiece(model: SentencePieceModel) -> tokenizers.Tokenizer:
    """Returns the tokenizer, by which text has the ids that the sentencepiece library gives it.

    Control pieces are an exception: one that is written out in a text is its one id. Others are a text that is a word
    kept whole and nothing else, which gets no space first; and a Unigram's choice among cuts of equal score.
    Raises ConfigError where its parts do not fit together.
    """
    pieces, spec, unknown = model.pieces, model.normalizer, model.marks["unk"]
    try:
        return build_piece_backend(
            _unigram(pieces, unknown) if model.is_unigram else build_piece_model(pieces, unknown),
            pieces,
            _cleaned(spec),
            add_space_prefix=bool(spec.get(_ADDS_SPACE, True)),
            escape_spaces=bool(spec.get(_ESCAPES_SPACES, True)),
        )
    except Exception as error:  # The library has no class of its own.
        raise ConfigError(f"{model.file} has a garbled tokenizer: {error}. Fetch it anew.") from error


def add_pieces(model: SentencePieceModel, added: Mapping[str, int], special: frozenset[str]) -> SentencePieceModel:
    """Returns the model with tokens that files beside it add, those that it does not have."""
    texts, scores, kinds = list(model.pieces.texts), list(model.pieces.scores), list(model.pieces.kinds)
    for text, number in sorted(added.items(), key=lambda entry: entry[1]):
        kind = CONTROL if text in special else USER_DEFINED
        if number == len(texts):
            texts.append(text)
            scores.append(0.0)
            kinds.append(kind)
        elif not 0 <= number < len(texts) or texts[number] != text:
            its = repr(texts[number]) if 0 <= number < len(texts) else f"above the {len(texts)} there are"
            raise ConfigError(
                f"The token {text!r} that files beside {model.file} add has the id {number}, which is "
                f"{its} in the model. Give the files that belong together."
            )
        elif kinds[number] == NORMAL:
            kinds[number] = kind
    return model._replace(pieces=Pieces(texts, scores, kinds))


def _read_messages(content: bytes) -> tuple[list[Fields], Fields, Fields]:
    pieces: list[Fields] = []
    parts: dict[int, Fields] = {_TRAINER: {}, _NORMALIZER: {}}
    for number, value in read_fields(content):
        if number == _PIECE:
            pieces.append(_fields(value))
        elif number in parts:
            parts[number] = _fields(value)
    return pieces, parts[_TRAINER], parts[_NORMALIZER]


def _fields(message: int | float | bytes) -> Fields:
    if not isinstance(message, bytes):
        raise ValueError(f"a message is the number {message}")
    return dict(read_fields(message))


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _check(file: Path, pieces: Pieces, trainer: Fields) -> None:
    kind = trainer.get(_MODEL_TYPE, _UNIGRAM)
    problem = None
    if kind not in (_UNIGRAM, _BPE):
        problem = f"is of type {kind}; known are Unigram ({_UNIGRAM}) and BPE ({_BPE})"
    elif trainer.get(_IS_SUFFIX):
        problem = "has spaces at the ends of words (treat_whitespace_as_suffix); known are those in front of words"
    elif UNKNOWN not in pieces.kinds:
        problem = "has no piece for what is unknown"
    elif kind == _BPE and UNUSED in pieces.kinds:
        problem = f"is a BPE with pieces that are not used, such as {pieces.of_kind(UNUSED)[:1]}"
    if problem is not None:
        raise ConfigError(f"{file} {problem}. Convert the tokenizer to a tokenizer.json.")


def _cleaned(spec: Fields) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = []
    if spec.get(_CHARACTERS):
        steps.append(normalizers.Precompiled(cast(bytes, spec[_CHARACTERS])))
    if spec.get(_REMOVES_SPACES, True):
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(Regex(r"\A +| +\z"), "")]
    return steps


def _unigram(pieces: Pieces, unknown: int) -> models.Unigram:
    normal = [score for score, kind in zip(pieces.scores, pieces.kinds, strict=True) if kind == NORMAL]
    never = float(round(_NEVER * min(-1.0, *normal)))
    scored = [
        (text, score if kind == NORMAL else never)
        for text, score, kind in zip(pieces.texts, pieces.scores, pieces.kinds, strict=True)
    ]
    return models.Unigram(scored, unknown, byte_fallback=BYTE in pieces.kinds)
