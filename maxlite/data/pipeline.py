"""The data of a run: training batches with one exact global position, and passes over held-out batches."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence

from maxlite.config.schema import DataConfig
from maxlite.data.batch import Batch
from maxlite.data.corpus import Source, open_source
from maxlite.data.filling import fill_batch
from maxlite.data.iterators import TrainIterator, one_pass
from maxlite.data.packing import Packing
from maxlite.data.row_order import Mixture, Part, Passes, PlannedRow, RowOrder
from maxlite.data.statistics import BLOCKS_AT_START, DataStatistics, Measured, measure, summary_line
from maxlite.data.token_store import RandomTokens, TokenStore
from maxlite.data.tokenizer import Tokenizer, build_tokenizer, check_vocabulary
from maxlite.data.windows import EndlessWindows, Pieces, Windows
from maxlite.errors import DataError

# The keys that decide which rows there are and in what order; what files hold is in each store's digest.
ORDER_KEYS = (
    "dataset_type",
    "max_target_length",
    "packing",
    "packing_type",
    "max_segments_per_seq",
    "padding_buckets",
    "long_documents",
    "enable_data_shuffling",
    "data_shuffle_seed",
)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """The data of one run.

    train: the training batches.
    eval_batches: each call is a fresh pass over all held-out rows in one fixed order; None = nothing held out.
    tokenizer: between text and ids; None where the data has no text.
    source_names: of dataset_mixture; one name without a mixture.
    statistics: of one pass; None for random tokens. summary: one line for the log.
    fingerprint: differs when the order or the content of the training rows does.
    """

    train: TrainIterator
    eval_batches: Callable[[], Iterator[Batch]] | None
    tokenizer: Tokenizer | None
    source_names: tuple[str, ...]
    statistics: DataStatistics | None
    summary: str
    fingerprint: str


def build_dataset(
    data: DataConfig,
    *,
    vocab_size: int,
    batch_size: int,
    own_rows: Sequence[int] | None = None,
    max_blocks: int | None = BLOCKS_AT_START,
) -> Dataset:
    """Returns the data of a run in global batches of `batch_size` rows.

    own_rows: numbers of the rows that this process reads, ascending; its batches hold them alone. None = all.
    max_blocks: of a pass, whose rows the statistics count; None = all.

    Raises DataError for data that cannot be read, ConfigError for keys or a vocabulary that do not fit.
    """
    tokenizer = build_tokenizer(data)
    if tokenizer is not None:
        check_vocabulary(tokenizer, vocab_size)
    rows = _Rows(data, batch_size, range(batch_size) if own_rows is None else own_rows)
    if data.dataset_type == "synthetic":
        return _random_dataset(data, tokenizer, vocab_size, rows)
    mixed = data.dataset_mixture or (None,)
    sources = [open_source(data, row, tokenizer, vocab_size) for row in mixed]
    measured = [rows.measured(source, place) for place, source in enumerate(sources)]
    train = measured[0].passes
    if len(sources) > 1:
        train = Mixture([Part(one.passes, one.source.weight) for one in measured])
    statistics = measure(data.dataset_type, measured, data.max_target_length, max_blocks)
    has_held_out = any(one.held_out for one in measured)
    return Dataset(
        train=rows.train(train, [source.store for source in sources]),
        eval_batches=functools.partial(rows.held_out, measured) if has_held_out else None,
        tokenizer=tokenizer,
        source_names=tuple(source.name for source in sources),
        statistics=statistics,
        summary=summary_line(statistics),
        fingerprint=_fingerprint(sources, data, batch_size),
    )


def _random_dataset(data: DataConfig, tokenizer: Tokenizer | None, vocab_size: int, rows: "_Rows") -> Dataset:
    store = RandomTokens(data.max_target_length, vocab_size, data.data_shuffle_seed)
    windows = EndlessWindows(data.max_target_length)
    packing = dataclasses.replace(rows.packing, kind="none", buckets=())
    order = Passes(windows, packing, source=0, seed=None, num_epoch=None)
    return Dataset(
        train=rows.train(order, [store]),
        eval_batches=None,
        tokenizer=tokenizer,
        source_names=("synthetic",),
        statistics=None,
        summary=f"synthetic: endless random ids below {vocab_size}, seed {data.data_shuffle_seed}, nothing held out",
        fingerprint=_digest([store.digest, data.max_target_length, data.data_shuffle_seed]),
    )


class _Rows:
    """How this run makes rows and batches."""

    def __init__(self, data: DataConfig, batch_size: int, own_rows: Sequence[int]) -> None:
        self._data, self._batch_size, self._own_rows = data, batch_size, own_rows
        self._seed = data.data_shuffle_seed if data.enable_data_shuffling else None
        self._buckets = row_lengths(data)
        self.packing = Packing(
            kind=data.packing_type if data.packing else "none",
            row_length=data.max_target_length,
            max_segments=data.max_segments_per_seq,
            in_order=self._seed is None,
            buckets=self._buckets if data.padding_buckets else (),
            group_size=batch_size if data.padding_buckets else 1,
        )

    def windows(self, pieces: Pieces) -> Windows:
        return Windows(
            pieces,
            self._data.max_target_length,
            truncate=self._data.long_documents == "truncate",
            whole=self.packing.kind == "concat_then_split" and self._data.long_documents == "split",
        )

    def measured(self, source: Source, place: int) -> Measured:
        windows = self.windows(source.train)
        if len(windows) == 0:
            raise DataError(
                f"None of the {len(source.train.document):,} training documents of {source.where} has a token that "
                "follows another. Give longer documents, or set add_bos or add_eos."
            )
        passes = Passes(windows, self.packing, source=place, seed=self._seed, num_epoch=source.epochs)
        return Measured(source, windows, None if source.held_out is None else self.windows(source.held_out), passes)

    def train(self, order: RowOrder, stores: Sequence[TokenStore]) -> TrainIterator:
        workers = self._data.data_worker_count
        ahead = workers * self._data.data_worker_buffer_size
        fill = functools.partial(self._fill, stores=stores)
        return TrainIterator(order, self._batch_size, fill, num_workers=workers, num_ahead=ahead)

    def held_out(self, sources: Sequence[Measured]) -> Iterator[Batch]:
        # Evenly mixed, so that the first batches are a fair sample.
        parts = [
            Part(Passes(one.held_out, self.packing, source=place, seed=self._seed, num_epoch=1), len(one.held_out))
            for place, one in enumerate(sources)
            if one.held_out
        ]
        fill = functools.partial(self._fill, stores=[one.source.held_out_store for one in sources])
        return one_pass(Mixture(parts), self._batch_size, fill)

    def _fill(self, rows: list[PlannedRow], stores: Sequence[TokenStore]) -> Batch:
        """Every process has the same plan of the whole batch, so all of them know its length."""
        longest = max(int(row.segments.length.sum()) for row in rows)
        length = next(bucket for bucket in self._buckets if bucket >= longest)
        own = [rows[number] for number in self._own_rows if number < len(rows)]
        return fill_batch(own, stores, (len(self._own_rows), length), with_sources=len(stores) > 1)


def row_lengths(data: DataConfig) -> tuple[int, ...]:
    """Returns the lengths that batches have, shortest first: padding_buckets, and max_target_length."""
    return tuple(sorted({*(data.padding_buckets or ()), data.max_target_length}))


def _fingerprint(sources: Sequence[Source], data: DataConfig, batch_size: int) -> str:
    keys = {key: getattr(data, key) for key in ORDER_KEYS}
    parts = [[*_mixed(source, len(sources)), source.store.digest, _pieces_digest(source.train)] for source in sources]
    # Rows of one bucket are put together by the batch.
    return _digest([parts, keys, batch_size if data.padding_buckets else None])


def _mixed(source: Source, num_sources: int) -> tuple[float, int | None] | tuple[()]:
    """What orders rows of several sources; passes over one source alone do not know how many they are."""
    return (source.weight, source.epochs) if num_sources > 1 else ()


def _pieces_digest(pieces: Pieces) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in pieces:
        digest.update(part.tobytes())
    return digest.hexdigest()


def _digest(content: object) -> str:
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()
