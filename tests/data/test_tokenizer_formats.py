"""A tokenizer's format is seen in its file, and every format becomes the same tokenizer.json."""

import json
import shutil
from pathlib import Path

import pytest

from maxlite.data.tokenizer_formats import (
    GGUF,
    JSON,
    SENTENCEPIECE,
    TEKKEN,
    TIKTOKEN,
    open_tokenizer,
    tokenizer_format,
    write_tokenizer,
)
from maxlite.data.tokenizer_json import JsonTokenizer
from maxlite.errors import ConfigError

ASSETS = Path(__file__).resolve().parents[1] / "assets"
STORIES, SMALL = ASSETS / "stories260K", ASSETS / "tokenizers"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", b'{"model": {"vocab": {"token_bytes": 0}}}', JSON),
        ("a.model", b' \n{"model": {}}', JSON),
        ("a.json", b'{"config": {"default_num_special_tokens": 1}, "vocab": [{"token_bytes": ""}]}', TEKKEN),
        ("a.model", (SMALL / "bpe.model").read_bytes(), SENTENCEPIECE),
        ("a.json", b"\x0a\x05", SENTENCEPIECE),
        ("a.model", b"IQ== 0\nIg== 1\n", TIKTOKEN),
        ("a.txt", b"AAAA 7", TIKTOKEN),
        ("a.gguf", b"", GGUF),
    ],
)
def test_the_content_tells_the_format(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    assert tokenizer_format(tmp_path / name) == expected


@pytest.mark.parametrize("content", [b"", b"hello, 5", b"#version: 0.2\nh i\n", b"\x80\x02", b"[1]"])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"tokenizer.model is no tokenizer that can be read: neither .* SentencePiece"
    ):
        JsonTokenizer(tmp_path)


@pytest.mark.parametrize("name", ["unigram", "bpe", "stories"])
def test_what_is_written_is_the_same_tokenizer(tmp_path, name):
    """The digest tells: the same ids of every text, and the same marks."""
    given = tmp_path / "given"
    given.mkdir()
    file = STORIES / "tokenizer.model" if name == "stories" else SMALL / f"{name}.model"
    shutil.copyfile(file, given / "tokenizer.model")
    beside = {"add_eos_token": True, "auto_map": {"AutoTokenizer": "code.py"}, "chat_template": "{{ messages }}"}
    (given / "tokenizer_config.json").write_text(json.dumps(beside))
    (given / "chat_template.jinja").write_text("{{ bos_token }}")
    write_tokenizer(given / "tokenizer.model", tmp_path)
    first, second = JsonTokenizer(given), JsonTokenizer(tmp_path)
    assert second.digest == first.digest
    assert second.encode_prompt("a </s> b") == first.encode_prompt("a </s> b")
    assert second.chat_template == first.chat_template == "{{ bos_token }}"
    assert second.special_names == first.special_names
    assert "auto_map" not in json.loads((tmp_path / "tokenizer_config.json").read_text())


@pytest.mark.torch
@pytest.mark.parametrize("name", ["unigram", "bpe"])
def test_transformers_opens_what_is_written(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    write_tokenizer(SMALL / f"{name}.model", tmp_path)
    reference, tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path), JsonTokenizer(tmp_path)
    for text in ("The tokenizer", " a  b<sep>c</s>", "\u65e5\u672c \U0001f40d"):
        ids = reference(text)["input_ids"]
        assert tokenizer.encode_prompt(text) == ids
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_files_that_can_not_be_read(tmp_path):
    with pytest.raises(ConfigError, match="tokenizer.model can't be read"):
        open_tokenizer(tmp_path / "tokenizer.model")
    shutil.copyfile(SMALL / "bpe.model", tmp_path / "tokenizer.model")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="chat_template.jinja can't be read as text"):
        open_tokenizer(tmp_path / "tokenizer.model")
