"""SentencePiece models, against ids of the sentencepiece library: kept ones, and its own where it is installed."""

import json
import random
import struct
from pathlib import Path

import pytest

from maxlite.data.tokenizer_json import JsonTokenizer
from maxlite.errors import ConfigError

ASSETS = Path(__file__).resolve().parents[1] / "assets"
STORIES, SMALL = ASSETS / "stories260K", ASSETS / "tokenizers"
GOLDEN = json.loads((SMALL / "golden.json").read_text())


def texts() -> list[str]:
    """Prose, and random characters of many scripts."""
    prose = (STORIES / "README.md").read_text() + (STORIES / "LICENSE.llama2.c").read_text()
    source = random.Random(0)
    ranges = [(33, 127), (33, 127), (0xA0, 0x250), (0x370, 0x600), (0x4E00, 0x4F00), (0x1F300, 0x1F600), (32, 33)]
    mixed = ["".join(chr(source.randrange(*source.choice(ranges))) for _ in range(30)) for _ in range(100)]
    return [*prose.split("\n\n"), *mixed, "", "   ", " a  b ", "x\u3000\uff21\ufb01"]


@pytest.mark.parametrize("name", ["unigram", "bpe"])
def test_ids_and_text_are_those_of_the_library(name):
    """Also of words that are kept whole: no space comes before what follows one."""
    tokenizer = JsonTokenizer(SMALL / f"{name}.model")
    for golden in GOLDEN[name]:
        assert tokenizer.encode(golden["text"]) == golden["ids"], golden["text"]
        if golden["decoded"] is not None:
            assert tokenizer.decode(golden["ids"]) == golden["decoded"]


def test_a_published_model_is_its_tokenizer_json():
    model, published = JsonTokenizer(STORIES / "tokenizer.model"), JsonTokenizer(STORIES)
    for text in [*texts(), "</s>Once<s> upon", "<unk>"]:
        assert model.encode(text) == published.encode(text), text
        assert model.encode_prompt(text) == published.encode_prompt(text)
        assert model.decode(model.encode(text)) == published.decode(model.encode(text))
    for name in ("bos_id", "eos_id", "end_ids", "vocab_size", "special_names"):
        assert getattr(model, name) == getattr(published, name)


@pytest.mark.parametrize("file", [STORIES / "tokenizer.model", SMALL / "unigram.model", SMALL / "bpe.model"])
def test_the_library_agrees_about_many_texts(file):
    library = pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(file))
    tokenizer = JsonTokenizer(file)
    for text in texts():
        ids = library.encode(text)
        assert tokenizer.encode(text) == ids, text
        if library.unk_id() not in ids:
            assert tokenizer.decode(ids) == library.decode(ids)


def test_marks_are_those_of_the_model():
    """A prompt begins with the begin mark, where there is one; a mark that is written out is its one id."""
    unigram, bpe = JsonTokenizer(SMALL / "unigram.model"), JsonTokenizer(SMALL / "bpe.model")
    assert (unigram.bos_id, unigram.eos_id, unigram.end_ids, unigram.vocab_size) == (1, 2, (2,), 700)
    assert unigram.special_names == {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }
    assert unigram.encode_prompt("a") == [1, *unigram.encode("a")]
    assert unigram.encode("a</s>") == [*unigram.encode("a"), 2]
    assert (bpe.bos_id, bpe.eos_id) == (None, 2)
    assert bpe.encode_prompt("a") == bpe.encode("a")


def test_where_tokens_start():
    """In characters of the text as it was given, though other characters stand for it in the pieces."""
    tokenizer = JsonTokenizer(SMALL / "unigram.model")
    text = "\uff21\ufb01  e\u0301 \U0001f40d<sep>"
    ((ids, starts),) = tokenizer.encode_batch_with_starts([text])
    assert ids == tokenizer.encode(text)
    assert starts == sorted(starts) and starts[0] == 0
    snake = [place for token, place in zip(ids, starts, strict=True) if tokenizer.written(token) == "<0xF0>"]
    assert snake == [text.index("\U0001f40d")]
    assert starts[-1] == text.index("<sep>")


def write(folder: Path, settings: dict, name: str = "unigram") -> Path:
    (folder / "tokenizer.model").write_bytes((SMALL / f"{name}.model").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_settings_beside_a_model(tmp_path):
    """They say which marks a prompt has, which token is the end mark, and what tokens were added."""
    added = {
        "1": {"content": "<s>", "special": True},
        "700": {"content": "<end>", "special": True},
        "701": {"content": "<tool>", "special": False},
    }
    settings = {"add_bos_token": False, "add_eos_token": True, "eos_token": {"content": "<end>"}}
    for name in ("unigram", "bpe"):
        numbers = {str(int(number) - 100 * (name == "bpe")): about for number, about in added.items()}
        if name == "bpe":
            numbers = {number: about for number, about in numbers.items() if int(number) >= 600}
        plain = JsonTokenizer(SMALL / f"{name}.model")
        tokenizer = JsonTokenizer(write(tmp_path, settings | {"added_tokens_decoder": numbers}, name))
        end, tool = sorted(map(int, numbers))[-2:]
        assert tokenizer.bos_id is None and tokenizer.eos_id == end and tokenizer.vocab_size == tool + 1
        assert tokenizer.encode_prompt("a") == [*plain.encode("a"), end]
        assert tokenizer.encode("a<tool>b<end>") == [*plain.encode("a"), tool, plain.encode("<sep>b")[-1], end]
        assert tokenizer.decode([*plain.encode("a"), tool, end]) == "a<tool>"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"added_tokens_decoder": {"5": {"content": "<new>"}}}, r"'<new>' .* has the id 5, which is '\[a.b\]'"),
        ({"added_tokens_decoder": {"702": {"content": "<new>"}}}, "id 702, which is above the 700 there are"),
        ({"added_tokens_decoder": {"5": "<new>"}}, "the tokens that its files add can't be read"),
        ({"bos_token": "<begin>"}, "has no token '<begin>'"),
    ],
)
def test_settings_of_another_model(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        JsonTokenizer(write(tmp_path, settings))


def test_older_files_list_added_tokens(tmp_path):
    write(tmp_path, {"pad_token": "<fill>"})
    (tmp_path / "added_tokens.json").write_text('{"<fill>": 700}')
    tokenizer = JsonTokenizer(tmp_path)
    assert tokenizer.encode("<fill>")[-1] == 700
    assert tokenizer.decode([700]) == ""


def message(number: int, content: bytes) -> bytes:
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def piece(text: str, score: float, kind: int) -> bytes:
    return message(1, message(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([0x18, kind]))


UNKNOWN = piece("<unk>", 0, 2)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (UNKNOWN[:-1], "no SentencePiece model that can be read: field 1 is cut short"),
        (message(1, message(1, b"\xff")), "no SentencePiece model that can be read: 'utf-8'"),
        (UNKNOWN + b"\x10\x05", "no SentencePiece model that can be read: a message is the number 5"),
        (piece("a", -1, 1), "has no piece for what is unknown"),
        (UNKNOWN + message(3, b"\x12\x02ab"), "has a garbled tokenizer"),
        (UNKNOWN + message(2, b"\x18\x03"), r"is of type 3; known are Unigram \(1\) and BPE \(2\)"),
        (UNKNOWN + message(2, b"\xc0\x01\x01"), "treat_whitespace_as_suffix"),
        (UNKNOWN + piece("a", -1, 5) + message(2, b"\x18\x02"), r"pieces that are not used, such as \['a'\]"),
    ],
)
def test_models_that_are_refused(tmp_path, content, problem):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        JsonTokenizer(tmp_path)


def test_pieces_that_are_not_used_or_only_bytes_are_in_no_text(tmp_path):
    """Of a Unigram: the byte's name is text like any other, and an unused piece is as if it were not there."""
    pieces = [UNKNOWN, piece("<0x41>", 0, 6), piece("\u2581ab", -1, 5), piece("\u2581", -2, 1)]
    pieces += [piece(letter, -3, 1) for letter in "ab<0x41>"]
    (tmp_path / "m").write_bytes(b"".join(pieces))
    tokenizer = JsonTokenizer(tmp_path / "m")
    assert [tokenizer.written(token) for token in tokenizer.encode("ab<0x41>")] == list("\u2581ab<0x41>")


@pytest.mark.parametrize("name", ["unigram", "bpe"])
def test_text_of_ids_that_come_one_by_one(name):
    tokenizer = JsonTokenizer(SMALL / f"{name}.model")
    for golden in GOLDEN[name]:
        decoder = tokenizer.build_stream_decoder()
        streamed = "".join(decoder.decode([token]) for token in golden["ids"]) + decoder.finish()
        assert streamed == tokenizer.decode(golden["ids"])
