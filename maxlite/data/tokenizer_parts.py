"""What tokenizers of several formats are made of: cuts of a text, merges of pieces, marks around a prompt."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

# The numbers that SentencePiece and GGUF have for kinds of pieces.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)(?:{_CONTRACTIONS})?"
# Where byte-level tokenizers cut a text before they merge.
LLAMA3_CUT = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN_CUT = rf"{_WORDS}|\p{{N}}|{_REST}"
O200K_CUT = rf"{_CASED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Pieces(NamedTuple):
    """A vocabulary in the order of its ids: texts, with SPACE for spaces; scores, the higher the better; kinds."""

    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]

    def of_kind(self, kind: int) -> list[str]:
        """Returns the texts of one kind; one without any text can't be found in a text and is left out."""
        return [text for text, its in zip(self.texts, self.kinds, strict=True) if its == kind and text]


def pair_merges(parts: Iterable[str], ranks: Mapping[str, float]) -> list[tuple[str, str]]:
    """Returns all pairs of `parts` that make a piece of `ranks`, the lowest rank first."""
    known = frozenset(parts)
    ranked = [
        (rank, -cut, piece[:cut], piece[cut:])
        for piece, rank in ranks.items()
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    return [(left, right) for _, _, left, right in sorted(ranked, key=lambda entry: entry[:2])]


def build_byte_level(
    vocabulary: Mapping[str, int],
    merges: list[tuple[str, str]],
    cut: str | pre_tokenizers.PreTokenizer | None,
    *,
    keeps_whole: bool,
) -> tokenizers.Tokenizer:
    """Returns a tokenizer of bytes that are written as byte_characters() has them.

    cut: a pattern of the parts of a text, or what cuts it up before GPT-2's pattern does; None is that alone.
    keeps_whole: whether a part that the vocabulary has is its token, however its bytes would merge.
    """
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(vocabulary), merges=merges, ignore_merges=keeps_whole))
    first = pre_tokenizers.Split(tokenizers.Regex(cut), "isolated") if isinstance(cut, str) else cut
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not isinstance(cut, str))
    backend.pre_tokenizer = bytes_of if first is None else pre_tokenizers.Sequence([first, bytes_of])
    backend.decoder = decoders.ByteLevel()
    return backend


def build_piece_model(pieces: Pieces, unknown_id: int) -> models.BPE:
    """Returns SentencePiece's BPE: pairs are merged by the score of what they make; what has no piece is bytes."""
    made = {
        text: -score
        for text, score, kind in zip(*pieces, strict=True)
        if kind in (NORMAL, USER_DEFINED) and len(text) > 1
    }
    return models.BPE(
        vocab={text: number for number, text in enumerate(pieces.texts)},
        merges=pair_merges(pieces.texts, made),
        unk_token=pieces.texts[unknown_id],
        fuse_unk=True,
        byte_fallback=BYTE in pieces.kinds,
    )


def build_piece_backend(
    model: models.Model,
    pieces: Pieces,
    cleaned: Sequence[normalizers.Normalizer] = (),
    *,
    add_space_prefix: bool,
    escape_spaces: bool = True,
) -> tokenizers.Tokenizer:
    """Returns SentencePiece's tokenizer around a model: spaces are characters of the pieces, and one may be put first.

    cleaned: what is done to a text before that.
    """
    backend = tokenizers.Tokenizer(model)
    words = pieces.of_kind(USER_DEFINED)
    steps, undone = [*cleaned], []
    space = SPACE if escape_spaces else " "
    if add_space_prefix:
        # Such words are spelled the way that texts are, and must not have the space themselves.
        spared = "|".join(map(re.escape, words))
        steps.append(
            normalizers.Replace(tokenizers.Regex(rf"\A(?!(?:{spared})?\z)"), space)
            if words
            else normalizers.Prepend(space)
        )
    if escape_spaces:
        steps.append(normalizers.Replace(" ", SPACE))
        undone.append(decoders.Replace(SPACE, " "))
    if BYTE in pieces.kinds:
        undone.append(decoders.ByteFallback())
    undone.append(decoders.Fuse())
    if add_space_prefix:
        undone.append(decoders.Strip(content=" ", left=1))
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(undone)
    add_special(backend, pieces.of_kind(CONTROL))
    # They are found in the text as the pieces have it, so that nothing is put in front of what follows them.
    backend.add_tokens([tokenizers.AddedToken(word, normalized=True) for word in words])
    return backend


def add_special(backend: tokenizers.Tokenizer, tokens: Iterable[str]) -> None:
    """Makes tokens special: one id wherever they are written, without text."""
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in tokens])


def add_template(backend: tokenizers.Tokenizer, begin: str | None, end: str | None) -> None:
    """Lets a prompt have a begin mark and an end mark; None is no mark."""
    marks = [mark for mark in (begin, end) if mark is not None]
    if marks:
        backend.post_processor = processors.TemplateProcessing(
            single=[*([] if begin is None else [begin]), "$A", *([] if end is None else [end])],
            special_tokens=[(mark, backend.token_to_id(mark)) for mark in dict.fromkeys(marks)],
        )


def token_text(token: Any) -> str | None:
    """Returns a special token's text, which settings give as itself or in an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
