"""Tokenizers made of metadata, against published ones and against the cuts that their models were trained with."""

import json
from pathlib import Path
from typing import Any

import pytest

from maxlite.data.gguf_header import GgufHeader
from maxlite.data.gguf_tokenizer import (
    build_backend,
    token_ids,
    tokenizer_problem,
    tokenizer_settings,
)
from maxlite.data.tokenizer_files import byte_characters
from maxlite.data.tokenizer_formats import save_tokenizer
from maxlite.data.tokenizer_json import JsonTokenizer
from maxlite.errors import ConversionError

STORIES = Path(__file__).resolve().parents[1] / "assets" / "stories260K"
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
TEXTS = (
    "Once upon a time",
    "",
    " two  spaces ",
    "a tab\tand a line\n",
    "日本 é <0x41>",
    "</s>Once<s> upon",
    "'quoted' -- 12",
)


def header(**keys: Any) -> GgufHeader:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return GgufHeader(Path("model.gguf"), 0, metadata, {})


def byte_level(cut: str, words: tuple[str, ...] = (), marks: tuple[str, ...] = ("<|end|>",), **keys: Any) -> GgufHeader:
    """All bytes, words that are merged letter by letter, and then marks."""
    tokens, merges = byte_characters(), []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    kinds = [NORMAL] * len(tokens) + [CONTROL] * len(marks)
    return header(model="gpt2", pre=cut, tokens=[*tokens, *marks], token_type=kinds, merges=merges, **keys)


def stories(**keys: Any) -> GgufHeader:
    """The published pieces, whose scores fall in the order in which they were learnt; the order is all there is."""
    tokens = list(json.loads((STORIES / "tokenizer.json").read_text())["model"]["vocab"])
    scores = [-float(max(0, number - 258)) for number in range(len(tokens))]
    kinds = [2, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    marks = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return header(model="llama", tokens=tokens, scores=scores, token_type=kinds, **{**marks, **keys})


def test_pieces_of_a_published_tokenizer(tmp_path):
    """Its tokenizer.json was made by transformers from the same pieces."""
    save_tokenizer(build_backend(stories()), tokenizer_settings(stories()), tmp_path)
    found, published = JsonTokenizer(tmp_path), JsonTokenizer(STORIES)
    for text in TEXTS:
        ids = published.encode_prompt(text)
        assert found.encode_prompt(text) == ids, text
        assert found.encode(text) == ids[1:]
        assert found.decode(ids) == published.decode(ids)
    assert (found.bos_id, found.eos_id, found.vocab_size) == (1, 2, 512)


def test_pieces_without_a_space_in_front():
    """As Gemma has them: a text begins as it is written, and the order of the pieces stands for their scores."""
    plain = stories(add_space_prefix=False)
    scores = [0.0] * len(plain.metadata["tokenizer.ggml.tokens"])
    ordered = {**plain.metadata, "tokenizer.ggml.scores": scores, "general.architecture": "gemma2"}
    gemma = GgufHeader(plain.path, 0, ordered, {})
    for one in (plain, gemma):
        backend = build_backend(one)
        for text, pieces in (("Once upon", ["On", "ce", "▁upon"]), (" Once", ["▁Once"]), ("the", ["the"])):
            ids = backend.encode(text, add_special_tokens=False).ids
            assert "".join(backend.id_to_token(token) for token in ids) == "".join(pieces)
            assert backend.decode(ids) == text
        published = JsonTokenizer(STORIES)
        assert backend.encode(" upon a time").ids == published.encode_prompt("upon a time")


def test_runs_of_spaces_are_pieces_as_well():
    """Files of Gemma write these as spaces, and every other space as the pieces have it."""
    tokens = ["<unk>", "<0x20>", "\u2581", "a", "  ", "    "]
    kinds = [2, BYTE, NORMAL, NORMAL, USER_DEFINED, USER_DEFINED]
    backend = build_backend(
        header(model="llama", tokens=tokens, scores=[0.0] * 6, token_type=kinds, add_space_prefix=False)
    )
    assert backend.encode("a    a  a a").ids == [3, 5, 3, 4, 3, 2, 3]
    assert backend.get_vocab_size() == len(tokens)


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", "x", "!!", " \n\n", " WE", "'", "LL"]),
        ("gpt-2", ["It", "'s", " 12345", "x", "!!", " \n\n", " WE", "'", "LL"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", "x", "!!", " \n\n", " WE", "'LL"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", "x", "!!", " \n\n", " WE", "'LL"]),
    ],
)
def test_where_a_text_is_cut(cut, expected):
    backend = build_backend(byte_level(cut))
    parts = backend.pre_tokenizer.pre_tokenize_str("It's 12345x!! \n\n WE'LL")
    assert [part.replace("Ġ", " ").replace("Ċ", "\n") for part, _ in parts] == expected


def test_marks_and_words_of_a_byte_level_tokenizer(tmp_path):
    """A mark is one id in a text, has no text of its own, and no prompt begins with one unless the file says so."""
    marks = {"bos_token_id": 259, "eos_token_id": 260, "padding_token_id": 260, "unknown_token_id": 259}
    one = byte_level("smollm", ("Ġhi", "hi"), ("<|begin|>", "<|end|>"), **marks)
    assert one.metadata["tokenizer.ggml.tokens"][256:] == ["Ġh", "Ġhi", "hi", "<|begin|>", "<|end|>"]
    save_tokenizer(build_backend(one), tokenizer_settings(one), tmp_path)
    found = JsonTokenizer(tmp_path)
    assert found.encode_prompt("hi hi<|end|>1é") == [258, 257, 260, ord("1"), 0xC3, 0xA9]
    assert found.decode([259, 258, 257, 260, 0xC3, 0xA9]) == "hi hié"
    assert (found.bos_id, found.eos_id, found.vocab_size) == (None, 260, 261)
    assert tokenizer_settings(one) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "unk_token": "<|begin|>",
        "pad_token": "<|end|>",
    }


@pytest.mark.parametrize(
    ("cut", "keys", "expected"),
    [
        ("llama-bpe", {}, [259, 256]),
        ("llama-bpe", {"add_bos_token": False}, [256]),
        ("qwen2", {}, [256]),
        ("qwen2", {"add_bos_token": True, "add_eos_token": True}, [259, 256, 260]),
    ],
)
def test_which_marks_a_prompt_gets(cut, keys, expected):
    one = byte_level(cut, ("hi", "Ġhi"), ("<|begin|>", "<|end|>"), bos_token_id=259, eos_token_id=260, **keys)
    assert build_backend(one).encode("hi").ids == expected


def test_details_that_go_with_a_cut():
    """Llama 3 takes a whole word that it knows, however its letters would merge; Qwen 2 composes accents first."""
    whole = {"tokens": [*byte_characters(), "ab", "bc", "abc"], "token_type": [NORMAL] * 259, "merges": ["b c", "a b"]}
    assert build_backend(header(model="gpt2", pre="llama-bpe", **whole)).encode("abc").ids == [258]
    assert build_backend(header(model="gpt2", pre="gpt-2", **whole)).encode("abc").ids == [ord("a"), 257]
    composed, apart = "\u00e9", "e\u0301"
    for cut, same in (("qwen2", True), ("smollm", False)):
        backend = build_backend(byte_level(cut))
        assert (backend.encode(composed).ids == backend.encode(apart).ids) == same


def test_a_word_that_is_kept_whole_and_has_text():
    one = byte_level("qwen2", ("think",), ("<think>", "<|end|>"))
    one.metadata["tokenizer.ggml.token_type"][-2] = USER_DEFINED
    backend = build_backend(one)
    ids = backend.encode("a<think>a<|end|>").ids
    assert ids == [ord("a"), 260, ord("a"), 261]
    assert backend.decode(ids) == "a<think>a"


def test_a_chat_template_goes_along():
    one = byte_level("qwen2", eos_token_id=256)
    template = {**one.metadata, "tokenizer.chat_template": "{{ messages }}"}
    assert tokenizer_settings(GgufHeader(one.path, 0, template, {}))["chat_template"] == "{{ messages }}"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        ({"eos_token_id": 7}, 7),
        ({"eos_token_id": 7, "eot_token_id": 7}, 7),
        ({"eos_token_id": 7, "eot_token_id": 5, "eom_token_id": 6}, [7, 5, 6]),
        ({"eot_token_id": 0}, 0),
    ],
)
def test_ids_that_end_a_text(keys, expected):
    assert token_ids(header(**keys)) == {"bos_token_id": None, "eos_token_id": expected, "pad_token_id": None}


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (header(), "model=None is not known; known are gpt2 and llama"),
        (header(model="t5"), "model='t5' is not known; known are gpt2 and llama"),
        (header(model="gpt2"), "pre=None is not known; known are gpt-2, default, smollm, llama3"),
        (byte_level("tekken"), "pre='tekken' is not known"),
    ],
)
def test_kinds_that_are_not_known(one, message):
    assert message in (tokenizer_problem(one) or "")
    with pytest.raises(ConversionError, match="Give token ids, or tokenizer_path="):
        build_backend(one)


@pytest.mark.parametrize(
    "change", [{"merges": ["a q z"]}, {"merges": ["nothing of this"]}, {"token_type": [1]}, {"tokens": ["a"]}]
)
def test_garbled_tokenizers(change):
    one = byte_level("gpt-2", ("hi",))
    assert tokenizer_problem(one) is None
    metadata = {**one.metadata, **{f"tokenizer.ggml.{key}": value for key, value in change.items()}}
    with pytest.raises(ConversionError, match="model.gguf has a garbled tokenizer"):
        build_backend(GgufHeader(one.path, 0, metadata, {}))
