"""The byte-level tokenizer: a token is a byte of UTF-8, so every text has ids and nothing needs downloading."""

import codecs
from collections.abc import Iterable, Sequence

from maxlite.errors import DataError

NUM_BYTES = 256


class ByteTokenizer:
    """Ids 0..255 are bytes; above them stand the begin mark and the end mark."""

    bos_id = NUM_BYTES
    eos_id = NUM_BYTES + 1
    vocab_size = NUM_BYTES + 2
    digest = f"bytes, {bos_id}, {eos_id}"
    chat_template = None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The end mark alone."""
        return (self.eos_id,)

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of `text` as ids, without marks.

        Raises DataError for a lone surrogate, which UTF-8 cannot hold.
        """
        return list(utf8_bytes(text))

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the begin mark and the bytes of `text`; raises as `encode`."""
        return [self.bos_id, *self.encode(text)]

    def encode_batch(self, texts: list[str]) -> list[Sequence[int]]:
        """Returns the bytes of each text, which are its ids; raises as `encode`."""
        return [utf8_bytes(text) for text in texts]

    def encode_batch_with_starts(self, texts: list[str]) -> list[tuple[list[int], list[int]]]:
        """Returns the bytes of each text, as `encode` does, and for each byte the place of its character."""
        return [(self.encode(text), _starts(text)) for text in texts]

    @property
    def special_names(self) -> dict[str, str]:
        """No token has a name that can be written."""
        return {}

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; marks and ids above them have none, broken UTF-8 becomes U+FFFD."""
        return _text_bytes(ids).decode("utf-8", errors="replace")

    def written(self, token: int) -> str | None:
        """Returns the text of a byte or the name of a mark; None above them."""
        return {self.bos_id: "<begin>", self.eos_id: "<end>"}.get(token) or self.decode([token]) or None

    def build_stream_decoder(self, after: Iterable[int] = ()) -> "ByteStreamDecoder":
        """Returns a decoder for ids that arrive a few at a time; a byte has the same text after any other."""
        del after
        return ByteStreamDecoder()


class ByteStreamDecoder:
    """Decodes ids as they come; what it returns, joined, is what ByteTokenizer.decode gives for all of them."""

    def __init__(self) -> None:
        """Starts with nothing held back."""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text that is certain by now, and holds back the bytes of an unfinished character."""
        return self._decoder.decode(_text_bytes(ids))

    def finish(self) -> str:
        """Returns U+FFFD for a character that never ended, otherwise nothing."""
        return self._decoder.decode(b"", final=True)


def utf8_bytes(text: str) -> bytes:
    """Returns `text` in UTF-8; raises DataError for a lone surrogate, which it cannot hold."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"The text has {text[error.start]!r} at character {error.start}: half of a surrogate pair, which is "
            "not a character. Take it out or write the whole character."
        ) from error


def _text_bytes(ids: Iterable[int]) -> bytes:
    return bytes(token for token in ids if token < NUM_BYTES)


def _starts(text: str) -> list[int]:
    if text.isascii():
        return list(range(len(text)))
    return [place for place, character in enumerate(text) for _ in character.encode("utf-8")]
