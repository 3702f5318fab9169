"""Sources: random access to windows of tokens, by kind of data. A new kind is one class, one builder, one line.

A window is a run of consecutive (input, target) pairs of one document, at most T of them. Window k of a
document holds its pairs k*T to (k+1)*T, so each token but the first is a target in exactly one window.
"""

import abc
import dataclasses
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from maxlite.config.schema import DataConfig
from maxlite.data.document_tokens import document_tokens
from maxlite.data.documents import Document, Documents, find_documents, hold_out, read_bytes
from maxlite.data.tokenizer import Tokenizer, build_tokenizer, check_vocabulary
from maxlite.data.tokenizer_bytes import ByteTokenizer
from maxlite.data.tokenizer_json import JsonTokenizer
from maxlite.errors import ConfigError, DataError


class WindowSource(Protocol):
    """Random access to windows: int32 [n, 2], column 0 the inputs, column 1 the targets, 1 <= n <= T."""

    def __len__(self) -> int:
        """Returns the number of windows."""
        ...

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns window `index`."""
        ...


@dataclasses.dataclass(frozen=True)
class Corpus:
    """One kind of data, opened.

    identity: a digest of what the training windows hold; two corpora that differ there have different windows.
    is_endless: windows are full rows in an order of no meaning, so nothing shuffles, packs or repeats them.
    """

    train: WindowSource
    held_out: WindowSource | None
    tokenizer: Tokenizer | None
    summary: str
    identity: str
    is_endless: bool


class DocumentSource(abc.ABC):
    """Windows over documents, of which a subclass knows the tokens."""

    def __init__(self, num_tokens: Sequence[int], data: DataConfig, num_not_text: int = 0) -> None:
        """Counts the windows of documents of `num_tokens` tokens each, marks included.

        num_not_text: documents that were left out because they are no text.
        """
        self.num_not_text = num_not_text
        self._row_length = data.max_target_length
        self._num_pairs = np.maximum(np.array(num_tokens, np.int64) - 1, 0)
        num_all = int(self._num_pairs.sum())
        if data.long_documents == "truncate":
            self._num_pairs = np.minimum(self._num_pairs, self._row_length)
        self._window_ends = np.cumsum(-(-self._num_pairs // self._row_length))
        self.num_targets = int(self._num_pairs.sum())
        self.num_cut = num_all - self.num_targets
        self.num_without_targets = int((self._num_pairs == 0).sum())

    def __len__(self) -> int:
        """Returns the number of windows."""
        return int(self._window_ends[-1]) if len(self._window_ends) else 0

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns window `index`: int32 [n, 2].

        Raises DataError if its file is gone or no longer has the size that it had.
        """
        which = int(np.searchsorted(self._window_ends, index, side="right"))
        windows_before = int(self._window_ends[which - 1]) if which else 0
        start = (index - windows_before) * self._row_length
        stop = min(start + self._row_length, int(self._num_pairs[which])) + 1
        tokens = self._tokens(which, start, stop)
        return np.stack((tokens[:-1], tokens[1:]), axis=1)

    @abc.abstractmethod
    def _tokens(self, which: int, start: int, stop: int) -> np.ndarray:
        """Returns tokens start..stop of document `which`: int32 [stop - start]."""


class TextSource(DocumentSource):
    """Windows over documents of bytes; reads only the bytes of the window that is asked for.

    The index is two numbers a document, so it can be pickled and costs nothing for long documents.
    """

    def __init__(self, documents: tuple[Document, ...], data: DataConfig) -> None:
        """Counts the windows; opens no file."""
        self._documents = documents
        self._num_bos = int(data.add_bos)
        num_marks = self._num_bos + int(data.add_eos)
        super().__init__([document.num_bytes + num_marks for document in documents], data)

    def _tokens(self, which: int, start: int, stop: int) -> np.ndarray:
        document = self._documents[which]
        first_byte = max(start - self._num_bos, 0)
        last_byte = min(stop - self._num_bos, document.num_bytes)
        text = read_bytes(document, first_byte, last_byte - first_byte)
        tokens = np.full(stop - start, ByteTokenizer.eos_id, np.int32)
        offset = first_byte + self._num_bos - start
        tokens[:offset] = ByteTokenizer.bos_id
        tokens[offset : offset + len(text)] = np.frombuffer(text, np.uint8)
        return tokens


class TokenizedSource(DocumentSource):
    """Windows over documents whose tokens are in memory, four bytes each."""

    def __init__(self, documents: Iterable[np.ndarray | None], data: DataConfig) -> None:
        """Takes each document's tokens with its marks, int32 [n]; None for one that is no text."""
        found = list(documents)
        self._documents = [tokens for tokens in found if tokens is not None]
        super().__init__([len(tokens) for tokens in self._documents], data, len(found) - len(self._documents))

    def digest(self) -> str:
        """Returns what differs where a document or a token does."""
        digest = hashlib.blake2b(digest_size=16)
        for tokens in self._documents:
            digest.update(len(tokens).to_bytes(8))
            digest.update(tokens.tobytes())
        return digest.hexdigest()

    def _tokens(self, which: int, start: int, stop: int) -> np.ndarray:
        return self._documents[which][start:stop]


class SyntheticSource:
    """Endless windows of T random pairs; window `index` depends on the seed and the index alone."""

    def __init__(self, data: DataConfig, vocab_size: int) -> None:
        """Ids are drawn from [0, vocab_size)."""
        self._row_length = data.max_target_length
        self._seed = data.data_shuffle_seed
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        """Returns a number that no run reaches."""
        return sys.maxsize

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns window `index`: int32 [T, 2]."""
        generator = np.random.default_rng((self._seed, index))
        tokens = generator.integers(self._vocab_size, size=self._row_length + 1, dtype=np.int32)
        return np.stack((tokens[:-1], tokens[1:]), axis=1)


def open_text(data: DataConfig, vocab_size: int) -> Corpus:
    """Opens files of text, which the byte tokenizer reads as they are asked for, any other before training.

    Raises ConfigError if the model's vocabulary is smaller than the tokenizer's, DataError for bad paths.
    """
    tokenizer = build_tokenizer(data)
    assert tokenizer is not None
    check_vocabulary(tokenizer, vocab_size)
    documents = find_documents(data.dataset_path, "dataset_path")
    if data.eval_dataset_path is None:
        held_out_documents = None
        train_part, held_out_part = hold_out(documents.found, data.eval_fraction)
    else:
        held_out_documents = find_documents(data.eval_dataset_path, "eval_dataset_path")
        train_part, held_out_part = documents.found, held_out_documents.found
    source_of = functools.partial(_build_source, tokenizer=tokenizer, data=data, vocab_size=vocab_size)
    train = source_of(train_part, "training")
    held_out = source_of(held_out_part, "held-out") if held_out_part else None
    return Corpus(
        train=train,
        held_out=held_out,
        tokenizer=tokenizer,
        summary="; ".join(_summary_parts(documents, held_out_documents, train, held_out)),
        identity=train.digest() if isinstance(train, TokenizedSource) else _identity(train_part),
        is_endless=False,
    )


def open_synthetic(data: DataConfig, vocab_size: int) -> Corpus:
    """Opens random tokens; nothing is held out of them.

    Raises ConfigError if passes are asked for, as they have no end.
    """
    if data.num_epoch is not None:
        raise ConfigError(
            f"num_epoch={data.num_epoch} with dataset_type=synthetic: random tokens have no end, so no passes. "
            "Leave num_epoch out; steps ends the run."
        )
    return Corpus(
        train=SyntheticSource(data, vocab_size),
        held_out=None,
        tokenizer=build_tokenizer(data),
        summary=f"synthetic: endless random ids below {vocab_size}, seed {data.data_shuffle_seed}, nothing held out",
        identity=f"synthetic {vocab_size}",
        is_endless=True,
    )


SOURCES: dict[str, Callable[[DataConfig, int], Corpus]] = {
    "text": open_text,
    "synthetic": open_synthetic,
}


def _build_source(
    documents: tuple[Document, ...], part: str, tokenizer: Tokenizer, data: DataConfig, vocab_size: int
) -> TextSource | TokenizedSource:
    if isinstance(tokenizer, JsonTokenizer):
        source = TokenizedSource(document_tokens(documents, tokenizer, data, vocab_size), data)
    else:
        source = TextSource(documents, data)
    if len(source) == 0:
        raise DataError(
            f"None of the {len(documents)} {part} documents, the first {documents[0].path}, has a token that follows "
            "another. Give longer documents, or set add_bos or add_eos."
        )
    return source


def _identity(documents: tuple[Document, ...]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for document in documents:
        digest.update(f"{document.name}\0{document.start}\0{document.num_bytes}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _summary_parts(
    documents: Documents, held_out_documents: Documents | None, train: DocumentSource, held_out: DocumentSource | None
) -> Iterator[str]:
    searched = [documents] if held_out_documents is None else [documents, held_out_documents]
    sources = [train] if held_out is None else [train, held_out]
    num_targets = sum(source.num_targets for source in sources)
    yield f"text: {len(documents.found):,} documents from {documents.where}"
    yield f"{sum(document.num_bytes for document in documents.found):,} bytes"
    yield f"{train.num_targets:,} targets in {len(train):,} windows"
    if held_out is None:
        yield "nothing held out"
    else:
        yield f"held out {held_out.num_targets:,} targets ({held_out.num_targets / num_targets:.1%})"
    if held_out_documents is not None:
        trained_on = {os.path.realpath(document.path) for document in documents.found}
        num_shared = sum(os.path.realpath(document.path) in trained_on for document in held_out_documents.found)
        yield f"from {held_out_documents.where}, {num_shared:,} of its documents also trained on"
    yield (
        f"skipped {sum(found.num_empty for found in searched):,} empty, "
        f"{sum(part.num_not_text for part in (*searched, *sources)):,} not text, "
        f"{sum(source.num_without_targets for source in sources):,} without a target"
    )
    yield f"cut {sum(source.num_cut for source in sources):,} tokens"
