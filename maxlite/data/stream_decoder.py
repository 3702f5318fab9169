"""Text of a tokenizer.json's tokens as they come, by any of the ways in which such a file says that text is made."""

import codecs
import json
import re
from collections.abc import Callable, Iterable
from functools import cache

import tokenizers

from maxlite.data.tokenizer_files import byte_characters

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class JsonStreamDecoder:
    """Decodes ids as they come; what it returns, joined, is what JsonTokenizer.decode gives for all of them.

    Ids are held back while later ones may change their text. The others are decoded together with an id or a few
    that stood before them, whose text is then cut off: this is enough to be no longer at the text's start.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, with_text: Callable[[Iterable[int]], list[int]], after: list[int]
    ) -> None:
        """Starts with nothing held back."""
        self._backend, self._with_text = backend, with_text
        kinds = _decoder_kinds(backend)
        self._is_whole_after = _build_boundary(kinds)
        self._held: list[int] = []
        if "ByteFallback" in kinds:
            after = _without_last_bytes(backend, after)
        self._before, self._before_text = _last_with_text(backend, after)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text that is certain by now, and holds back what an unfinished character may be part of."""
        text = ""
        for token in self._with_text(ids):
            self._held.append(token)
            if self._is_whole_after(self._backend.id_to_token(token) or ""):
                text += self.finish()
        return text

    def finish(self) -> str:
        """Returns the text of what was held back, as it is without any more ids."""
        if not self._held:
            return ""
        ids, self._held = self._before + self._held, []
        text = self._backend.decode(ids)[len(self._before_text) :]
        self._before, self._before_text = _last_with_text(self._backend, ids)
        return text


def _last_with_text(backend: tokenizers.Tokenizer, ids: list[int]) -> tuple[list[int], str]:
    """Returns the shortest end of `ids` that has text by itself, all ids if none has, and its text."""
    for size in range(1, len(ids)):
        text = backend.decode(ids[-size:])
        if text:
            return ids[-size:], text
    return ids, backend.decode(ids)


def _without_last_bytes(backend: tokenizers.Tokenizer, ids: list[int]) -> list[int]:
    """Returns `ids` up to the last that is no byte: bytes that follow would be read as one run with those before."""
    size = len(ids)
    while size and _is_byte(backend.id_to_token(ids[size - 1])):
        size -= 1
    return ids[:size] or ids


def _build_boundary(kinds: frozenset[str]) -> Callable[[str], bool]:
    """Returns a function of each token of a stream in turn: whether the text up to it is certain."""
    if "ByteLevel" in kinds:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

        def is_whole_after(token: str) -> bool:
            decoder.decode(_byte_level_bytes(token))
            return not decoder.getstate()[0]

        return is_whole_after
    if "ByteFallback" in kinds:
        # One byte that is no part of a character makes its whole run of bytes unreadable.
        return lambda token: not _is_byte(token)
    return lambda token: True


def _is_byte(token: str | None) -> bool:
    return token is not None and _BYTE_TOKEN.fullmatch(token) is not None


def _decoder_kinds(backend: tokenizers.Tokenizer) -> frozenset[str]:
    """Returns the types of the steps that make text of tokens."""
    if backend.decoder is None:
        return frozenset()
    decoder = json.loads(backend.decoder.__getstate__())
    return frozenset(step["type"] for step in decoder.get("decoders", [decoder]))


@cache
def _byte_level_alphabet() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_characters())}


def _byte_level_bytes(token: str) -> bytes:
    alphabet = _byte_level_alphabet()
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()
