"""What is printed while prompts grow."""

import io
import json
from pathlib import Path

from maxlite.data.tokenizer_bytes import ByteTokenizer
from maxlite.data.tokenizer_json import JsonTokenizer
from maxlite.decode.output import Continuation, JsonWriter, TextWriter
from maxlite.decode.prompts import Prompt


def continuation(text):
    return Continuation(Prompt(text, tuple(text.encode())))


def test_text_comes_as_it_grows_and_whole_characters_only():
    stream, row = io.StringIO(), continuation("a")
    writer = TextWriter(stream, ByteTokenizer())
    writer.update([row])
    assert stream.getvalue() == "a"
    row.ids += [98, 0xC3]
    writer.update([row])
    assert stream.getvalue() == "ab"
    row.ids += [0xA9]
    row.finish_reason = "length"
    writer.update([row])
    assert stream.getvalue() == "abé\n"


def test_later_prompts_wait_for_the_first():
    stream, rows = io.StringIO(), [continuation("a"), continuation("b")]
    writer = TextWriter(stream, ByteTokenizer())
    rows[1].ids, rows[1].finish_reason = [50], "eos"
    writer.update(rows)
    assert stream.getvalue() == "--- prompt 1 of 2 ---\na"
    rows[0].ids, rows[0].finish_reason = [49], "length"
    writer.update(rows)
    assert stream.getvalue() == "--- prompt 1 of 2 ---\na1\n--- prompt 2 of 2 ---\nb2\n"


def test_a_model_cannot_send_commands_to_the_terminal():
    stream, row = io.StringIO(), continuation("a\t\n")
    row.ids, row.finish_reason = list(b"\x1b[2J\x07b"), "length"
    TextWriter(stream, ByteTokenizer()).update([row])
    assert stream.getvalue() == "a\t\n\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}b\n"


def test_without_tokenizer_ids_are_shown():
    stream, row = io.StringIO(), Continuation(Prompt(None, (5, 9)), [7, 8], "length")
    TextWriter(stream, None).update([row])
    assert stream.getvalue() == " 5 9 -> 7 8\n"


def test_json_prints_finished_prompts_in_order():
    stream, rows = io.StringIO(), [continuation("a"), continuation("b")]
    writer = JsonWriter(stream, ByteTokenizer())
    rows[1].ids, rows[1].finish_reason = [50], "eos"
    writer.update(rows)
    assert stream.getvalue() == ""
    rows[0].finish_reason = "length"
    writer.update(rows)
    writer.update(rows)
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == [
        {"prompt": "a", "prompt_ids": [97], "ids": [], "text": "", "finish_reason": "length"},
        {"prompt": "b", "prompt_ids": [98], "ids": [50], "text": "2", "finish_reason": "eos"},
    ]


def test_json_text_is_null_without_tokenizer():
    stream = io.StringIO()
    JsonWriter(stream, None).update([Continuation(Prompt(None, (5,)), [7], "length")])
    record = json.loads(stream.getvalue())
    assert record["text"] is None
    assert record["prompt"] is None


def test_text_goes_on_where_the_prompt_ended():
    """The space before a word is part of its token here, and is lost where the word begins a text."""
    tokenizer = JsonTokenizer(Path(__file__).resolve().parents[1] / "assets" / "stories260K")
    assert tokenizer.decode([407]) == "upon"
    row = Continuation(Prompt("Once", (1, 403)), [407, 261, 378, 2], "length")
    assert row.text(tokenizer) == " upon a time"
    shown, record = io.StringIO(), io.StringIO()
    TextWriter(shown, tokenizer).update([row])
    JsonWriter(record, tokenizer).update([row])
    assert shown.getvalue() == "Once upon a time\n"
    assert json.loads(record.getvalue())["text"] == " upon a time"
