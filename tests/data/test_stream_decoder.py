"""Pieces of text join to what decoding at once gives, for every way in which a tokenizer makes text."""

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenizers

from maxlite.data.stream_decoder import JsonStreamDecoder
from maxlite.data.tokenizer_json import JsonTokenizer

STORIES = Path(__file__).resolve().parents[1] / "assets" / "stories260K"
TEXTS = ("hi hi 🐍 wörld\n\n日本語 a ab  b", " w1 w2 </s>w3", "<|im_start|>hi<think> ab", "\ufffd\n\ta b")
WriteTokenizer = Callable[..., Path]


def streamed(tokenizer: JsonTokenizer, ids: list[int], sizes: Iterable[int], after: Iterable[int] = ()) -> str:
    """Returns the joined pieces of `ids`, given a few at a time."""
    decoder, text, start = tokenizer.build_stream_decoder(after), "", 0
    for size in sizes:
        text += decoder.decode(ids[start : start + size])
        start += size
    assert start >= len(ids)
    return text + decoder.finish()


def random_ids(tokenizer: JsonTokenizer, source: random.Random) -> list[int]:
    """Returns the ids of a text, some of them replaced, or ids of no text at all."""
    if source.random() < 0.5:
        return [source.randrange(tokenizer.vocab_size + 2) for _ in range(source.randrange(1, 30))]
    ids = tokenizer.encode(source.choice(TEXTS) + source.choice(TEXTS))
    return [source.randrange(tokenizer.vocab_size) if source.random() < 0.1 else token for token in ids]


def test_pieces_join_to_the_whole(any_tokenizer: Path) -> None:
    """For texts and for what an untrained model draws: broken characters, special tokens, ids above the last."""
    tokenizer, source = JsonTokenizer(any_tokenizer), random.Random(0)
    for _ in range(200):
        ids = random_ids(tokenizer, source)
        sizes = [source.randrange(1, 5) for _ in ids]
        assert streamed(tokenizer, ids, sizes) == tokenizer.decode(ids), ids


def test_pieces_join_to_the_rest_of_a_whole(any_tokenizer: Path) -> None:
    """After a prompt, what comes is the text that the prompt's lacks: a first space is not lost."""
    tokenizer, source = JsonTokenizer(any_tokenizer), random.Random(1)
    for prompt in ("", "a", "w1", "hi a b", "ab"):
        after = tokenizer.encode_prompt(prompt)
        for _ in range(40):
            ids = random_ids(tokenizer, source)
            whole = tokenizer.decode([*after, *ids])
            assert tokenizer.decode(after) + streamed(tokenizer, ids, [len(ids)], after) == whole, (prompt, ids)


def test_an_unfinished_character_is_held_back(write_tokenizer: WriteTokenizer) -> None:
    """The snake is four bytes in three tokens here."""
    tokenizer = JsonTokenizer(write_tokenizer("byte_level"))
    ids = tokenizer.encode("hi🐍")
    assert len(ids) == 4
    decoder = tokenizer.build_stream_decoder()
    assert [decoder.decode([token]) for token in ids] == ["hi", "", "", "🐍"]
    assert decoder.decode(ids[1:2]) == "" and decoder.finish() == "\ufffd"


def test_a_run_of_bytes_is_held_back() -> None:
    """In a Llama 2 file one byte that is no part of a character makes all of its run unreadable."""
    tokenizer = JsonTokenizer(STORIES)
    run = [3 + byte for byte in "é".encode()]
    decoder = tokenizer.build_stream_decoder()
    assert [decoder.decode([token]) for token in (*run, 403)] == ["", "", "é Once"]
    decoder = tokenizer.build_stream_decoder(tokenizer.encode_prompt("a\n"))
    assert decoder.decode([*run, 3 + 0xFF]) == "" and decoder.finish() == "\ufffd" * 3


class CountingBackend:
    """A tokenizer that counts the ids that it decodes."""

    def __init__(self, file: Path) -> None:
        self._backend = tokenizers.Tokenizer.from_file(str(file))
        self.decoder = self._backend.decoder
        self.id_to_token = self._backend.id_to_token
        self.num_decoded = 0

    def decode(self, ids: list[int]) -> str:
        self.num_decoded += len(ids)
        return self._backend.decode(ids)


def test_the_cost_is_linear(any_tokenizer: Path) -> None:
    """Whatever repeats, every id is decoded a few times and not once more for each that follows."""
    tokenizer = JsonTokenizer(any_tokenizer)
    for token in {*tokenizer.encode(TEXTS[0]), *tokenizer.encode("\ufffd    ")}:
        backend: Any = CountingBackend(any_tokenizer / "tokenizer.json")
        decoder = JsonStreamDecoder(backend, list, [token] * 3)
        for _ in range(300):
            decoder.decode([token])
        decoder.finish()
        assert backend.num_decoded < 300 * 10, token
