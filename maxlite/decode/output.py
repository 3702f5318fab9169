"""Shows continuations as they grow: text as it comes, or one JSON object a finished prompt."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import TextIO

from maxlite.data.tokenizer import StreamDecoder, Tokenizer
from maxlite.decode.prompts import Prompt

# Bytes that a terminal would obey (escape sequences, bells) are not the model's to send.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Returns `text` with control characters, but for line breaks and tabs, replaced by U+FFFD."""
    return text.translate(_CONTROLS)


@dataclasses.dataclass
class Continuation:
    """A prompt, its new tokens so far without the end token, and why they ended: eos, length, or None: not yet."""

    prompt: Prompt
    ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None

    def text(self, tokenizer: Tokenizer) -> str:
        """Returns the text of the new tokens as it follows the prompt's."""
        decoder = tokenizer.build_stream_decoder(self.prompt.ids)
        return decoder.decode(self.ids) + decoder.finish()


class JsonWriter:
    """Prints one object a line for each finished prompt, in the order of the prompts."""

    def __init__(self, stream: TextIO, tokenizer: Tokenizer | None) -> None:
        """Nothing is printed yet."""
        self._stream, self._tokenizer, self._done = stream, tokenizer, 0

    def update(self, continuations: Sequence[Continuation]) -> None:
        """Prints the prompts that have finished since the last call and have none unfinished before them."""
        while self._done < len(continuations) and continuations[self._done].finish_reason is not None:
            row = continuations[self._done]
            record = {
                "prompt": row.prompt.text,
                "prompt_ids": row.prompt.ids,
                "ids": row.ids,
                "text": None if self._tokenizer is None else row.text(self._tokenizer),
                "finish_reason": row.finish_reason,
            }
            print(json.dumps(record), file=self._stream, flush=True)
            self._done += 1


class TextWriter:
    """Prints each prompt and its new text as it comes; the prompts grow together, but are shown one after another.

    Without a tokenizer it prints ids.
    """

    def __init__(self, stream: TextIO, tokenizer: Tokenizer | None) -> None:
        """Nothing is printed yet."""
        self._stream, self._tokenizer = stream, tokenizer
        self._row, self._shown = 0, 0
        self._decoder: StreamDecoder | None = None

    def update(self, continuations: Sequence[Continuation]) -> None:
        """Prints what is new of the first unfinished prompt and of those finished before it."""
        while self._row < len(continuations):
            row = continuations[self._row]
            if self._decoder is None:
                self._decoder = self._begin(row, len(continuations))
            self._print(self._decoder.decode(row.ids[self._shown :]))
            self._shown = len(row.ids)
            if row.finish_reason is None:
                break
            self._print(self._decoder.finish() + "\n")
            self._decoder, self._row, self._shown = None, self._row + 1, 0
        self._stream.flush()

    def _begin(self, row: Continuation, num_prompts: int) -> StreamDecoder:
        if num_prompts > 1:
            self._print(f"--- prompt {self._row + 1} of {num_prompts} ---\n")
        if self._tokenizer is None:
            decoder = _IdDecoder()
            self._print(decoder.decode(row.prompt.ids) + " ->")
            return decoder
        self._print(row.prompt.text or "")
        return self._tokenizer.build_stream_decoder(row.prompt.ids)

    def _print(self, text: str) -> None:
        self._stream.write(printable(text))


class _IdDecoder:
    """Shows ids as numbers, where there is no tokenizer."""

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(f" {token}" for token in ids)

    def finish(self) -> str:
        return ""
