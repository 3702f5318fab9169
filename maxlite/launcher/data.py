"""`maxlite data inspect` and `maxlite data tokenize`: what training will see, and documents made into tokens."""

import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.text import Text

from maxlite.config.schema import Config
from maxlite.data.batch import Batch
from maxlite.data.pipeline import Dataset, build_dataset
from maxlite.data.statistics import DataStatistics
from maxlite.data.tokenize import Progress, tokenize
from maxlite.data.tokenizer import StreamDecoder, Tokenizer
from maxlite.errors import ConfigError

BATCHES = "batches"
TRAINED, READ = "bold green", "dim"
# Around what is trained where there are no colours.
OPENING, CLOSING = "{+", "+}"
# What a terminal would obey instead of showing; line ends and tabs are no harm.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Run(NamedTuple):
    """Tokens one after the other that are all trained, or all only read."""

    ids: list[int]
    trained: bool


def take_batches(overrides: Sequence[str]) -> tuple[int, list[str]]:
    """Returns the number that `batches=K` among `overrides` gives, else 0, and the keys of the config.

    Raises:
        ConfigError: not a whole number.
    """
    given = [text.partition("=")[2] for text in overrides if text.startswith(f"{BATCHES}=")]
    keys = [text for text in overrides if not text.startswith(f"{BATCHES}=")]
    if not given:
        return 0, keys
    if not re.fullmatch(r"[0-9]{1,9}", given[-1]):
        raise ConfigError(f"{BATCHES}={given[-1]} is not a whole number, 0 or more.")
    return int(given[-1]), keys


def inspect(config: Config, num_batches: int, *, json_output: bool, show_mask: bool) -> None:
    """Prints what the data amounts to and its first batches.

    json_output: one object a batch, or without batches one of all counts. show_mask: the first batch as text, with what
    is trained and what is only read told apart.

    Raises:
        ConfigError: json_output and show_mask together, or a key that does not fit.
        DataError: data that cannot be read.
    """
    if json_output and show_mask:
        raise ConfigError("--show-mask is for people, --json for programs; give one of them.")
    batch_size = global_batch_size(config)
    dataset = build_dataset(config.data, vocab_size=config.model.vocab_size, batch_size=batch_size, max_blocks=None)
    batches = itertools.islice(dataset.train, num_batches or int(show_mask))
    if json_output and num_batches:
        for step, batch in enumerate(batches):
            print(json.dumps({"step": step} | _as_lists(batch)))
    elif json_output:
        print(json.dumps(_counts_as_json(dataset)))
    else:
        print("\n".join(_lines(dataset)))
        for step, batch in enumerate(batches):
            print(f"batch {step}: {_batch_line(batch)}")
            if show_mask and step == 0:
                print_mask(batch, dataset.tokenizer)


def global_batch_size(config: Config) -> int:
    """Returns the rows of a batch on cpu_devices devices, or on one.

    Raises:
        ConfigError: not a whole number of rows.
    """
    exact = config.data.per_device_batch_size * max(config.fake_devices, 1)
    if exact != int(exact):
        raise ConfigError(
            f"per_device_batch_size={config.data.per_device_batch_size:g} on {max(config.fake_devices, 1)} devices "
            f"is {exact:g} rows; set cpu_devices to the number of devices that train, or per_device_batch_size so that "
            "it is a whole number."
        )
    return int(exact)


def print_mask(batch: Batch, tokenizer: Tokenizer | None) -> None:
    """Prints each segment of a batch as text, or as ids without a tokenizer: trained targets, and what is only read."""
    console = Console(highlight=False, soft_wrap=True)
    for row in range(len(batch.inputs)):
        for segment in range(1, int(batch.segment_ids[row].max()) + 1):
            places = np.flatnonzero(batch.segment_ids[row] == segment)
            if len(places):
                title = f"--- row {row}, segment {segment}: {len(places)} targets"
                trained = int(batch.loss_mask[row, places].sum())
                console.print(f"{title}, {trained} trained", style="bold", markup=False)
                console.print(_coloured(segment_runs(batch, row, places), tokenizer, console.is_terminal))
        padding = int((batch.segment_ids[row] == 0).sum())
        if padding:
            console.print(f"--- row {row}: {padding} places of padding", style="bold", markup=False)


def segment_runs(batch: Batch, row: int, places: np.ndarray) -> Iterator[Run]:
    """Yields the tokens of a segment, its first one and all targets, in runs.

    places: of the segment in its row, int [n]. A first token is only read.
    """
    ids = [int(batch.inputs[row, places[0]]), *batch.targets[row, places].tolist()]
    trained = [False, *(batch.loss_mask[row, places] > 0).tolist()]
    for is_trained, group in itertools.groupby(zip(ids, trained, strict=True), key=lambda pair: pair[1]):
        yield Run([token for token, _ in group], is_trained)


def run_tokenize(config: Config, destination: str, num_workers: int) -> None:
    """Writes the documents of dataset_path in tokens to a folder, and says how to train on it; raises as `tokenize`."""
    folder = Path(destination).expanduser()

    def report(progress: Progress) -> None:
        kept = f" ({progress.kept_shards} from before)" if progress.kept_shards else ""
        print(f"{progress.shards} shards{kept}: {_counted(progress)}", file=sys.stderr)

    done = tokenize(config.data, config.model.vocab_size, folder, num_workers, report)
    print(f"Wrote {folder}: {_counted(done)} in {done.shards} shards")
    if done.skipped:
        print(f"Left out {done.skipped:,} rows that cannot be read, the first {done.first_skipped}")
    print(f"Train on it: dataset_type=tokenized dataset_path={folder}")


def _counted(progress: Progress) -> str:
    return f"{progress.documents:,} documents, {progress.tokens:,} tokens"


def _as_lists(batch: Batch) -> dict[str, Any]:
    return {name: part.tolist() for name, part in batch._asdict().items() if part is not None}


def _counts_as_json(dataset: Dataset) -> dict[str, Any]:
    found = dataset.statistics
    counts = {} if found is None else dataclasses.asdict(found) | {"padding_share": found.padding_share}
    return {"summary": dataset.summary, "sources": list(dataset.source_names)} | counts


def _lines(dataset: Dataset) -> Iterator[str]:
    found = dataset.statistics
    if found is None:
        yield dataset.summary
        return
    yield from (f"{name + ':':<20} {value}" for name, value in _counts(found))


def _counts(found: DataStatistics) -> Iterator[tuple[str, str]]:
    of_rows = "" if found.rows_are_all else " (of the first rows)"
    yield "data", f"{found.kind}, {found.where}"
    yield "documents", f"{found.documents:,}"
    yield "tokens", f"{found.tokens:,}"
    yield "targets", f"{found.targets:,} in {found.windows:,} windows"
    yield "held out", f"{found.held_out_documents:,} documents, {found.held_out_targets:,} targets"
    yield "trained tokens", f"{found.trained_share:.1%}"
    yield "rows", f"{found.rows:,}{of_rows}"
    yield "packing efficiency", f"{found.packing_efficiency:.1%}{of_rows}"
    yield "padding", f"{found.padding_share:.1%} of the places in rows{of_rows}"
    yield "cut tokens", f"{found.cut_tokens:,}"
    yield "without a target", f"{found.without_targets:,} documents"
    first = f", the first {found.skipped.first}" if found.skipped.first else ""
    yield "skipped rows", f"{found.skipped.count:,}{first}"


def _batch_line(batch: Batch) -> str:
    rows, length = batch.inputs.shape
    real, trained = int((batch.segment_ids > 0).sum()), int(batch.loss_mask.sum())
    padding = 1 - real / batch.inputs.size
    return f"{rows} rows of {length}, {real:,} targets, {trained:,} of them trained, {padding:.1%} padding"


def _coloured(runs: Iterator[Run], tokenizer: Tokenizer | None, in_colours: bool) -> Text:
    text = Text()
    decoder = None if tokenizer is None else tokenizer.build_stream_decoder()
    shown = [(_run_text(run.ids, tokenizer, decoder), run.trained) for run in runs]
    if decoder is not None:
        shown.append((decoder.finish(), shown[-1][1]))
    for words, trained in shown:
        if words and trained and not in_colours:
            words = f"{OPENING}{words}{CLOSING}"
        text.append(_CONTROL.sub(lambda found: repr(found[0])[1:-1], words), style=TRAINED if trained else READ)
    return text


def _run_text(ids: Sequence[int], tokenizer: Tokenizer | None, decoder: StreamDecoder | None) -> str:
    """Characters that tokens share are shown with the last of them, and marks by their names."""
    if tokenizer is None or decoder is None:
        return "".join(f"{token} " for token in ids)
    shown: list[str] = []
    for token in ids:
        # A single space may have no text where a text begins; a mark has none anywhere.
        is_mark = not tokenizer.decode([token, token])
        shown.append(_name(token, tokenizer) if is_mark else decoder.decode([token]))
    return "".join(shown)


def _name(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.written(token) or f"<{token}>"
