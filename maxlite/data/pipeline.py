"""The data of a run: an iterator of training batches with an exact position, and passes over held-out batches."""

import copy
import dataclasses
import functools
import hashlib
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np

from maxlite.config.schema import DataConfig
from maxlite.data.batch import Batch
from maxlite.data.packing import pack_rows, pad_rows, stack_rows
from maxlite.data.sources import SOURCES, Corpus, WindowSource
from maxlite.data.tokenizer import ByteTokenizer

# One thread makes these while a step runs; the position stays that of the batch handed out last.
NUM_PREFETCHED_BATCHES = 2
# The keys that decide which rows there are and in what order.
ORDER_KEYS = (
    "dataset_type",
    "max_target_length",
    "packing",
    "long_documents",
    "add_bos",
    "add_eos",
    "enable_data_shuffling",
    "data_shuffle_seed",
)


class TrainIterator:
    """Endless or num_epoch passes over the training rows; each pass ends with its last partial batch filled.

    A pass is a pipeline of its own, so the first of two is the same as an only one.
    """

    def __init__(self, build_epoch: Callable[[int], grain.IterDataset], num_epoch: int | None) -> None:
        """Starts at the first batch of pass 0; `build_epoch(n)` is the dataset of batches of pass n."""
        self._build_epoch = build_epoch
        self._num_epoch = num_epoch
        self._opened: list[grain.DatasetIterator] = []
        # At exit too the thread must end before modules go, or the interpreter complains: grain's iterator
        # ends it when nothing refers to it any more, so only this list does.
        weakref.finalize(self, self._opened.clear)
        self._open_epoch(0)

    def __iter__(self) -> "TrainIterator":
        """Returns itself."""
        return self

    def __next__(self) -> Batch:
        """Returns the next Batch of [B, T]; raises StopIteration after num_epoch passes."""
        while True:
            try:
                return next(self._opened[0])
            except StopIteration:
                if self._num_epoch is not None and self._epoch + 1 >= self._num_epoch:
                    raise
                self._open_epoch(self._epoch + 1)

    def state(self) -> dict[str, Any]:
        """Returns the position behind the last batch handed out, small and fit for JSON."""
        return {"epoch": self._epoch, "position": copy.deepcopy(self._opened[0].get_state())}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a position that `state` gave, so that the next batch is the one that followed it."""
        self._open_epoch(state["epoch"])
        self._opened[0].set_state(state["position"])

    def _open_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._opened[:] = [iter(self._build_epoch(epoch))]


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The data of one run.

    train: the training batches.
    eval_batches: each call is a fresh pass over all held-out rows in one fixed order; None = nothing held out.
    tokenizer: between text and ids; None where the data has no text.
    summary: one line for the log.
    fingerprint: differs when the order or the content of the training rows does.
    """

    train: TrainIterator
    eval_batches: Callable[[], Iterator[Batch]] | None
    tokenizer: ByteTokenizer | None
    summary: str
    fingerprint: str


def build_dataset(data: DataConfig, *, vocab_size: int, batch_size: int) -> Dataset:
    """Returns the data of a run in batches of `batch_size` rows.

    Raises DataError for data that cannot be read, ConfigError for a vocabulary that is too small.
    """
    corpus = SOURCES[data.dataset_type](data, vocab_size)
    packing = data.packing and not corpus.is_endless
    shuffled = data.enable_data_shuffling and not corpus.is_endless

    def build_pass(source: WindowSource, seed: int | None) -> grain.IterDataset:
        windows = grain.MapDataset.source(source)
        if seed is not None:
            windows = windows.shuffle(seed)
        pack = functools.partial(pack_rows, seed=seed) if packing else pad_rows
        rows = pack(windows, row_length=data.max_target_length)
        return rows.batch(batch_size, batch_fn=functools.partial(stack_rows, batch_size=batch_size))

    def build_epoch(epoch: int) -> grain.IterDataset:
        batches = build_pass(corpus.train, _epoch_seed(data.data_shuffle_seed, epoch) if shuffled else None)
        return grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=NUM_PREFETCHED_BATCHES)

    def eval_batches() -> Iterator[Batch]:
        assert corpus.held_out is not None
        return iter(build_pass(corpus.held_out, data.data_shuffle_seed if shuffled else None))

    return Dataset(
        train=TrainIterator(build_epoch, data.num_epoch),
        eval_batches=eval_batches if corpus.held_out is not None else None,
        tokenizer=corpus.tokenizer,
        summary=corpus.summary,
        fingerprint=_fingerprint(corpus, data),
    )


def _epoch_seed(seed: int, epoch: int) -> int:
    # Not seed + epoch, under which the second pass of a run is the first of a run with the next seed.
    return int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])


def _fingerprint(corpus: Corpus, data: DataConfig) -> str:
    keys = {key: getattr(data, key) for key in ORDER_KEYS}
    text = json.dumps([corpus.identity, keys])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
