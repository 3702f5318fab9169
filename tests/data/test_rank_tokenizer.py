"""Ranks of byte strings, against the tokenizer that they were taken from and against the tiktoken library."""

import base64
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from maxlite.data.rank_tokenizer import build_ranks, read_tekken, read_tiktoken
from maxlite.data.tokenizer_files import byte_characters
from maxlite.data.tokenizer_json import JsonTokenizer
from maxlite.data.tokenizer_parts import LLAMA3_CUT, O200K_CUT, QWEN_CUT
from maxlite.errors import ConfigError

ASSETS = Path(__file__).resolve().parents[1] / "assets"
PROSE = (ASSETS / "stories260K" / "README.md").read_text() + (ASSETS / "stories260K" / "LICENSE.llama2.c").read_text()
# As the tiktoken library spells GPT-2's cut.
GPT2_CUT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


def texts() -> list[str]:
    """Prose, runs of the same few characters, and random ones of many scripts."""
    source = random.Random(0)
    ranges = [(33, 127), (33, 127), (0xA0, 0x250), (0x370, 0x600), (0x4E00, 0x4F00), (0x1F300, 0x1F600), (32, 33)]
    mixed = ["".join(chr(source.randrange(*source.choice(ranges))) for _ in range(30)) for _ in range(100)]
    parts = ["a", "=", "\n", " ", "the", "\t", "'S", "1", "\r\n", "\u00e9"]
    runs = ["".join(source.choice(parts) * source.choice((1, 2, 5)) for _ in range(20)) for _ in range(100)]
    return [*PROSE.split("\n\n"), *mixed, *runs, "", "don't DON'T \u017f 12345.6 /x/\n"]


@cache
def trained() -> tokenizers.Tokenizer:
    """Learns 300 merges of this project's own prose."""
    backend = tokenizers.Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(tokenizers.Regex(LLAMA3_CUT), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=556, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([PROSE], trainer)
    return backend


def ranks() -> dict[bytes, int]:
    bytes_of = {character: byte for byte, character in enumerate(byte_characters())}
    vocabulary = trained().get_vocab()
    return {bytes(bytes_of[character] for character in token): number for token, number in vocabulary.items()}


def lines(found: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % number for token, number in found.items())


def write_ranks(folder: Path, name: str = "own.tiktoken", **settings: Any) -> Path:
    (folder / name).write_bytes(lines(ranks()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pat_str": LLAMA3_CUT, **settings}))
    return folder


def write_tekken(folder: Path, **changes: Any) -> Path:
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in sorted(ranks().items(), key=lambda entry: entry[1])
    ]
    config = {"pattern": LLAMA3_CUT, "default_vocab_size": 550, "default_num_special_tokens": 30}
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": entries, **changes}))
    return folder


def test_ids_are_those_of_the_tokenizer_that_learnt_the_ranks(tmp_path):
    tokenizer = JsonTokenizer(write_ranks(tmp_path))
    assert tokenizer.vocab_size == 556
    for text in texts():
        ids = trained().encode(text).ids
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text
    ids, starts = zip(*tokenizer.encode_batch_with_starts([" the  \u65e5\u672c"]), strict=True)
    assert starts[0] == [0, 4, 5, *([6] * 3), *([7] * 3)], ids


@pytest.mark.parametrize(
    ("cut", "reference"),
    [(None, GPT2_CUT), *((cut, cut) for cut in (LLAMA3_CUT, QWEN_CUT, O200K_CUT))],
    ids=["gpt2", "llama3", "qwen", "o200k"],
)
def test_the_library_agrees(tmp_path, cut, reference):
    tiktoken = pytest.importorskip("tiktoken")
    library = tiktoken.Encoding("own", pat_str=reference, mergeable_ranks=ranks(), special_tokens={})
    file = write_ranks(tmp_path) / "own.tiktoken"
    found = read_tiktoken(file, {"pat_str": LLAMA3_CUT})._replace(cut=cut)
    backend = build_ranks(file, found, {}, frozenset())
    for text in texts():
        assert backend.encode(text).ids == library.encode_ordinary(text), text


def test_a_part_that_is_a_token_is_never_merged_otherwise(tmp_path):
    """The ranks alone would make `ab` first, and never `abc`."""
    pytest.importorskip("tiktoken")
    found = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256, b"cd": 257, b"abc": 258, b"xabcd": 259}
    (tmp_path / "own.tiktoken").write_bytes(lines(found))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pat_str": QWEN_CUT}))
    tokenizer = JsonTokenizer(tmp_path)
    assert tokenizer.encode("xabcd") == [259]
    assert tokenizer.encode("yabcd") == [ord("y"), 256, 257]


def test_tokens_that_files_beside_add(tmp_path):
    """Ids may leave some out."""
    added = {
        "560": {"content": "<begin>", "special": True},
        "556": {"content": "<end>", "special": True},
        "600": {"content": "<think>"},
    }
    marks = {"bos_token": "<begin>", "eos_token": "<end>", "add_bos_token": True}
    tokenizer = JsonTokenizer(write_ranks(tmp_path, "tokenizer.model", added_tokens_decoder=added, **marks))
    plain = trained().encode("a").ids
    assert tokenizer.encode_prompt("a<think>a<end>") == [560, *plain, 600, *plain, 556]
    assert tokenizer.decode([560, *plain, 600, *plain, 556]) == "a<think>a"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (560, 556, 601)


@pytest.mark.parametrize(
    ("count", "cut", "composes", "marks"),
    [
        (50_256, None, False, {"<|endoftext|>": 50_256}),
        (100_256, LLAMA3_CUT, False, {"<|endoftext|>": 100_257, "<|fim_suffix|>": 100_260, "<|endofprompt|>": 100_276}),
        (199_998, O200K_CUT, False, {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018}),
        (151_643, QWEN_CUT, True, {"<|endoftext|>": 151_643, "<|im_end|>": 151_645, "<|extra_204|>": 151_850}),
        (
            128_000,
            LLAMA3_CUT,
            False,
            {
                "<|begin_of_text|>": 128_000,
                "<|end_of_text|>": 128_001,
                "<|start_header_id|>": 128_006,
                "<|eot_id|>": 128_009,
                "<|reserved_special_token_247|>": 128_255,
            },
        ),
    ],
)
def test_known_files(tmp_path, count, cut, composes, marks):
    """By how many ranks they have: the numbers are those of their publishers' own code."""
    tokens = {number.to_bytes(3, "big"): number for number in range(count)}
    (tmp_path / "tokenizer.model").write_bytes(lines(tokens))
    found = read_tiktoken(tmp_path / "tokenizer.model", {})
    assert (found.cut, found.composes, len(found.ranks)) == (cut, composes, count)
    assert marks.items() <= found.special.items()
    assert len(set(found.special.values())) == len(found.special)
    assert found.settings["eos_token"] in found.special
    assert ("bos_token" in found.settings) == (count == 128_000)


def test_tekken(tmp_path):
    """Special tokens come first, ranks beyond the vocabulary's size are left out, and a prompt begins with a mark."""
    tokenizer = JsonTokenizer(write_tekken(tmp_path))
    kept = {token: rank for token, rank in ranks().items() if rank < 520}
    assert tokenizer.vocab_size == 550
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    text = "The tokenizer of the model"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and {token - 30 for token in ids} <= set(kept.values())
    assert tokenizer.encode_prompt("[INST]</s>") == [1, 3, 2]
    assert [tokenizer.written(token) for token in (19, 20, 29)] == ["[TOOL_CONTENT]", "<SPECIAL_20>", "<SPECIAL_29>"]
    listed = [{"rank": 0, "token_str": "<unk>"}, {"rank": 5, "token_str": "<s>"}]
    own = JsonTokenizer(write_tekken(tmp_path, special_tokens=listed))
    assert (own.bos_id, own.eos_id, own.written(1)) == (5, None, "<SPECIAL_1>")


def test_the_library_agrees_about_tekken(tmp_path):
    tiktoken = pytest.importorskip("tiktoken")
    tokenizer = JsonTokenizer(write_tekken(tmp_path))
    kept = {token: rank for token, rank in ranks().items() if rank < 520}
    library = tiktoken.Encoding("own", pat_str=LLAMA3_CUT, mergeable_ranks=kept, special_tokens={})
    for text in texts():
        assert tokenizer.encode(text) == [30 + rank for rank in library.encode_ordinary(text)], text


@pytest.mark.parametrize("pattern", [r"\p{N}{1,3}+", r"\p{N}{2}+", r"\s+$", 5, "("])
def test_patterns_that_are_read_otherwise(tmp_path, pattern):
    (tmp_path / "own.tiktoken").write_bytes(lines(ranks()))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pat_str": pattern}))
    with pytest.raises(ConfigError, match="not read as tiktoken does|does not read|must be a pattern|can't be used"):
        JsonTokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"YQ== 0\nYg==\n", r"own.tiktoken:2: b'Yg==' is no base64 and rank"),
        (b"YQ== 0\n\nYg= 1\n", r"own.tiktoken:3: b'Yg= 1'"),
        (b"YQ== 0\nYg== 1\n", r"has 2 ranks, and nothing says .* Llama 3 \(128000\)"),
    ],
)
def test_garbled_ranks(tmp_path, content, problem):
    (tmp_path / "own.tiktoken").write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        JsonTokenizer(tmp_path)


def test_ranks_that_can_not_be_used(tmp_path):
    file = tmp_path / "own.tiktoken"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pat_str": QWEN_CUT}))
    all_bytes = {bytes([byte]): byte for byte in range(256)}
    file.write_bytes(lines({token: number for token, number in all_bytes.items() if number != 7}))
    with pytest.raises(ConfigError, match="no rank for the byte 7"):
        JsonTokenizer(file)
    file.write_bytes(lines(all_bytes | {b"ab": 255}))
    with pytest.raises(ConfigError, match="1 ids twice"):
        JsonTokenizer(file)
    added = {"added_tokens_decoder": {"255": {"content": "<end>"}}, "pat_str": QWEN_CUT}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(added))
    file.write_bytes(lines(all_bytes))
    with pytest.raises(ConfigError, match="1 ids twice"):
        JsonTokenizer(file)


@pytest.mark.parametrize("changes", [{"config": {}}, {"vocab": [{"rank": 0}]}, {"config": 5}])
def test_garbled_tekken(tmp_path, changes):
    with pytest.raises(ConfigError, match="is no tekken.json that can be read"):
        read_tekken(write_tekken(tmp_path, **changes) / "tekken.json")
