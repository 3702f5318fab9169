"""Rows of conversations, or of prompts and completions, as texts of which some characters are trained."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from maxlite.config.schema import DataConfig
from maxlite.data.chat_template import ASSISTANT, CharacterSpan, ChatTemplate, RenderError
from maxlite.data.rows import Row
from maxlite.data.tokenizer import Tokenizer
from maxlite.errors import ConfigError

MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"
KINDS = {
    type(None): "null",
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    bytes: "bytes",
    list: "a list",
    dict: "an object",
}


class Passage(NamedTuple):
    """A document before it is tokens.

    spans: the characters that are trained, in order; None = all. has_marks: False = the begin and end marks of
    add_bos and add_eos are put around it, True = it has what marks it needs.
    """

    text: str
    spans: list[CharacterSpan] | None
    has_marks: bool


class RowError(Exception):
    """What is wrong with a row, as a phrase for its BadRow."""


class SftReader:
    """Makes a Passage of a row of `messages`, or of `prompt` and `completion`.

    The chat template decides which marks a conversation has. A prompt and its completion are one text, cut into
    tokens as one, or two lists of messages, which are one conversation of which the second part is trained.
    """

    def __init__(self, data: DataConfig, tokenizer: Tokenizer) -> None:
        """Reads the chat template that `data` or the tokenizer has, if one of them has any.

        Raises ConfigError for a template or columns that cannot be used.
        """
        columns = data.train_data_columns
        if columns is not None and len(columns) > 2:
            raise ConfigError(
                f"train_data_columns={','.join(columns)} has {len(columns)} columns; objective=sft reads one of "
                "messages, or two: a prompt and its completion."
            )
        self._columns = columns
        self._completion_only = data.sft_train_on_completion_only
        self._tokenizer_path = data.tokenizer_path
        self._template = build_chat_template(data, tokenizer)
        if columns is not None and len(columns) == 1:
            self._checked_template()

    def read(self, row: Row) -> Passage:
        """Returns the passage of `row`.

        Raises RowError for a row that is not as it should be, ConfigError for messages without a template, DataError
        where the template hides which characters the assistant says.
        """
        columns = self._columns or _present_columns(row)
        for column in columns:
            if column not in row.fields:
                raise RowError(missing_column(column, row))
        if len(columns) == 1:
            return self._conversation(row.where, _messages(row, columns[0]), 0)
        prompt, completion = (row.fields[column] for column in columns)
        if isinstance(prompt, str) and isinstance(completion, str):
            spans = [(len(prompt), len(prompt) + len(completion))] if self._completion_only else None
            return Passage(prompt + completion, spans, has_marks=False)
        if isinstance(prompt, list) and isinstance(completion, list):
            asked, answered = _messages(row, columns[0]), _messages(row, columns[1])
            return self._conversation(row.where, [*asked, *answered], len(asked))
        raise RowError(
            f"{columns[0]} is {kind_of(prompt)} and {columns[1]} is {kind_of(completion)}, not text and text, nor "
            "two lists of messages"
        )

    def _conversation(self, where: str, messages: list[dict[str, Any]], first: int) -> Passage:
        template = self._checked_template()
        try:
            if not self._completion_only:
                return Passage(template.render(messages), None, has_marks=True)
            text, spans = template.render_turns(messages, where, first)
        except RenderError as error:
            raise RowError(str(error)) from error
        return Passage(text, spans, has_marks=True)

    def _checked_template(self) -> ChatTemplate:
        if self._template is None:
            raise ConfigError(
                f"tokenizer_path={self._tokenizer_path or 'null (bytes)'} has no chat template, which objective=sft "
                "needs for messages. Give a Jinja file as chat_template_path, the tokenizer of a chat model, or rows "
                "with a text prompt and completion."
            )
        return self._template


def build_chat_template(data: DataConfig, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Returns the template of chat_template_path, else the tokenizer's own; None if there is neither.

    Raises ConfigError for a file that cannot be read or is no template.
    """
    text, source = tokenizer.chat_template, f"The chat template of tokenizer_path={data.tokenizer_path}"
    if data.chat_template_path is not None:
        source = f"chat_template_path={data.chat_template_path}"
        try:
            text = Path(data.chat_template_path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source} cannot be read: {error}. Give a Jinja file in UTF-8.") from error
        if not text.strip():
            raise ConfigError(f"{source} is empty. Give a Jinja file that writes out the messages.")
    return None if text is None else ChatTemplate(text, tokenizer.special_names, source)


def kind_of(value: Any) -> str:
    """Returns what a column holds, in the words of JSON."""
    return KINDS.get(type(value), f"a {type(value).__name__}")


def missing_column(column: str, row: Row) -> str:
    """Returns the phrase that says which columns there are instead."""
    return f"no {column}; its columns are {', '.join(map(str, row.fields)) or 'none'} (see train_data_columns)"


def _present_columns(row: Row) -> tuple[str, ...]:
    # Published chats often repeat their first message in a column of its own called prompt.
    if row.fields.get(MESSAGES) is not None:
        return (MESSAGES,)
    if PROMPT in row.fields or COMPLETION in row.fields:
        return (PROMPT, COMPLETION)
    if MESSAGES in row.fields:
        return (MESSAGES,)
    raise RowError(missing_column(f"{MESSAGES}, nor {PROMPT} and {COMPLETION}", row))


def _messages(row: Row, column: str) -> list[dict[str, Any]]:
    found = row.fields[column]
    if not isinstance(found, list):
        raise RowError(f"{column} is {kind_of(found)}, not a list of messages")
    if not found:
        raise RowError(f"{column} is a list without messages")
    return [_message(item, f"message {place} of {column}") for place, item in enumerate(found, 1)]


def _message(item: Any, name: str) -> dict[str, Any]:
    """Returns a message without its null fields: a table has a column for what only some messages have."""
    if not isinstance(item, Mapping):
        raise RowError(f"{name} is {kind_of(item)}, not an object with role and content")
    message = {key: value for key, value in item.items() if value is not None}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise RowError(f"{name} has {', '.join(message) or 'nothing'}; role is {kind_of(role)}, not text")
    # An assistant that only calls tools says nothing.
    if content is None and not (role == ASSISTANT and len(message) > 1):
        raise RowError(f"{name} has no content")
    if content is not None and not isinstance(content, str | list):
        raise RowError(f"content of {name} is {kind_of(content)}, not text or a list of parts")
    for foreign in _foreign_values(message):
        raise RowError(f"{name} holds {kind_of(foreign)}, which a chat template cannot write")
    return message


def _foreign_values(value: Any) -> Iterator[Any]:
    """Yields what is none of JSON's types; no other object is shown to a template."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _foreign_values(item)
    elif isinstance(value, list):
        for item in value:
            yield from _foreign_values(item)
    elif type(value) not in (type(None), bool, int, float, str):
        yield value
