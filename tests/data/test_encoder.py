"""Rows under each kind of encoder: ids, marks, what is trained, and rows that are none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxlite.config.schema import Config
from maxlite.data import encoder as encoder_module
from maxlite.data.encoder import build_encoder, trained_tokens
from maxlite.data.rows import BadRow, Example, Row
from maxlite.data.tokenizer_bytes import ByteTokenizer
from maxlite.data.tokenizer_json import JsonTokenizer
from maxlite.errors import ConfigError, DataError

MARKS = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
BEGIN, END, IM_START, HI, SPACE_HI = 259, 260, 261, 256, 257
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
Encode = Callable[..., list[Any]]


@pytest.fixture
def encode(tiny_config: Callable[..., Config], write_tokenizer: Callable[..., Path]) -> Encode:
    """encode([fields, ...], *overrides, name="words"): ids of each row, with what is trained, or the problem."""

    def run(rows: list[dict[str, Any]], *overrides: str, name: str = "byte_level_with_begin_mark", size: int = 263):
        settings = MARKS if name.startswith("byte_level") else {}
        folder = write_tokenizer(name, tokenizer_config=settings | {"chat_template": CHATML})
        data = tiny_config("dataset_type=jsonl", f"tokenizer_path={folder}", *overrides).data
        encoder = build_encoder(data, JsonTokenizer(folder), size)
        named = [Row(str(place), f"a.jsonl:{place}", fields) for place, fields in enumerate(rows, 1)]
        return [plain(found) for found in encoder(named)]

    return run


def plain(found: Example | BadRow) -> Any:
    if isinstance(found, BadRow):
        return f"{found.where}: {found.problem}"
    assert found.tokens.dtype == np.int32
    if found.trained is None:
        return found.tokens.tolist()
    assert found.trained.dtype == bool
    return found.tokens.tolist(), found.trained.astype(int).tolist()


def text_rows(*texts: Any) -> list[dict[str, Any]]:
    return [{"text": text} for text in texts]


def test_each_document_has_the_marks_that_are_asked_for(encode: Encode) -> None:
    """No begin mark comes twice, and none to a tokenizer whose own template has none."""
    rows = text_rows("hi", "hihi")
    assert encode(rows) == [[BEGIN, HI, END], [BEGIN, HI, HI, END]]
    assert encode(rows, "add_bos=false") == [[HI, END], [HI, HI, END]]
    assert encode(rows, "add_eos=false") == [[BEGIN, HI], [BEGIN, HI, HI]]
    assert encode(rows, name="byte_level") == [[HI, END], [HI, HI, END]]
    assert encode([{"body": "hi", "text": 3}], "train_data_columns=body") == [[BEGIN, HI, END]]


def test_batches_keep_order_and_leave_no_row_out(encode: Encode, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is encoded at once makes no difference; bad rows keep their place."""
    rows = text_rows(*("hi" * number for number in range(1, 9)))
    rows.insert(3, {"text": None})
    expected: list[Any] = [[HI] * number for number in range(1, 9)]
    expected.insert(3, "a.jsonl:4: text is null, not text")
    for size in (1, 5, 1_000_000):
        monkeypatch.setattr(encoder_module, "BATCH_CHARACTERS", size)
        assert encode(rows, "add_bos=false", "add_eos=false") == expected
    assert encode([]) == []


def test_odd_documents(encode: Encode) -> None:
    """Text without a token has no targets, and so no marks; space is text; anything else is a bad row."""
    rows = [*text_rows("", "   ", None, 5, True, ["a"], {"a": 1}, b"a", "a\ud800b"), {"url": "u"}, {}]
    assert encode(rows[:2], "add_bos=false", "add_eos=false", name="words", size=64) == [[], []]
    found = encode(rows)
    assert found[0] == []
    assert (found[1][0], found[1][-1], len(found[1])) == (BEGIN, END, 5)
    assert found[2:] == [
        "a.jsonl:3: text is null, not text",
        "a.jsonl:4: text is a number, not text",
        "a.jsonl:5: text is true or false, not text",
        "a.jsonl:6: text is a list, not text",
        "a.jsonl:7: text is an object, not text",
        "a.jsonl:8: text is bytes, not text",
        "a.jsonl:9: '\\ud800' is half of a surrogate pair, which is no character",
        "a.jsonl:10: no text; its columns are url (see train_data_columns)",
        "a.jsonl:11: no text; its columns are none (see train_data_columns)",
    ]


def test_an_end_mark_that_is_not_there(encode: Encode) -> None:
    """The message says which key to change; a chat has the marks of its template alone."""
    sft, chat = ("objective=sft",), {"messages": [{"role": "assistant", "content": "w1"}]}
    with pytest.raises(ConfigError, match=r"add_eos=true, but the tokenizer of .* has no end mark"):
        encode([], name="words")
    with pytest.raises(ConfigError, match=r"add_eos=true, but the tokenizer of .* has no end mark"):
        encode([], *sft, "train_data_columns=question,answer", name="words")
    with pytest.raises(ConfigError, match=r"add_eos=true, but the tokenizer of .* has no end mark"):
        encode([{"prompt": "w0", "completion": "w1"}], *sft, name="words")
    assert encode(text_rows("w0"), "add_eos=false", name="words") == [[4]]
    assert len(encode([chat], *sft, name="words")) == 1


def test_a_token_that_the_model_does_not_have(encode: Encode) -> None:
    """The row and the token are named."""
    with pytest.raises(DataError, match=r"a\.jsonl:1 holds '<\|im_start\|>', token 261 of .* vocab_size=261"):
        encode(text_rows("hi<|im_start|>"), size=261)


def test_a_chat_trains_what_the_assistant_says_and_its_end_mark(encode: Encode) -> None:
    """No mark but the template's is put; the end mark counts wherever it is the assistant's."""
    chat = {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hihi"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hi"},
        ]
    }
    ((ids, trained),) = encode([chat], "objective=sft")
    assert BEGIN not in ids
    assert (ids.count(IM_START), ids.count(END)) == (4, 4)
    # The space before "hi" is asked for by the prompt, but is one token with it.
    counted = [token for token, count in zip(ids, trained, strict=True) if count]
    assert counted == [SPACE_HI, HI, END, SPACE_HI, END]
    (whole,) = encode([chat], "objective=sft", "sft_train_on_completion_only=false")
    assert whole == ids


def test_a_completion_trains_itself_and_the_end_mark(encode: Encode) -> None:
    """The prompt and the begin mark are read only; empty halves make no trouble."""
    rows = [
        {"prompt": "hihi", "completion": "hi"},
        {"prompt": "hi", "completion": ""},
        {"prompt": "", "completion": "hi"},
        {"prompt": "", "completion": ""},
        {"prompt": "a\udc00", "completion": "hi"},
    ]
    assert encode(rows, "objective=sft") == [
        ([BEGIN, HI, HI, HI, END], [0, 0, 0, 1, 1]),
        ([BEGIN, HI, END], [0, 0, 1]),
        ([BEGIN, HI, END], [0, 1, 1]),
        ([], []),
        "a.jsonl:5: '\\udc00' is half of a surrogate pair, which is no character",
    ]
    everything = encode(rows[:1], "objective=sft", "sft_train_on_completion_only=false", "add_eos=false")
    assert everything == [[BEGIN, HI, HI, HI]]


def test_bytes(tiny_config: Callable[..., Config]) -> None:
    """The tokenizer of no tokenizer_path has marks, starts of characters, and no template."""
    data = tiny_config("dataset_type=jsonl", "vocab_size=258", "objective=sft").data
    encoder = build_encoder(data, ByteTokenizer(), 258)
    (found,) = encoder([Row("1", "a:1", {"prompt": "é", "completion": "ü!"})])
    assert plain(found) == ([256, 195, 169, 195, 188, 33, 257], [0, 0, 0, 1, 1, 1, 1])
    with pytest.raises(ConfigError, match="null \\(bytes\\) has no chat template.*chat_template_path"):
        encoder([Row("1", "a:1", {"messages": [{"role": "user", "content": "Hi"}]})])


def test_a_token_across_the_start_of_a_span() -> None:
    """It is trained if it holds more of the span than space; tokens of one character are trained together."""
    answer = "Answer: Yes"
    # "Answer", ":", " Yes": the span begins behind the space.
    assert trained_tokens(answer, [0, 6, 7], [(8, 11)]).tolist() == [False, False, True]
    # "Answer:" and "Yes" of a tokenizer that has no token for spaces: the span begins with the space.
    assert trained_tokens(answer, [0, 8], [(7, 11)]).tolist() == [False, True]
    # "\n\n" of which one belongs to the prompt.
    assert trained_tokens("a\n\nb", [0, 1, 3], [(2, 4)]).tolist() == [False, False, True]
    # One character of three tokens, and one of two.
    assert trained_tokens("日é", [0, 0, 0, 1, 1], [(1, 2)]).tolist() == [False] * 3 + [True] * 2
    assert trained_tokens("日é", [0, 0, 0], [(1, 2)]).tolist() == [True] * 3
    assert trained_tokens("ab", [0, 1], [(0, 1), (2, 2)]).tolist() == [True, False]
    assert trained_tokens("", [], [(0, 0)]).tolist() == []


def test_ids_are_taken_as_they_are(encode: Encode) -> None:
    """No mark is put around them; numbers must be ids of the model."""
    good = [{"input_ids": [0, 5, 262]}, {"input_ids": []}, {"input_ids": np.array([1, 2], np.uint16)}]
    bad = [None, 5, "1 2", [1, "2"], [1.0], [True], [-1], [263], [2**70], [-1, 2**63], [[1]]]
    rows = [*good, *({"input_ids": value} for value in bad), {"ids": [1]}]
    found = encode(rows, "tokenize_train_data=false")
    assert found[:3] == [[0, 5, 262], [], [1, 2]]
    problems = [text.partition(": input_ids ")[2] for text in found[3:-1]]
    assert problems[:6] == [
        "is null, not a list of whole numbers",
        "is a number, not a list of whole numbers",
        "is text, not a list of whole numbers",
        "holds text, not only whole numbers",
        "holds a number, not only whole numbers",
        "holds true or false, not only whole numbers",
    ]
    assert problems[6:8] == ["holds -1, not an id from 0 to 262", "holds 263, not an id from 0 to 262"]
    assert all("not an id from 0 to 262" in problem for problem in problems[8:10])
    assert problems[10] == "holds a list, not only whole numbers"
    assert found[-1] == "a.jsonl:15: no input_ids; its columns are ids (see train_data_columns)"
    assert encode([{"ids": [1]}], "tokenize_train_data=false", "train_data_columns=ids") == [[1]]


def test_ids_with_a_mask(encode: Encode) -> None:
    """objective=sft wants to know what of them is trained, unless all is."""
    sft = ("tokenize_train_data=false", "objective=sft")
    rows: list[dict[str, Any]] = [
        {"input_ids": [1, 2], "loss_mask": [0, 1]},
        {"input_ids": [1, 2], "loss_mask": [False, True]},
        {"input_ids": [1, 2], "loss_mask": [1]},
        {"input_ids": [1, 2], "loss_mask": [1, -100]},
        {"input_ids": [1, 2]},
    ]
    assert encode(rows, *sft) == [
        ([1, 2], [0, 1]),
        ([1, 2], [0, 1]),
        "a.jsonl:3: loss_mask is not one 0 or 1 for each of 2 ids",
        "a.jsonl:4: loss_mask is not one 0 or 1 for each of 2 ids",
        "a.jsonl:5: no loss_mask; its columns are input_ids (see train_data_columns)",
    ]
    assert encode(rows[-1:], *sft, "sft_train_on_completion_only=false") == [[1, 2]]
    with pytest.raises(ConfigError, match="train_data_columns=ids has 1 columns.*reads two"):
        encode(rows, *sft, "train_data_columns=ids")


def test_keys_that_do_not_go_together(tiny_config: Callable[..., Config]) -> None:
    """The message names them."""
    with pytest.raises(ConfigError, match="train_data_columns=a,b has 2 columns"):
        build_encoder(
            tiny_config("dataset_type=jsonl", "vocab_size=258", "train_data_columns=a,b").data, ByteTokenizer(), 258
        )
