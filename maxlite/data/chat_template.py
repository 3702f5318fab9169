"""Chat templates: the Jinja text of a model that writes a conversation as one text, run in a sandbox.

The conventions are those of transformers' apply_chat_template, so that a template renders here as it does there.
"""

import datetime
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from maxlite.errors import ConfigError, DataError

ASSISTANT = "assistant"

Message = Mapping[str, Any]
CharacterSpan = tuple[int, int]


class RenderError(Exception):
    """A conversation that the template does not take; says why, for the message about its row."""


class ChatTemplate:
    """One template: conversation in, text out, and which characters of it the assistant says.

    A message is an object with a role and mostly a content, of JSON's types only. What stands between
    `{% generation %}` and `{% endgeneration %}` is what the assistant says, no more and no less: an end mark behind
    the block is not. In a template without such blocks it is what a conversation gains by a turn, behind the prompt
    for that turn; its end mark is, space behind that is not.
    """

    def __init__(self, text: str, special_names: Mapping[str, str], source: str) -> None:
        """Reads the template `text`.

        special_names: what the template may call the tokenizer's marks, such as bos_token -> "<s>".
        source: the key and value that the template came from, for messages.
        Raises ConfigError for text that is no template.
        """
        self._source = source
        now = datetime.datetime.now()
        plain = _Sandbox(("", ""), now)
        # Nothing that a message holds can look like these.
        self._marks = (f"<{secrets.token_hex(16)}>", f"<{secrets.token_hex(16)}>")
        try:
            self._plain = plain.from_string(text, dict(special_names))
            self._marked = _Sandbox(self._marks, now).from_string(text, dict(special_names))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{source} is no chat template: {error.message} in line {error.lineno}. Mend it, or give another Jinja "
                "file as chat_template_path."
            ) from error
        self._has_blocks = plain.num_blocks > 0

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Returns the text of `messages`, with what asks the assistant for its turn behind it if wanted.

        Raises RenderError if the template does not take them, ConfigError if it does what no template may.
        """
        return self._render(self._plain, messages, add_generation_prompt)

    def render_turns(self, messages: Sequence[Message], where: str, first: int = 0) -> tuple[str, list[CharacterSpan]]:
        """Returns the text of `messages` and the spans in it that the assistant says, end marks included.

        where: file and line, for messages. first: turns of the assistant before this message are left out.
        Raises as `render`, and DataError where the template writes earlier turns otherwise once more follow, so that
        nothing says which characters are a turn's.
        """
        whole = self.render(messages)
        if not self._has_blocks:
            return whole, list(self._added_spans(whole, messages, where, first))
        text, spans = _strip_marks(self._render(self._marked, messages), self._marks)
        if text != whole:
            raise ConfigError(
                f"{self._source} passes what stands in {{% generation %}} through a filter that changes it, so what "
                "the assistant says cannot be found in the text. Move the filter into the block."
            )
        begin = self._prefix(whole, messages[:first], False, where) if first else 0
        return whole, [span for span in spans if span[0] >= begin]

    def _added_spans(self, whole: str, messages: Sequence[Message], where: str, first: int) -> Iterator[CharacterSpan]:
        for place in range(first, len(messages)):
            if messages[place]["role"] != ASSISTANT:
                continue
            start = self._prefix(whole, messages[:place], True, where)
            end = self._prefix(whole, messages[: place + 1], False, where) if place + 1 < len(messages) else len(whole)
            if start > end:
                raise self._rewriting(where, place + 1)
            yield start, start + _turn_length(whole[start:end], messages[place].get("content"))

    def _prefix(self, whole: str, messages: Sequence[Message], add_generation_prompt: bool, where: str) -> int:
        text = self.render(messages, add_generation_prompt)
        if not whole.startswith(text):
            raise self._rewriting(where, len(messages) + add_generation_prompt)
        return len(text)

    def _rewriting(self, where: str, turn: int) -> DataError:
        return DataError(
            f"{where}: {self._source} writes message {turn}, or what asks for it, otherwise in the whole conversation "
            "than at its end, so nothing says which characters the assistant says. Put them between "
            "{% generation %} and {% endgeneration %} in a copy of the template and give that as chat_template_path, "
            "or set sft_train_on_completion_only=false to train on all tokens."
        )

    def _render(
        self, template: jinja2.Template, messages: Sequence[Message], add_generation_prompt: bool = False
    ) -> str:
        try:
            return template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=add_generation_prompt
            )
        except jinja2.exceptions.SecurityError as error:
            raise ConfigError(
                f"{self._source} does what no chat template may: {error}. Give another as chat_template_path."
            ) from error
        except Exception as error:  # A template is a program, and can fail in every way that one can.
            reason = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            raise RenderError(f"the chat template does not take it: {reason}") from error


class _Sandbox(ImmutableSandboxedEnvironment):
    """Where templates run: no file, no attribute of Python's inside, nothing that they are given can be changed.

    generation_marks: what is put around each generation block. num_blocks: those in the templates read so far.
    """

    def __init__(self, generation_marks: tuple[str, str], now: datetime.datetime) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, LoopControlExtension])
        self.generation_marks = generation_marks
        self.num_blocks = 0
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        # One time for all rows of a run.
        self.globals["strftime_now"] = now.strftime
        self.globals["namespace"] = _Namespace
        # Not the class, whose methods reach what the sandbox keeps from being changed.
        self.globals["dict"] = lambda *args, **names: dict(*args, **names)


class _GenerationBlocks(Extension):
    """The tags `generation` and `endgeneration`; the body has variables of its own, as a macro has."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        assert isinstance(self.environment, _Sandbox)
        self.environment.num_blocks += 1
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("surround"), [], [], body).set_lineno(line)

    def surround(self, caller: Macro) -> str:
        """Returns what the block holds, between the environment's marks."""
        assert isinstance(self.environment, _Sandbox)
        begin, end = self.environment.generation_marks
        return f"{begin}{caller()}{end}"


class _Namespace(Namespace):
    """As Jinja's, but no attribute of Python's own can be put in: the sandbox would believe what it says."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")
        super().__setitem__(name, value)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON as a model reads it; Jinja's own filter escapes what HTML has a meaning for."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strip_marks(marked: str, marks: tuple[str, str]) -> tuple[str, list[CharacterSpan]]:
    begin, end = marks
    parts: list[str] = []
    spans: list[CharacterSpan] = []
    length = depth = start = 0
    for part in re.split(f"({begin}|{end})", marked):
        if part == begin:
            start, depth = (length if depth == 0 else start), depth + 1
        elif part == end:
            depth -= 1
            if depth == 0:
                spans.append((start, length))
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), spans


def _turn_length(turn: str, content: Any) -> int:
    """Returns how much of `turn` the assistant says: space behind an end mark only leads to the next turn."""
    said = turn.rstrip()
    ends_with_content = isinstance(content, str) and bool(content.strip()) and said.endswith(content.strip())
    return len(turn) if ends_with_content or not said else len(said)
