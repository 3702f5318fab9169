"""Documents in tokens, read at random: in memory, or (token_folder.py) in a folder that was tokenized before."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from maxlite.data.rows import Example

SMALL_VOCABULARY = 2**16


class Span(NamedTuple):
    """Tokens start..stop of a document."""

    document: int
    start: int
    stop: int


class TokenStore(Protocol):
    """Random access to documents in tokens.

    num_tokens: int64 [N]. num_trained: int64 [N], the tokens of each that count as targets; None = all do.
    digest: differs where a document, a token or a mask does.
    """

    @property
    def num_tokens(self) -> np.ndarray: ...  # noqa: D102

    @property
    def num_trained(self) -> np.ndarray | None: ...  # noqa: D102

    @property
    def digest(self) -> str: ...  # noqa: D102

    def read_many(self, spans: Sequence[Span]) -> list[Example]:
        """Returns the tokens of each span, and which of them count."""
        ...


class MemoryTokens:
    """Documents one after the other in one array: two bytes a token, or four if the vocabulary is large."""

    def __init__(self, examples: Iterable[Example], vocab_size: int) -> None:
        """Takes documents with ids below `vocab_size`."""
        dtype = np.uint16 if vocab_size <= SMALL_VOCABULARY else np.uint32
        parts: list[np.ndarray] = []
        masks: list[np.ndarray | None] = []
        for tokens, trained in examples:
            parts.append(tokens.astype(dtype))
            masks.append(trained)
        self.num_tokens = np.array([len(part) for part in parts], np.int64)
        self._ends = np.cumsum(self.num_tokens)
        self._tokens = np.concatenate(parts) if parts else np.zeros(0, dtype)
        self._trained = None
        if any(mask is not None for mask in masks):
            filled = [
                np.ones(len(part), bool) if mask is None else mask for part, mask in zip(parts, masks, strict=True)
            ]
            self._trained = np.concatenate(filled)
        self.num_trained = None if self._trained is None else _sums(self._trained, self.num_tokens)

    @property
    def digest(self) -> str:
        """Differs where a document, a token or a mask does."""
        digest = hashlib.blake2b(self.num_tokens.tobytes(), digest_size=16)
        digest.update(self._tokens.data)
        if self._trained is not None:
            digest.update(self._trained.data)
        return digest.hexdigest()

    def read_many(self, spans: Sequence[Span]) -> list[Example]:
        """Returns the tokens of each span, and which of them count."""
        return [self._read(span) for span in spans]

    def _read(self, span: Span) -> Example:
        document, start, stop = span
        first = int(self._ends[document] - self.num_tokens[document])
        assert 0 <= start <= stop <= self.num_tokens[document]
        place = slice(first + start, first + stop)
        trained = None if self._trained is None else self._trained[place]
        return Example(self._tokens[place].astype(np.int32), trained)


class RandomTokens:
    """Endless documents of T + 1 random tokens; document k depends on the seed and on k alone."""

    num_trained = None

    def __init__(self, row_length: int, vocab_size: int, seed: int) -> None:
        """Ids are drawn from [0, vocab_size)."""
        self._row_length, self._vocab_size, self._seed = row_length, vocab_size, seed

    @property
    def digest(self) -> str:
        """Differs where a token does."""
        return f"random below {self._vocab_size}"

    @property
    def num_tokens(self) -> np.ndarray:
        """There is no such list: documents do not end."""
        raise AssertionError("random documents are not counted")

    def read_many(self, spans: Sequence[Span]) -> list[Example]:
        """Returns the tokens of each span."""
        return [Example(self._draw(document)[start:stop], None) for document, start, stop in spans]

    def _draw(self, document: int) -> np.ndarray:
        generator = np.random.default_rng((self._seed, document))
        return generator.integers(self._vocab_size, size=self._row_length + 1, dtype=np.int32)


def _sums(flags: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Of flags [sum of lengths], the number that are set in each part; lengths [N] -> int64 [N]."""
    before = np.concatenate(([0], np.cumsum(flags, dtype=np.int64)))
    ends = np.cumsum(lengths)
    return before[ends] - before[ends - lengths]
