"""End ids of a model's folder, from all files that name some, and where a tokenizer is."""

import json
from pathlib import Path
from typing import Any

import pytest

from maxlite.data.model_folder import has_tokenizer, model_end_ids, read_settings, tokenizer_file
from maxlite.errors import ConfigError


def write(file: Path, content: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("place", ["", "hugging_face"])
def test_all_end_ids_of_both_files(tmp_path: Path, place: str) -> None:
    """One or several in either file, and in the text part of a model of several kinds of input (P43)."""
    write(tmp_path / place / "config.json", {"eos_token_id": [127, 9], "text_config": {"eos_token_id": 106}})
    write(tmp_path / place / "generation_config.json", {"eos_token_id": 1})
    assert model_end_ids(tmp_path) == (1, 9, 106, 127)


def test_no_end_ids(tmp_path: Path) -> None:
    """No files, no key or null name none."""
    assert model_end_ids(tmp_path) == ()
    write(tmp_path / "config.json", {"eos_token_id": None, "text_config": None})
    write(tmp_path / "generation_config.json", {})
    assert model_end_ids(tmp_path) == ()


@pytest.mark.parametrize("wrong", ["2", [1, "2"], True, 2.0, {"a": 1}])
def test_end_id_that_is_none(tmp_path: Path, wrong: Any) -> None:
    """The message names the file and shows the value."""
    write(tmp_path / "config.json", {"eos_token_id": wrong})
    with pytest.raises(ConfigError, match=r"config\.json: eos_token_id=.* must be a token id"):
        model_end_ids(tmp_path)


@pytest.mark.parametrize(("content", "message"), [("{", "can't be read as JSON"), ("[1]", "a JSON object, not list")])
def test_broken_file(tmp_path: Path, content: str, message: str) -> None:
    """It is named, not passed over."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"config\.json .*{message}"):
        read_settings(tmp_path / "config.json")


def test_tokenizer_file(tmp_path: Path) -> None:
    """The file itself, or the one in a folder."""
    assert tokenizer_file(tmp_path) is None
    assert tokenizer_file(tmp_path / "tokenizer.json") is None
    (tmp_path / "tokenizer.json").touch()
    assert tokenizer_file(tmp_path) == tokenizer_file(str(tmp_path / "tokenizer.json")) == tmp_path / "tokenizer.json"


def test_the_first_of_several_formats(tmp_path: Path) -> None:
    """A folder may hold the same tokenizer twice; two files of ranks are two tokenizers."""
    for name in ("b.tiktoken", "tekken.json", "tokenizer.model", "tokenizer.json"):
        (tmp_path / name).touch()
        assert tokenizer_file(tmp_path) == tmp_path / name
        assert has_tokenizer(tmp_path)
        assert tokenizer_file(tmp_path / "b.tiktoken") == tmp_path / "b.tiktoken"
    for name in ("tokenizer.json", "tokenizer.model", "tekken.json"):
        (tmp_path / name).unlink()
    (tmp_path / "a.tiktoken").touch()
    with pytest.raises(ConfigError, match=r"has several tokenizers: a.tiktoken, b.tiktoken. Name the file"):
        tokenizer_file(tmp_path)
