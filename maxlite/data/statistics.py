"""What the data of a run amounts to: counts over one pass, for the line at the start and for `data inspect`."""

import dataclasses
from collections.abc import Iterator, Sequence

from maxlite.data.corpus import Skipped, Source
from maxlite.data.row_order import Passes
from maxlite.data.windows import Windows

# Planning takes some microseconds a window, so of a long pass only the first rows are measured at a start.
BLOCKS_AT_START = 8


@dataclasses.dataclass(frozen=True)
class DataStatistics:
    """Counts over one pass of all sources.

    tokens: of all documents. targets: pairs of the training windows; trained_share: those of them that count.
    cut_tokens: tokens that no window has. rows, packing_efficiency: of a pass, or of its first rows if it is long; the
    share of places that hold a token, padding_share is the rest. held_out_targets: pairs of the held-out windows.
    """

    kind: str
    where: str
    documents: int
    tokens: int
    targets: int
    trained_share: float
    windows: int
    cut_tokens: int
    without_targets: int
    skipped: Skipped
    held_out_documents: int
    held_out_targets: int
    rows: int
    rows_are_all: bool
    packing_efficiency: float

    @property
    def padding_share(self) -> float:
        """Share of the places in rows that hold no token."""
        return 1 - self.packing_efficiency


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one source gives to training and to evaluation."""

    source: Source
    train: Windows
    held_out: Windows | None
    passes: Passes


def measure(kind: str, sources: Sequence[Measured], row_length: int, max_blocks: int | None) -> DataStatistics:
    """Counts one pass over all sources; rows only over the first `max_blocks` blocks of each, None = all."""
    plans = [one.passes.measure(max_blocks) for one in sources]
    num_rows = sum(plan.num_rows for plan in plans)
    held_out = [one.held_out for one in sources if one.held_out is not None]
    windows = [*(one.train for one in sources), *held_out]
    stores = {id(store): store for one in sources for store in (one.source.store, one.source.held_out_store)}.values()
    tokens = sum(int(store.num_tokens.sum()) for store in stores)
    trained = sum(int((store.num_tokens if store.num_trained is None else store.num_trained).sum()) for store in stores)
    return DataStatistics(
        kind=kind,
        where=", ".join(one.source.where for one in sources),
        documents=sum(len(store.num_tokens) for store in stores),
        tokens=tokens,
        targets=sum(one.train.num_targets for one in sources),
        trained_share=trained / max(tokens, 1),
        windows=sum(len(one.train) for one in sources),
        cut_tokens=sum(part.num_cut for part in windows),
        without_targets=sum(part.num_without_targets for part in windows),
        skipped=sum((one.source.skipped for one in sources), Skipped()),
        held_out_documents=sum(len(one.source.held_out.document) for one in sources if one.source.held_out is not None),
        held_out_targets=sum(part.num_targets for part in held_out),
        rows=num_rows,
        rows_are_all=all(plan.is_all for plan in plans),
        packing_efficiency=sum(plan.num_targets for plan in plans) / max(num_rows * row_length, 1),
    )


def summary_line(statistics: DataStatistics) -> str:
    """Returns the line that a run prints at its start."""
    return "; ".join(_parts(statistics))


def _parts(found: DataStatistics) -> Iterator[str]:
    yield f"{found.kind}: {found.documents:,} documents from {found.where}"
    yield f"{found.tokens:,} tokens"
    yield f"{found.targets:,} targets in {found.windows:,} windows"
    if found.trained_share < 1:
        yield f"{found.trained_share:.1%} of the tokens count"
    total = found.targets + found.held_out_targets
    yield (
        f"held out {found.held_out_targets:,} targets ({found.held_out_targets / total:.1%})"
        if found.held_out_targets
        else "nothing held out"
    )
    yield f"rows {found.packing_efficiency:.1%} full"
    yield f"cut {found.cut_tokens:,} tokens"
    yield f"{found.without_targets:,} documents without a target"
    yield found.skipped.describe()
