"""Which documents there are, which are held out, and what becomes of rows that cannot be read."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from maxlite.config.schema import DataConfig
from maxlite.data.corpus import Source, open_source
from maxlite.data.pipeline import build_dataset
from maxlite.data.token_store import Span
from maxlite.data.tokenizer import build_tokenizer
from maxlite.errors import ConfigError, DataError

WriteFiles = Callable[..., str]
BuildDataConfig = Callable[..., DataConfig]
ODD_ROWS = {
    "cut JSON": (b'{"text": "a', "broken JSON"),
    "no object": (b'["a"]', "object"),
    "missing": (b'{"other": "a"}', "text"),
    "null": (b'{"text": null}', "null|None"),
    "number": (b'{"text": 7}', "number|int|7"),
    "surrogate": (b'{"text": "\\ud800"}', "surrogate"),
    "encoding": (b'{"text": "caf\xe9"}', "UTF-8"),
}


def opened(data: DataConfig, vocab_size: int = 258) -> Source:
    """Returns the source that dataset_path is."""
    return open_source(data, None, build_tokenizer(data), vocab_size)


def held_out_names(folder: str, fraction: float, data: DataConfig) -> set[str]:
    """Returns the first letters of the documents that are held out."""
    source = opened(data)
    assert source.held_out is not None
    documents = source.held_out.document.tolist()
    both = np.concatenate((source.train.document, source.held_out.document))
    assert sorted(both.tolist()) == list(range(len(source.store.num_tokens)))
    spans = [Span(document, 1, 2) for document in documents]
    return {chr(example.tokens[0]) for example in source.store.read_many(spans)}


def test_adding_documents_moves_none_of_the_others(write_files: WriteFiles, build_data_config: BuildDataConfig) -> None:
    """A document's name decides whether it is held out; about the share that was asked for is."""
    letters = [chr(code) for code in range(0x21, 0x7F)]
    files = {f"{ord(letter)}.txt": letter * 5 for letter in letters}
    few = dict(list(files.items())[:60])
    data = [
        build_data_config(dataset_path=(write_files(some, folder=name),), eval_fraction=0.2)
        for name, some in (("few", few), ("all", files))
    ]
    first, second = held_out_names("few", 0.2, data[0]), held_out_names("all", 0.2, data[1])
    assert first == second & set(letters[:60]) and 8 <= len(second) <= 32


@pytest.mark.parametrize("fraction", [0.001, 0.9])
def test_both_sides_have_a_document(
    write_files: WriteFiles, build_data_config: BuildDataConfig, fraction: float
) -> None:
    """However small or large the share."""
    source = opened(build_data_config(dataset_path=(write_files({"a": "aa", "b": "bb"}),), eval_fraction=fraction))
    assert source.held_out is not None and len(source.train.document) == len(source.held_out.document) == 1


@pytest.mark.parametrize("odd", ODD_ROWS)
def test_an_odd_row_stops_or_is_counted(write_files: WriteFiles, build_data_config: BuildDataConfig, odd: str) -> None:
    """By default the run stops and names file, line and problem; bad_rows=skip counts it and goes on (P35)."""
    line, problem = ODD_ROWS[odd]
    folder = write_files({"rows.jsonl": b'{"text": "good"}\n' + line + b'\n{"text": "fine"}\n'})
    data = build_data_config(dataset_type="jsonl", dataset_path=(folder,))
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*({problem})"):
        opened(data)
    dataset = build_dataset(
        build_data_config(dataset_type="jsonl", dataset_path=(folder,), bad_rows="skip", num_epoch=1),
        vocab_size=258,
        batch_size=2,
    )
    assert "1 rows skipped, the first " in dataset.summary and "rows.jsonl:2: " in dataset.summary
    targets = np.concatenate([batch.targets[batch.loss_mask == 1] for batch in dataset.train])
    assert sorted(targets.tolist()) == sorted([*b"goodfine", 257, 257])


def test_empty_and_blank_texts_are_no_end_of_data(write_files: WriteFiles, build_data_config: BuildDataConfig) -> None:
    """An empty text has no target; white space is text (P35)."""
    lines = [json.dumps({"text": text}) for text in ("", "   ", "word")]
    folder = write_files({"rows.jsonl": "\n".join(lines)})
    data = build_data_config(dataset_type="jsonl", dataset_path=(folder,), num_epoch=1)
    dataset = build_dataset(data, vocab_size=258, batch_size=8)
    (batch,) = dataset.train
    assert batch.loss_mask.sum() == 4 + 5 and "1 documents without a target" in dataset.summary


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_nothing_to_read(write_files: WriteFiles, build_data_config: BuildDataConfig, kind: str) -> None:
    """An empty file, or only rows that are skipped, is an error that says what was found."""
    content = b"\xff\xfe" if kind == "text" else b"broken\n"
    folder = write_files({"a.jsonl": content})
    data = build_data_config(dataset_type=kind, dataset_path=(f"{folder}/a.jsonl",), bad_rows="skip")
    with pytest.raises(DataError, match=r"holds no document: 1 rows skipped, the first .*a\.jsonl"):
        opened(data)


def test_no_token_follows_another(write_files: WriteFiles, build_data_config: BuildDataConfig) -> None:
    """A document of one byte without marks has no target; with nothing else there is nothing to train on."""
    data = build_data_config(dataset_path=(write_files({"a": "a"}),), add_bos=False, add_eos=False)
    with pytest.raises(DataError, match="add_bos or add_eos"):
        build_dataset(data, vocab_size=258, batch_size=1)


def test_vocabulary_smaller_than_the_tokenizer(write_files: WriteFiles, build_data_config: BuildDataConfig) -> None:
    """The marks need 258 ids."""
    data = build_data_config(dataset_path=(write_files({"a": "ab"}),))
    with pytest.raises(ConfigError, match="vocab_size=257"):
        build_dataset(data, vocab_size=257, batch_size=1)


def test_another_tokenizer_is_other_data(
    write_files: WriteFiles, build_data_config: BuildDataConfig, write_tokenizer: Callable[..., Path]
) -> None:
    """A run does not go on with the same files under other ids."""
    folder = write_files({"a": "w0 w1"})
    digests = set()
    for name in ("words", "byte_level"):
        path = str(write_tokenizer(name))
        data = build_data_config(dataset_path=(folder,), tokenizer_path=path, add_eos=False)
        digests.update(opened(data, 300).store.digest for _ in range(2))
    assert len(digests) == 2


def test_summary_names_what_was_found(write_files: WriteFiles, build_data_config: BuildDataConfig) -> None:
    """One line with the counts."""
    folder = write_files({"a": "a" * 9, "b": "b" * 9, "empty": "", "binary": b"\0"})
    other = write_files({"c": "c" * 19}, folder="other")
    data = build_data_config(dataset_path=(folder,), eval_dataset_path=(other, f"{folder}/a"))
    summary = build_dataset(data, vocab_size=258, batch_size=1).summary
    assert summary == (
        f"text: 5 documents from {folder}, held out {other}, {folder}/a; 54 tokens; 20 targets in 2 windows; "
        "held out 30 targets (60.0%); rows 62.5% full; cut 0 tokens; 1 documents without a target; "
        f"1 rows skipped, the first {folder}/binary: not UTF-8 text: byte 0 is 0"
    )
