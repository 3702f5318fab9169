"""Bytes are ids, marks have no text, and streaming gives what decoding at once gives."""

import pytest

from maxlite.data.tokenizer_bytes import ByteTokenizer
from maxlite.errors import DataError

TEXT = "def f(): return 'äöü €uro 🐍 日本'\n"


def test_round_trip_without_marks() -> None:
    """Encode gives the UTF-8 bytes and decode gives the text back."""
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(TEXT)
    assert ids == list(TEXT.encode("utf-8"))
    assert tokenizer.decode(ids) == TEXT


def test_marks_are_above_the_bytes() -> None:
    """The three constants are a contract with checkpoints."""
    assert (ByteTokenizer.bos_id, ByteTokenizer.eos_id, ByteTokenizer.vocab_size) == (256, 257, 258)


def test_decode_skips_marks_and_padding_ids_and_replaces_broken_bytes() -> None:
    """A model with a larger vocabulary may draw any id."""
    assert ByteTokenizer().decode([256, 97, 300, 0xFF, 98, 257]) == "a\ufffdb"


@pytest.mark.parametrize("ids", [list(TEXT.encode()), [0xE2, 0x82], [97, 0xF0, 256, 0x9F, 0x90, 0x8D, 257], [0xFF, 97]])
def test_streaming_equals_decoding_at_once(ids: list[int]) -> None:
    """Whatever the pieces, the joined text is the same."""
    tokenizer = ByteTokenizer()
    decoder = tokenizer.build_stream_decoder()
    streamed = "".join(decoder.decode([token]) for token in ids) + decoder.finish()
    assert streamed == tokenizer.decode(ids)


def test_streaming_holds_back_an_unfinished_character() -> None:
    """Half a character is not shown as a replacement sign."""
    decoder = ByteTokenizer().build_stream_decoder()
    first, second, third = "€".encode()
    assert [decoder.decode([first]), decoder.decode([second]), decoder.decode([third])] == ["", "", "€"]
    assert decoder.finish() == ""


def test_lone_surrogate_is_an_error() -> None:
    """It has no UTF-8; the message says where it is."""
    with pytest.raises(DataError, match="character 2"):
        ByteTokenizer().encode("ab\ud800")


def test_prompt_begins_with_the_mark() -> None:
    """And the end mark alone ends a continuation."""
    tokenizer = ByteTokenizer()
    assert tokenizer.encode_prompt("a") == [256, 97]
    assert tokenizer.end_ids == (257,)


def test_batches_and_where_bytes_start() -> None:
    """Every byte starts where its character does."""
    tokenizer = ByteTokenizer()
    assert [list(ids) for ids in tokenizer.encode_batch(["ab", "", "é"])] == [[97, 98], [], [0xC3, 0xA9]]
    assert tokenizer.encode_batch_with_starts(["ab", "", "é🐍a"]) == [
        ([97, 98], [0, 1]),
        ([], []),
        (list("é🐍a".encode()), [0, 0, 1, 1, 1, 1, 2]),
    ]
    for encode in (tokenizer.encode_batch, tokenizer.encode_batch_with_starts):
        with pytest.raises(DataError, match="character 1"):
            encode(["a", "b\ud800"])


def test_there_is_one_byte_tokenizer() -> None:
    """And it has no words for its marks."""
    assert ByteTokenizer().digest == ByteTokenizer().digest
    assert (ByteTokenizer().chat_template, ByteTokenizer().special_names) == (None, {})
