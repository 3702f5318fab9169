"""Where prompts come from, and one clear error for each that can't be used."""

import dataclasses
from pathlib import Path

import pytest

from maxlite.data.tokenizer_bytes import ByteTokenizer
from maxlite.data.tokenizer_json import JsonTokenizer
from maxlite.decode.prompts import Prompt, read_prompts
from maxlite.errors import ConfigError, DataError

STORIES = Path(__file__).resolve().parents[1] / "assets" / "stories260K"


@pytest.fixture
def read(tiny_config, tmp_path):
    """read(prompt=..., tokenizer=..., file="..."): the prompts of a model of 264 tokens."""

    def run(tokenizer=True, add_bos=True, file=None, vocab_size=264, **keys):
        if file is not None:
            path = tmp_path / "prompts.txt"
            path.write_bytes(file if isinstance(file, bytes) else file.encode())
            keys["prompt_file"] = str(path)
        section = dataclasses.replace(tiny_config().decode, **keys)
        chosen = {True: ByteTokenizer(), False: None}.get(tokenizer, tokenizer)
        return read_prompts(section, chosen, add_bos=add_bos, vocab_size=vocab_size)

    return run


def test_text_becomes_bytes_after_the_begin_mark(read):
    assert read(prompt="hé") == [Prompt("hé", (256, 104, 195, 169))]
    assert read(prompt="hé", add_bos=False) == [Prompt("hé", (104, 195, 169))]
    assert read(prompt="") == [Prompt("", (256,))]


def test_ids_of_several_prompts(read):
    assert read(prompt_ids="104, 105;256") == [Prompt("hi", (104, 105)), Prompt("", (256,))]
    assert read(prompt_ids="5,9", tokenizer=False) == [Prompt(None, (5, 9))]


def test_file_of_text_and_objects(read):
    file = 'hi\n{"prompt": "a\\nb"}\n{"prompt_ids": [104, 0], "more": 1}\n'
    ids = [(256, 104, 105), (256, 97, 10, 98), (104, 0)]
    assert [prompt.ids for prompt in read(file=file)] == ids
    assert read(file="hi") == [Prompt("hi", (256, 104, 105))]
    assert read(file="a\x0cb\u2028c\n", add_bos=False)[0].text == "a\x0cb\u2028c"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"prompt": "x", "tokenizer": False}, "has no tokenizer; give token ids.* or tokenizer_path="),
        ({"prompt": "", "add_bos": False}, "the prompt is empty"),
        ({"prompt_ids": "5,264"}, r"token id 264 is outside 0\.\.263 \(vocab_size=264\)"),
        ({"prompt_ids": "-1"}, r"token id -1 is outside 0\.\.263"),
        ({"prompt_ids": "5;"}, "prompt_ids=5;: the prompt is empty"),
        ({"prompt_ids": ""}, "the prompt is empty"),
        ({"prompt_ids": "5,x"}, "'x' is not a token id"),
        ({"prompt_ids": "5,,6"}, "'' is not a token id"),
    ],
)
def test_key_that_cannot_be_used(read, keys, message):
    with pytest.raises(ConfigError, match=message):
        read(**keys)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("", r"prompts\.txt is empty"),
        ("hi\n\nho\n", r"prompts\.txt:2: the prompt is empty"),
        ('hi\n{"prompt": \n', r"prompts\.txt:2: .* read as JSON"),
        ('{"promt": "x"}', r"prompts\.txt:1: .* neither, only promt"),
        ('{"prompt": "x", "prompt_ids": [1]}', r"prompts\.txt:1: .* has both"),
        ('{"prompt": 5}', r"prompts\.txt:1: prompt must be text, not 5"),
        ('{"prompt_ids": "5"}', r'prompts\.txt:1: prompt_ids must be a list of token ids, not "5"'),
        ('{"prompt_ids": []}', r"prompts\.txt:1: the prompt is empty"),
        ('{"prompt_ids": [1, 999]}', r"prompts\.txt:1: token id 999 is outside"),
        ('{"prompt_ids": [1, true]}', r"prompts\.txt:1: True is not a token id"),
        ('{"prompt": "\\ud800"}', r"prompts\.txt:1: .*half of a surrogate pair"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_file_that_cannot_be_used(read, file, message):
    with pytest.raises(DataError, match=message):
        read(file=file)


def test_file_that_is_not_there(read, tmp_path):
    with pytest.raises(DataError, match="missing.txt can't be read: No such file"):
        read(prompt_file=str(tmp_path / "missing.txt"))
    with pytest.raises(DataError, match="can't be read: Is a directory"):
        read(prompt_file=str(tmp_path))


def test_a_tokenizer_puts_its_own_marks_around_text(read):
    tokenizer = JsonTokenizer(STORIES)
    once = (403, 407, 261, 378)
    prompt = "Once upon a time"
    assert read(prompt=prompt, tokenizer=tokenizer, vocab_size=512) == [Prompt(prompt, (1, *once))]
    assert read(prompt=prompt, tokenizer=tokenizer, vocab_size=512, add_bos=False) == [Prompt(prompt, once)]
    assert read(prompt="<s>Once", tokenizer=tokenizer, vocab_size=512, add_bos=False) == [Prompt("<s>Once", (1, 403))]
    assert read(prompt_ids="1,403,407", tokenizer=tokenizer, vocab_size=512) == [Prompt("Once upon", (1, 403, 407))]


def test_a_tokenizer_of_another_model_is_refused(read):
    for prompt in ({"prompt": "a"}, {"prompt_ids": "5"}):
        with pytest.raises(ConfigError, match="vocab_size=511 is smaller than the 512"):
            read(tokenizer=JsonTokenizer(STORIES), vocab_size=511, **prompt)
