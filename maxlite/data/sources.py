"""Sources: random access to windows of tokens, by kind of data. A new kind is one class, one builder, one line.

A window is a run of consecutive (input, target) pairs of one document, at most T of them. Window k of a
document holds its pairs k*T to (k+1)*T, so each token but the first is a target in exactly one window.
"""

import dataclasses
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np

from maxlite.config.schema import DataConfig
from maxlite.data.documents import Document, Documents, find_documents, hold_out, read_bytes
from maxlite.data.tokenizer import ByteTokenizer
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
    tokenizer: ByteTokenizer | None
    summary: str
    identity: str
    is_endless: bool


class TextSource:
    """Windows over documents of bytes; reads only the bytes of the window that is asked for.

    The index is two numbers a document, so it can be pickled and costs nothing for long documents.
    """

    def __init__(self, documents: tuple[Document, ...], data: DataConfig) -> None:
        """Counts the windows; opens no file."""
        self._documents = documents
        self._row_length = data.max_target_length
        self._num_bos = int(data.add_bos)
        self._num_eos = int(data.add_eos)
        num_bytes = np.array([document.num_bytes for document in documents], np.int64)
        self._num_pairs = np.maximum(num_bytes + self._num_bos + self._num_eos - 1, 0)
        num_all = int(self._num_pairs.sum())
        if data.long_documents == "truncate":
            self._num_pairs = np.minimum(self._num_pairs, self._row_length)
        self._window_ends = np.cumsum(-(-self._num_pairs // self._row_length))
        self.num_targets = int(self._num_pairs.sum())
        self.num_cut = num_all - self.num_targets
        self.num_without_targets = int((self._num_pairs == 0).sum())

    def __len__(self) -> int:
        """Returns the number of windows."""
        return int(self._window_ends[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns window `index`: int32 [n, 2].

        Raises DataError if its file is gone or no longer has the size that it had.
        """
        which = int(np.searchsorted(self._window_ends, index, side="right"))
        windows_before = int(self._window_ends[which - 1]) if which else 0
        start = (index - windows_before) * self._row_length
        stop = min(start + self._row_length, int(self._num_pairs[which])) + 1
        tokens = self._tokens(self._documents[which], start, stop)
        return np.stack((tokens[:-1], tokens[1:]), axis=1)

    def _tokens(self, document: Document, start: int, stop: int) -> np.ndarray:
        """Returns tokens start..stop of the stream [bos] + bytes + [eos]: int32 [stop - start]."""
        first_byte = max(start - self._num_bos, 0)
        last_byte = min(stop - self._num_bos, document.num_bytes)
        text = read_bytes(document, first_byte, last_byte - first_byte)
        tokens = np.full(stop - start, ByteTokenizer.eos_id, np.int32)
        offset = first_byte + self._num_bos - start
        tokens[:offset] = ByteTokenizer.bos_id
        tokens[offset : offset + len(text)] = np.frombuffer(text, np.uint8)
        return tokens


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
    """Opens files of text under the byte tokenizer.

    Raises ConfigError if the model's vocabulary is smaller than the tokenizer's, DataError for bad paths.
    """
    if vocab_size < ByteTokenizer.vocab_size:
        raise ConfigError(
            f"vocab_size={vocab_size} is smaller than the byte tokenizer's {ByteTokenizer.vocab_size} "
            f"(256 bytes, a begin mark, an end mark). Set vocab_size to {ByteTokenizer.vocab_size} or more."
        )
    documents = find_documents(data.dataset_path, "dataset_path")
    if data.eval_dataset_path is None:
        held_out_documents = None
        train_part, held_out_part = hold_out(documents.found, data.eval_fraction)
    else:
        held_out_documents = find_documents(data.eval_dataset_path, "eval_dataset_path")
        train_part, held_out_part = documents.found, held_out_documents.found
    train = _build_text_source(train_part, data, "training")
    held_out = _build_text_source(held_out_part, data, "held-out") if held_out_part else None
    return Corpus(
        train=train,
        held_out=held_out,
        tokenizer=ByteTokenizer(),
        summary="; ".join(_summary_parts(documents, held_out_documents, train, held_out)),
        identity=_identity(train_part),
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
        tokenizer=None,
        summary=f"synthetic: endless random ids below {vocab_size}, seed {data.data_shuffle_seed}, nothing held out",
        identity=f"synthetic {vocab_size}",
        is_endless=True,
    )


SOURCES: dict[str, Callable[[DataConfig, int], Corpus]] = {
    "text": open_text,
    "synthetic": open_synthetic,
}


def _build_text_source(documents: tuple[Document, ...], data: DataConfig, part: str) -> TextSource:
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
    documents: Documents, held_out_documents: Documents | None, train: TextSource, held_out: TextSource | None
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
        f"{sum(found.num_not_text for found in searched):,} not text, "
        f"{sum(source.num_without_targets for source in sources):,} without a target"
    )
    yield f"cut {sum(source.num_cut for source in sources):,} tokens"
