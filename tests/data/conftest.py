"""A data section with base.yml's values, small folders of documents, and small tokenizers."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from maxlite.config.load import load_config
from maxlite.config.schema import DataConfig


@pytest.fixture
def build_data_config() -> Callable[..., DataConfig]:
    """Returns a function from changes to a data section; rows of 32 tokens, nothing held out."""
    base = load_config("base.yml", ["max_target_length=32", "per_device_batch_size=1", "eval_fraction=0"], {}).data
    return lambda **changes: dataclasses.replace(base, **changes)


@pytest.fixture
def write_files(tmp_path: Path) -> Callable[[Mapping[str, str | bytes]], str]:
    """Returns a function that writes name -> content below a folder and returns the folder."""

    def write(contents: Mapping[str, str | bytes], folder: str = "documents") -> str:
        for name, content in contents.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(tmp_path / folder)

    return write


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen have them: every byte, a few merges, marks above."""
    vocab = {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("h", "i"), ("Ġ", "hi"), ("ð", "Ł")]
    vocab |= {left + right: len(vocab) + place for place, (left, right) in enumerate(merges)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = ["<|begin|>", "<|end|>", "<|im_start|>"]
    backend.add_special_tokens([tokenizers.AddedToken(mark, normalized=False) for mark in marks])
    backend.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    return backend


def byte_level_with_begin_mark() -> tokenizers.Tokenizer:
    """As Llama 3: what cuts the text into bytes and what adds the mark stand in a row."""
    backend = byte_level()
    template = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 259)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return backend


def words() -> tokenizers.Tokenizer:
    """64 words with a space between them; the marks are words like any other."""
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{index}": 4 + index for index in range(60)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def word_starts() -> tokenizers.Tokenizer:
    """A Unigram of which a token that begins a word says so; the first space is no part of a text."""
    pieces = [("<unk>", 0.0), ("▁", -3.0), ("▁a", -1.0), ("b", -1.0), ("a", -2.0), ("▁▁", -2.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def word_ends() -> tokenizers.Tokenizer:
    """A BPE of which a token that ends a word says so; the last such space is no part of a text."""
    vocab = {"a": 0, "b": 1, "a</w>": 2, "b</w>": 3, "ab</w>": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b</w>")], end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.BPEDecoder()
    return backend


BACKENDS = {build.__name__: build for build in (byte_level, byte_level_with_begin_mark, words, word_starts, word_ends)}
STORIES = Path(__file__).resolve().parents[1] / "assets" / "stories260K"


@pytest.fixture
def write_tokenizer(tmp_path: Path) -> Callable[..., Path]:
    """write_tokenizer("words", tokenizer_config={...}): a folder with that tokenizer.json and other JSON files."""

    def write(name: str, **files: Any) -> Path:
        folder = tmp_path / "tokenizer"
        folder.mkdir(exist_ok=True)
        BACKENDS[name]().save(str(folder / "tokenizer.json"))
        for file, content in files.items():
            (folder / f"{file}.json").write_text(content if isinstance(content, str) else json.dumps(content))
        return folder

    return write


@pytest.fixture(params=["stories", *BACKENDS])
def any_tokenizer(request: pytest.FixtureRequest, write_tokenizer: Callable[..., Path]) -> Path:
    """The folder of each tokenizer in turn."""
    return STORIES if request.param == "stories" else write_tokenizer(request.param)
