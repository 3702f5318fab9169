"""Conversations, prompts and completions: the text, what of it is trained, and what is wrong with a row."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maxlite.config.schema import Config
from maxlite.data.rows import Row
from maxlite.data.sft import Passage, RowError, SftReader
from maxlite.data.tokenizer_bytes import ByteTokenizer
from maxlite.data.tokenizer_json import JsonTokenizer
from maxlite.errors import ConfigError, DataError

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}|\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "So?"},
    {"role": "assistant", "content": "No"},
]
WHOLE = "<user>Hi|\n<assistant>Yes|\n<user>So?|\n<assistant>No|\n"
ReadRow = Callable[..., Passage]


@pytest.fixture
def read(tiny_config: Callable[..., Config], tmp_path: Path) -> ReadRow:
    """read({column: value}, *overrides, template=...): the passage of that row, under the byte tokenizer."""

    def run(fields: dict[str, Any], *overrides: str, template: str | None = TEMPLATE) -> Passage:
        keys = ["objective=sft", "dataset_type=jsonl", "vocab_size=258", *overrides]
        if template is not None:
            (tmp_path / "a.jinja").write_text(template)
            keys.append(f"chat_template_path={tmp_path / 'a.jinja'}")
        return SftReader(tiny_config(*keys).data, ByteTokenizer()).read(Row("1", "b.jsonl:1", fields))

    return run


def trained(passage: Passage) -> list[str]:
    assert passage.spans is not None
    return [passage.text[start:end] for start, end in passage.spans]


def test_messages(read: ReadRow) -> None:
    """What the assistant says with its end mark, or all; the template has put the marks."""
    found = read({"messages": CHAT, "source": 3})
    assert found.text == WHOLE
    assert trained(found) == ["Yes|", "No|"]
    assert found.has_marks
    assert read({"messages": CHAT}, "sft_train_on_completion_only=false") == Passage(WHOLE, None, True)
    assert trained(read({"chat": CHAT[:2]}, "train_data_columns=chat")) == ["Yes|"]
    assert trained(read({"messages": CHAT[:1]})) == []


@pytest.mark.parametrize("columns", [("prompt", "completion"), ("question", "answer")])
def test_prompt_and_completion_as_text(read: ReadRow, columns: tuple[str, str]) -> None:
    """One text, without a template; the completion is trained."""
    overrides = [] if columns[0] == "prompt" else [f"train_data_columns={','.join(columns)}"]
    fields = dict(zip(columns, ("2+2=", "4"), strict=True))
    found = read(fields, *overrides, template=None)
    assert (found.text, trained(found), found.has_marks) == ("2+2=4", ["4"], False)
    assert read(fields, "sft_train_on_completion_only=false", *overrides).spans is None
    assert trained(read({columns[0]: "2+2=", columns[1]: ""}, *overrides)) == [""]


def test_prompt_and_completion_as_messages(read: ReadRow) -> None:
    """One conversation; the assistant's turns in the prompt are read only."""
    found = read({"prompt": CHAT[:3], "completion": CHAT[3:]})
    assert (found.text, trained(found), found.has_marks) == (WHOLE, ["No|"], True)
    assert trained(read({"prompt": CHAT[:1], "completion": CHAT[1:]})) == ["Yes|", "No|"]
    blocks = (
        "{% for m in messages %}<{{ m.role }}>"
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}|{% endgeneration %}"
        "{% else %}{{ m.content }}|{% endif %}{{ '\n' }}{% endfor %}"
    )
    found = read({"prompt": CHAT[:3], "completion": CHAT[3:]}, template=blocks)
    assert (found.text, trained(found)) == (WHOLE, ["No|"])


def test_messages_come_before_a_prompt(read: ReadRow) -> None:
    """Published chats repeat their first message in a column called prompt; a table has nulls for what is not there."""
    assert read({"prompt": "Hi", "messages": CHAT}).text == WHOLE
    assert read({"prompt": "a", "completion": "b", "messages": None}).text == "ab"


def test_null_fields_of_a_message_are_as_if_they_were_not_there(read: ReadRow) -> None:
    """A table has a column for what only some messages have, and an assistant may only call tools."""
    calls = [{"name": "add", "arguments": {"a": 1}}]
    messages = [
        {"role": "user", "content": "Hi", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    template = TEMPLATE.replace("{{ m.content }}", "{% if m.content is defined %}{{ m.content }}{% endif %}")
    found = read({"messages": messages}, template=template)
    assert trained(found) == ['[{"name": "add", "arguments": {"a": 1}}]|']
    assert found.text.startswith("<user>Hi|\n<assistant>[")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"text": "a", "id": 1}, "no messages, nor prompt and completion; its columns are text, id"),
        ({"messages": None}, "messages is null, not a list"),
        ({"messages": "Hi"}, "messages is text, not a list"),
        ({"messages": []}, "messages is a list without messages"),
        ({"messages": ["Hi"]}, "message 1 of messages is text, not an object"),
        ({"messages": [{"from": "human", "value": "Hi"}]}, "message 1 of messages has from, value; role is null"),
        ({"messages": [{"role": 3, "content": "Hi"}]}, "role is a number"),
        ({"messages": [CHAT[0], {"role": "user"}]}, "message 2 of messages has no content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "message 1 of messages has no content"),
        ({"messages": [{"role": "user", "content": 5}]}, "content of message 1 of messages is a number"),
        ({"messages": [{"role": "user", "content": "a", "at": b"x"}]}, "holds bytes"),
        ({"prompt": "a"}, "no completion; its columns are prompt"),
        ({"prompt": "a", "completion": None}, "prompt is text and completion is null"),
        ({"prompt": "a", "completion": CHAT[3:]}, "prompt is text and completion is a list"),
        ({"prompt": 1, "completion": "b"}, "prompt is a number and completion is text"),
    ],
)
def test_rows_that_are_not_as_they_should_be(read: ReadRow, fields: dict[str, Any], problem: str) -> None:
    """The problem says what is there instead."""
    with pytest.raises(RowError, match=problem):
        read(fields)


def test_a_row_that_the_template_refuses(read: ReadRow) -> None:
    """What the template says is passed on; a template that hides who says what stops the run."""
    with pytest.raises(RowError, match="the chat template does not take it: no tools"):
        read({"messages": CHAT}, template="{{ raise_exception('no tools') }}")
    with pytest.raises(DataError, match=r"b\.jsonl:1: chat_template_path=.*writes message 2"):
        read({"messages": CHAT}, template="{{ messages | length }}" + TEMPLATE)


def test_settings_that_cannot_be_used(read: ReadRow, tmp_path: Path) -> None:
    """Messages without a template, a file that is none, too many columns."""
    with pytest.raises(ConfigError, match="null \\(bytes\\) has no chat template.*chat_template_path"):
        read({"messages": CHAT}, template=None)
    with pytest.raises(ConfigError, match="has no chat template"):
        read({"prompt": "a", "completion": "b"}, "train_data_columns=chat", template=None)
    with pytest.raises(ConfigError, match="train_data_columns=a,b,c has 3 columns"):
        read({}, "train_data_columns=a,b,c")
    with pytest.raises(ConfigError, match="a.jinja is empty"):
        read({}, template=" \n")
    with pytest.raises(ConfigError, match="a.jinja is no chat template"):
        read({}, template="{% if %}")
    with pytest.raises(ConfigError, match="nothing.jinja cannot be read"):
        read({}, f"chat_template_path={tmp_path / 'nothing.jinja'}", template=None)


def test_the_tokenizers_own_template(tiny_config: Callable[..., Config], write_tokenizer: Callable[..., Path]) -> None:
    """It stands in tokenizer_config.json with the names of its marks; chat_template_path goes before it."""
    settings = {"chat_template": "{{ bos_token }}" + TEMPLATE + "{{ pad_token }}", "bos_token": "<s>"}
    folder = write_tokenizer("words", tokenizer_config=settings)
    keys = ["objective=sft", "dataset_type=jsonl", f"tokenizer_path={folder}"]
    row = Row("1", "b.jsonl:1", {"messages": CHAT})
    found = SftReader(tiny_config(*keys).data, JsonTokenizer(folder)).read(row)
    assert found.text == "<s>" + WHOLE
    (folder / "other.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    keys += [f"chat_template_path={folder / 'other.jinja'}", "sft_train_on_completion_only=false"]
    assert SftReader(tiny_config(*keys).data, JsonTokenizer(folder)).read(row).text == "<s>Hi"
