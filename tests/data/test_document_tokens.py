"""Documents under a tokenizer that must see them whole: the marks asked for, and every id a row of the model."""

from collections.abc import Callable
from pathlib import Path

import pytest

from maxlite.config.schema import DataConfig
from maxlite.data import document_tokens as document_tokens_module
from maxlite.data.document_tokens import document_tokens
from maxlite.data.documents import find_documents
from maxlite.data.tokenizer_json import JsonTokenizer
from maxlite.errors import ConfigError, DataError

BuildDataConfig = Callable[..., DataConfig]
WriteFiles = Callable[..., str]
WriteTokenizer = Callable[..., Path]
MARKS = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
BEGIN, END, HI = 259, 260, 256


@pytest.fixture
def tokens_of(write_files: WriteFiles, write_tokenizer: WriteTokenizer, build_data_config: BuildDataConfig) -> Callable:
    """tokens_of({name: content}, "words", add_eos=...): the ids of each document."""

    def run(contents: dict, name: str = "byte_level_with_begin_mark", vocab_size: int = 263, **keys: bool) -> list:
        settings = MARKS if name.startswith("byte_level") else {}
        folder = write_tokenizer(name, tokenizer_config=settings)
        data = build_data_config(tokenizer_path=str(folder), **keys)
        documents = find_documents((write_files(contents),), "dataset_path").found
        found = document_tokens(documents, JsonTokenizer(folder), data, vocab_size)
        return [None if tokens is None else tokens.tolist() for tokens in found]

    return run


def test_each_document_has_the_marks_that_are_asked_for(tokens_of: Callable) -> None:
    """No begin mark comes twice, and none to a tokenizer whose own template has none."""
    texts = {"a": "hi", "b": "hihi"}
    assert tokens_of(texts) == [[BEGIN, HI, END], [BEGIN, HI, HI, END]]
    assert tokens_of(texts, add_bos=False) == [[HI, END], [HI, HI, END]]
    assert tokens_of(texts, add_eos=False) == [[BEGIN, HI], [BEGIN, HI, HI]]
    assert tokens_of(texts, "byte_level") == [[HI, END], [HI, HI, END]]


def test_batches_keep_order_and_leave_no_document_out(tokens_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is encoded at once makes no difference; a document that breaks off being UTF-8 is none."""
    texts = {f"{number}": "hi" * number for number in range(1, 9)} | {"9": b"a" * 5000 + b"\xff"}
    expected = [[HI] * number for number in range(1, 9)] + [None]
    for size in (1, 5, 1_000_000):
        monkeypatch.setattr(document_tokens_module, "BATCH_BYTES", size)
        assert tokens_of(texts, add_bos=False, add_eos=False) == expected


def test_an_end_mark_that_is_not_there(tokens_of: Callable) -> None:
    """The message says which key to change."""
    with pytest.raises(ConfigError, match=r"add_eos=true, but the tokenizer of .* has no end mark"):
        tokens_of({"a": "w0"}, "words")
    assert tokens_of({"a": "w0"}, "words", add_eos=False) == [[4]]


def test_a_token_that_the_model_does_not_have(tokens_of: Callable) -> None:
    """The file and the token are named."""
    with pytest.raises(DataError, match=r"a holds '<\|im_start\|>', token 261 of .* vocab_size=261"):
        tokens_of({"a": "hi<|im_start|>"}, vocab_size=261)
