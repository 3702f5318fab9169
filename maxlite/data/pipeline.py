"""The data of a run: an iterator of training batches with an exact position, and passes over held-out batches."""

import copy
import dataclasses
import functools
import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grain
import numpy as np

from maxlite.config.schema import DataConfig
from maxlite.data.batch import Batch
from maxlite.data.packing import pack_rows, pad_rows, stack_rows
from maxlite.data.sources import SOURCES, Corpus, WindowSource
from maxlite.data.tokenizer import Tokenizer

NUM_BATCHES_AHEAD = 2
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


class EpochIterator:
    """Endless or num_epoch passes over the training rows; each pass ends with its last partial batch filled.

    A pass is a pipeline of its own, so the first of two is the same as an only one.
    """

    def __init__(self, build_epoch: Callable[[int], grain.IterDataset], num_epoch: int | None) -> None:
        """Starts at the first batch of pass 0; `build_epoch(n)` is the dataset of batches of pass n."""
        self._build_epoch = build_epoch
        self._num_epoch = num_epoch
        self._open_epoch(0)

    def __iter__(self) -> "EpochIterator":
        """Returns itself."""
        return self

    def __next__(self) -> Batch:
        """Returns the next Batch of [B, T]; raises StopIteration after num_epoch passes."""
        while True:
            try:
                return next(self._batches)
            except StopIteration:
                if self._num_epoch is not None and self._epoch + 1 >= self._num_epoch:
                    raise
                self._open_epoch(self._epoch + 1)

    def state(self) -> dict[str, Any]:
        """Returns the position behind the last batch handed out, small and fit for JSON."""
        return {"epoch": self._epoch, "position": copy.deepcopy(self._batches.get_state())}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a position that `state` gave."""
        self._open_epoch(state["epoch"])
        self._batches.set_state(state["position"])

    def _open_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._batches = iter(self._build_epoch(epoch))


class TrainIterator:
    """The training batches, made by one thread while a step runs.

    grain's own prefetching thread is not used: its iterator joins that thread when it is collected, which
    fails where the collector happens to run in that thread.
    """

    def __init__(self, epochs: EpochIterator) -> None:
        """Reads nothing before the first batch is asked for; from then on only its thread touches `epochs`."""
        self._epochs = epochs
        self._state = epochs.state()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._ahead: deque[Future[tuple[Batch | None, dict[str, Any]]]] = deque()

    def __iter__(self) -> "TrainIterator":
        """Returns itself."""
        return self

    def __next__(self) -> Batch:
        """Returns the next Batch of [B, T]; raises StopIteration after num_epoch passes.

        Raises DataError if a file changed or vanished.
        """
        while len(self._ahead) <= NUM_BATCHES_AHEAD:
            self._ahead.append(self._executor.submit(self._make_batch))
        batch, self._state = self._ahead.popleft().result()
        if batch is None:
            raise StopIteration
        return batch

    def state(self) -> dict[str, Any]:
        """Returns the position behind the last batch handed out, small and fit for JSON."""
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to a position that `state` gave, so that the next batch is the one that followed it."""
        self._ahead.clear()
        self._executor.submit(self._epochs.restore, state).result()
        self._state = state

    def _make_batch(self) -> tuple[Batch | None, dict[str, Any]]:
        return next(self._epochs, None), self._epochs.state()


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
    tokenizer: Tokenizer | None
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
        return build_pass(corpus.train, _epoch_seed(data.data_shuffle_seed, epoch) if shuffled else None)

    def eval_batches() -> Iterator[Batch]:
        assert corpus.held_out is not None
        return iter(build_pass(corpus.held_out, data.data_shuffle_seed if shuffled else None))

    return Dataset(
        train=TrainIterator(EpochIterator(build_epoch, data.num_epoch)),
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
