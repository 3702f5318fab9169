"""What a run keeps of a tokenizer, whatever its format: every program opens it there."""

import base64
import json
import shutil
from pathlib import Path

import pytest

from maxlite.data.tokenizer_json import JsonTokenizer
from maxlite.errors import ConfigError
from maxlite.hf.run_files import keep_files, keep_tokenizer
from maxlite.launcher.convert import convert
from maxlite.launcher.resolve import resolve_config

ASSETS = Path(__file__).resolve().parents[1] / "assets"
STORIES, SMALL = ASSETS / "stories260K", ASSETS / "tokenizers"


@pytest.fixture
def given(tmp_path: Path) -> Path:
    folder = tmp_path / "given"
    folder.mkdir()
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_folder_without_a_tokenizer_json(given, run):
    """The run has the file as it was and a tokenizer.json made of it; a run that begins from it keeps the same."""
    for name in ("tokenizer.model", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copyfile(STORIES / name, given / name)
    keep_files(given, run)
    assert names(run) == ["hugging_face", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
    assert (run / "tokenizer.model").read_bytes() == (STORIES / "tokenizer.model").read_bytes()
    kept, published = JsonTokenizer(run), JsonTokenizer(STORIES)
    assert kept.digest == JsonTokenizer(given).digest
    assert kept.end_ids == published.end_ids == (1, 2)
    assert kept.encode_prompt("Once upon a time") == published.encode_prompt("Once upon a time")
    (given / "second").mkdir()
    keep_files(run, given / "second")
    assert names(given / "second") == names(run)
    assert JsonTokenizer(given / "second").digest == kept.digest


def test_a_file_that_is_named_is_kept_and_not_its_neighbours(given, run):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(STORIES / name, given / name)
    shutil.copyfile(SMALL / "unigram.model", given / "small.model")
    keep_tokenizer(given / "small.model", run)
    assert names(run) == ["small.model", "tokenizer.json", "tokenizer_config.json"]
    assert JsonTokenizer(run).digest == JsonTokenizer(given / "small.model").digest
    words = json.loads((STORIES / "tokenizer.json").read_text())
    words["normalizer"] = None
    (given / "other.json").write_text(json.dumps(words))
    keep_tokenizer(given / "other.json", run)
    assert JsonTokenizer(run).digest == JsonTokenizer(given / "other.json").digest


def test_a_run_keeps_what_it_has(run):
    shutil.copyfile(STORIES / "tokenizer.json", run / "tokenizer.json")
    before = JsonTokenizer(run).digest
    keep_tokenizer(run, run)
    keep_tokenizer(run / "tokenizer.json", run)
    assert names(run) == ["tokenizer.json"] and JsonTokenizer(run).digest == before


@pytest.mark.parametrize("name", ["own.tiktoken", "tokenizer.model", "tekken.json"])
def test_ranks(given, run, name):
    spelled = [bytes([byte]) for byte in range(256)] + [b"hi", b" hi"]
    encoded = [base64.b64encode(token).decode() for token in spelled]
    if name == "tekken.json":
        vocabulary = [{"rank": rank, "token_bytes": token, "token_str": None} for rank, token in enumerate(encoded)]
        config = {"pattern": r" ?\S+|\s", "default_vocab_size": 268, "default_num_special_tokens": 10}
        (given / name).write_text(json.dumps({"config": config, "vocab": vocabulary}))
    else:
        (given / name).write_text("".join(f"{token} {rank}\n" for rank, token in enumerate(encoded)))
        added = {"300": {"content": "<end>", "special": True}}
        settings = {"pat_str": r" ?\S+|\s", "eos_token": "<end>", "added_tokens_decoder": added}
        (given / "tokenizer_config.json").write_text(json.dumps(settings))
    keep_tokenizer(given, run)
    assert (run / name).read_bytes() == (given / name).read_bytes()
    kept, tokenizer = JsonTokenizer(run), JsonTokenizer(given)
    assert kept.digest == tokenizer.digest
    assert kept.encode_prompt("hi hi") == tokenizer.encode_prompt("hi hi")
    assert kept.eos_id == tokenizer.eos_id == (2 if name == "tekken.json" else 300)


def test_nothing_to_keep_and_what_can_not_be_read(given, run):
    keep_tokenizer(given, run)
    assert names(run) == []
    (given / "tokenizer.model").write_bytes(b"?")
    with pytest.raises(ConfigError, match="tokenizer.model is no tokenizer that can be read"):
        keep_tokenizer(given, run)


def test_a_model_with_a_sentencepiece_file_alone_comes_in_and_goes_out(tmp_path, given):
    """As many older folders have it; the text of its prompts is that of the model's own tokenizer.json."""
    for file in STORIES.iterdir():
        if file.name not in ("tokenizer.json", "special_tokens_map.json"):
            shutil.copyfile(file, given / file.name)
    flags = {"explain": False, "check": False}
    convert(str(given), str(tmp_path / "imported"), [], "5GB", flags)
    config = resolve_config(str(tmp_path / "imported"), [])
    assert config.data.tokenizer_path == str(tmp_path / "imported")
    convert(str(tmp_path / "imported"), str(tmp_path / "out"), [], "5GB", flags)
    prompt = "Once upon a time"
    for folder in ("imported", "out"):
        assert (tmp_path / folder / "tokenizer.model").is_file()
        assert JsonTokenizer(tmp_path / folder).encode_prompt(prompt) == JsonTokenizer(STORIES).encode_prompt(prompt)
