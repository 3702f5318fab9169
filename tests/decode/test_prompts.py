"""Where prompts come from, and one clear error for each that can't be used."""

import dataclasses

import pytest

from maxlite.data.tokenizer import ByteTokenizer
from maxlite.decode.prompts import Prompt, build_tokenizer, read_prompts
from maxlite.errors import ConfigError, DataError


@pytest.fixture
def read(tiny_config, tmp_path):
    """read(prompt=..., tokenizer=..., file="..."): the prompts of a model of 264 tokens."""

    def run(tokenizer=True, add_bos=True, file=None, **keys):
        if file is not None:
            path = tmp_path / "prompts.txt"
            path.write_bytes(file if isinstance(file, bytes) else file.encode())
            keys["prompt_file"] = str(path)
        section = dataclasses.replace(tiny_config().decode, **keys)
        chosen = ByteTokenizer() if tokenizer else None
        return read_prompts(section, chosen, add_bos=add_bos, vocab_size=264)

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
        ({"prompt": "x", "tokenizer": False}, "has no tokenizer; give token ids"),
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


def test_only_text_has_a_tokenizer(tiny_config):
    assert build_tokenizer(tiny_config().data) is None
    assert isinstance(build_tokenizer(tiny_config("dataset_type=text", "vocab_size=264").data), ByteTokenizer)
