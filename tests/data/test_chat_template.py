"""Conversations as text, and which of it the assistant says; transformers renders and masks the same."""

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from maxlite.config.schema import Config
from maxlite.data.chat_template import ChatTemplate, RenderError
from maxlite.data.encoder import build_encoder
from maxlite.data.rows import Example, Row
from maxlite.data.tokenizer_json import JsonTokenizer
from maxlite.errors import ConfigError, DataError

STORIES = Path(__file__).resolve().parents[1] / "assets" / "stories260K"
MARKS = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{% if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
)
CHATML_BLOCKS = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA = """{{- bos_token }}
{%- if tools is not none %}{{ raise_exception('no tools') }}{% endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
LLAMA_BLOCKS = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' -%}
        {% generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
MISTRAL_START = """{%- set ns = namespace(system='') -%}
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set ns.system = message.content + '\\n\\n' -%}{%- continue -%}
    {%- endif -%}
    {%- if message.role == 'user' -%}
        {{- '[INST] ' + ns.system + message.content + ' [/INST]' -}}{%- set ns.system = '' -%}
    {%- elif message.role == 'assistant' -%}
"""
MISTRAL_END = """
    {%- else -%}{{ raise_exception('unknown role ' + message.role) }}
    {%- endif -%}
{%- endfor -%}"""
MISTRAL = MISTRAL_START + "{{- ' ' + message.content + eos_token -}}" + MISTRAL_END
MISTRAL_BLOCKS = (
    MISTRAL_START + "{%- generation -%}{{- ' ' + message.content + eos_token -}}{%- endgeneration -%}" + MISTRAL_END
)
# No end mark: the line's end ends the turn.
LINES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LINES_BLOCKS = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ '\n\n' }}{% endgeneration %}{% else %}{{ m.content }}{{ '\n\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
PAIRS = {
    "chatml": (CHATML, CHATML_BLOCKS),
    "llama": (LLAMA, LLAMA_BLOCKS),
    "mistral": (MISTRAL, MISTRAL_BLOCKS),
    "lines": (LINES.replace("\n\n", "{{ '\n\n' }}"), LINES_BLOCKS),
}
TEMPLATES = {
    f"{name}{kind}": text for name, pair in PAIRS.items() for kind, text in zip(("", " blocks"), pair, strict=True)
}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A model, é 日本 🙂."},
    {"role": "user", "content": "Once upon a time, there was assistant: <s>"},
    {"role": "assistant", "content": "\n  a little girl named Lily.\n\n"},
]


def build(text: str, **names: str) -> ChatTemplate:
    return ChatTemplate(text, MARKS | names, "chat_template_path=a.jinja")


def said(text: str, messages: list[dict[str, Any]], first: int = 0) -> list[str]:
    whole, spans = build(text).render_turns(messages, "a.jsonl:1", first)
    assert whole == build(text).render(messages)
    return [whole[start:end] for start, end in spans]


def test_a_conversation_and_what_asks_for_the_next_turn() -> None:
    """Written out by hand."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    chatml = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert build(CHATML).render(messages[:1]) == "<|im_start|>user\nHi<|im_end|>\n"
    assert build(CHATML).render(messages[:1], True) == chatml
    assert build(CHATML).render(messages) == chatml + "Yes<|im_end|>\n"
    assert build(MISTRAL).render(messages) == "<s>[INST] Hi [/INST] Yes</s>"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", ["A model, é 日本 🙂.<|im_end|>", "\n  a little girl named Lily.\n\n<|im_end|>"]),
        ("llama", ["A model, é 日本 🙂.<|eot_id|>", "a little girl named Lily.<|eot_id|>"]),
        ("mistral", [" A model, é 日本 🙂.</s>", " \n  a little girl named Lily.\n\n</s>"]),
        ("lines", ["A model, é 日本 🙂.\n\n", "\n  a little girl named Lily.\n\n\n\n"]),
    ],
)
def test_the_turns_of_the_assistant_with_their_end_marks(name: str, expected: list[str]) -> None:
    """Told by the template's blocks, or else by what a turn adds; a line's end counts where nothing else ends it."""
    for text in PAIRS[name]:
        assert said(text, CHAT) == expected
        assert said(text, CHAT[:-1]) == expected[:1]
        assert said(text, CHAT, first=3) == expected[1:]
        assert said(text, CHAT[:2]) == []


def test_turns_that_follow_one_another_and_an_empty_one() -> None:
    """Each is a turn of its own; one that says nothing still ends."""
    messages = [CHAT[1], *({"role": "assistant", "content": text} for text in ("One", "", "Two"))]
    for text in (CHATML, CHATML_BLOCKS):
        assert said(text, messages) == ["One<|im_end|>", "<|im_end|>", "Two<|im_end|>"]


def test_blocks_inside_a_macro_and_a_filter() -> None:
    """Their place is found in the finished text, not while it is written."""
    macro = (
        "{% macro turn(m) %}[{{ m.role }}] {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endmacro %}"
        "{% for m in messages %}{{ turn(m) }};{% endfor %}"
    )
    assert said(macro, CHAT[1:3]) == ["A model, é 日本 🙂."]
    with pytest.raises(ConfigError, match=r"a\.jinja passes what stands in \{% generation %\} through a filter"):
        said("{% filter upper %}" + macro + "{% endfilter %}", CHAT)


REWRITERS = {
    # Qwen 3 and DeepSeek drop what was thought before the last question.
    "thoughts": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else m.content.split('</think>')[-1] }};"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    # The prompt for a turn says more than the turn.
    "prompt": "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}",
    "count": "{{ messages | length }}{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}",
}


@pytest.mark.parametrize("name", REWRITERS)
def test_templates_that_write_earlier_turns_otherwise_are_refused(name: str) -> None:
    """Nothing is guessed; the message says what to do."""
    messages = [
        CHAT[1],
        {"role": "assistant", "content": "<think>hm</think>Yes"},
        CHAT[3],
        {"role": "assistant", "content": "No"},
    ]
    if name == "prompt":
        messages[1] = messages[3]
    with pytest.raises(DataError, match=r"b\.jsonl:7: chat_template_path=a\.jinja writes message 2, or what asks") as e:
        build(REWRITERS[name]).render_turns(messages, "b.jsonl:7")
    assert "{% generation %}" in str(e.value) and "sft_train_on_completion_only=false" in str(e.value)


def test_what_templates_may_use() -> None:
    """JSON without HTML's escapes, a date, loop controls, dict and namespace, both kinds of line trimming."""
    assert build("{{ messages[0] | tojson }}").render([{"role": "a", "content": "<é'&>"}]) == (
        """{"role": "a", "content": "<é'&>"}"""
    )
    assert build("{{ [1, {'b': 2}] | tojson(indent=2) }}").render([]) == '[\n  1,\n  {\n    "b": 2\n  }\n]'
    # At midnight either day is right.
    days = {datetime.datetime.now().strftime("%Y-%m-%d")}
    shown = build("{{ strftime_now('%Y-%m-%d') }}").render([])
    assert shown in days | {datetime.datetime.now().strftime("%Y-%m-%d")}
    assert build("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}").render([]) == "012"
    assert build("{{ dict(a=1) }}{% set n = namespace(x=1) %}{% set n.x = n.x + 1 %}{{ n.x }}").render([]) == (
        "{'a': 1}2"
    )
    assert build("a\n  {% if true %}\nb\n  {% endif %}\nc").render([]) == "a\nb\nc"
    assert build("{{ bos_token }}{{ pad_token is defined }}{{ tools }}{{ documents }}").render([]) == "<s>FalseNoneNone"


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ dict.update(messages[0], role='x') }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ strftime_now.__self__.year }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ lipsum.__globals__['os'].system('true') }}",
        "{{ range(10000000) | list }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_what_templates_may_not_do(text: str) -> None:
    """No way out of the sandbox, and no changed messages."""
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises((ConfigError, RenderError)):
        build(text).render(messages)
    assert messages == [{"role": "user", "content": "Hi"}]


def test_a_template_that_refuses_and_one_that_is_none() -> None:
    """The first is about a row, the second about the config."""
    with pytest.raises(RenderError, match="does not take it: unknown role tool"):
        build(MISTRAL).render([{"role": "tool", "content": "1"}])
    with pytest.raises(RenderError, match="does not take it: .*no attribute 'content'"):
        build(CHATML).render([{"role": "user"}])
    with pytest.raises(RenderError, match="does not take it: ZeroDivisionError"):
        build("{{ 1 / (messages | length) }}").render([])
    with pytest.raises(ConfigError, match=r"a\.jinja is no chat template: .* in line 2"):
        build("\n{% for %}")
    with pytest.raises(ConfigError, match=r"a\.jinja is no chat template"):
        build("{% generation %}")


@pytest.fixture
def encode(tiny_config: Callable[..., Config], tmp_path: Path) -> Callable[[str, list], Example]:
    """encode(template, messages): the example that stories260K's tokenizer makes of it."""

    def run(template: str, messages: list) -> Example:
        file = tmp_path / "a.jinja"
        file.write_text(template)
        keys = ("objective=sft", "dataset_type=jsonl", f"tokenizer_path={STORIES}", f"chat_template_path={file}")
        (found,) = build_encoder(tiny_config(*keys).data, JsonTokenizer(STORIES), 512)(
            [Row("a", "a:1", {"messages": messages})]
        )
        assert isinstance(found, Example)
        return found

    return run


@pytest.mark.torch
@pytest.mark.parametrize("name", TEMPLATES)
def test_transformers_renders_and_masks_the_same(encode: Callable[[str, list], Example], name: str) -> None:
    """Text and ids of every beginning of a chat; masks of the templates that have blocks."""
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_file=str(STORIES / "tokenizer.json"), **MARKS)
    reference.chat_template = TEMPLATES[name]
    for length in range(1, len(CHAT) + 1):
        messages = CHAT[:length]
        for ask in (False, True):
            expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
            assert build(TEMPLATES[name]).render(messages, ask) == expected
        blocks = PAIRS[name.removesuffix(" blocks")][1]
        expected = reference.apply_chat_template(
            messages, chat_template=blocks, return_assistant_tokens_mask=True, return_dict=True
        )
        found = encode(TEMPLATES[name], messages)
        assert found.tokens.tolist() == expected["input_ids"]
        assert found.trained is not None
        assert found.trained.astype(int).tolist() == expected["assistant_masks"]
