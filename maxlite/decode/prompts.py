"""What decoding goes on from: text or ids, from the config or from a file, as checked lists of ids."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from maxlite.config.schema import DecodeConfig
from maxlite.data.tokenizer import Tokenizer, check_vocabulary
from maxlite.errors import ConfigError, DataError, MaxliteError


@dataclasses.dataclass(frozen=True)
class Prompt:
    """text: as given, or decoded from the ids; None without a tokenizer. ids: at least one, marks included."""

    text: str | None
    ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Reading:
    """What every prompt is checked against. where: begins each message; error: what is raised."""

    tokenizer: Tokenizer | None
    add_bos: bool
    vocab_size: int
    where: str
    error: type[MaxliteError]

    def from_text(self, text: str) -> Prompt:
        if self.tokenizer is None:
            raise self.error(
                f"{self.where}: the prompt is text, but this model has no tokenizer; give token ids, for example "
                "prompt_ids=5,9,33, or tokenizer_path=."
            )
        try:
            ids = self.tokenizer.encode_prompt(text) if self.add_bos else self.tokenizer.encode(text)
        except DataError as error:
            raise self.error(f"{self.where}: {error}") from error
        return Prompt(text, self._checked(ids))

    def from_ids(self, ids: list[Any]) -> Prompt:
        wrong = next((token for token in ids if not isinstance(token, int) or isinstance(token, bool)), None)
        if wrong is not None:
            raise self.error(f"{self.where}: {wrong!r} is not a token id; ids are whole numbers, as in 5,9,33.")
        checked = self._checked(ids)
        return Prompt(None if self.tokenizer is None else self.tokenizer.decode(checked), checked)

    def _checked(self, ids: list[int]) -> tuple[int, ...]:
        if not ids:
            raise self.error(f"{self.where}: the prompt is empty; give at least one token.")
        outside = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            raise self.error(
                f"{self.where}: token id {outside} is outside 0..{self.vocab_size - 1} (vocab_size={self.vocab_size})."
            )
        return tuple(ids)


def read_prompts(decode: DecodeConfig, tokenizer: Tokenizer | None, *, add_bos: bool, vocab_size: int) -> list[Prompt]:
    """Returns the prompts of prompt_ids, of prompt_file or of prompt, in this order of preference; at least one.

    add_bos: text gets the marks that the tokenizer puts around a prompt; ids are as given.

    Raises:
        ConfigError: a key holds no prompt that this model can take, or the tokenizer is not for its vocabulary.
        DataError: the file is unreadable or empty, or a line of it is no such prompt; names file and line.
    """
    if tokenizer is not None:
        check_vocabulary(tokenizer, vocab_size)
    reading = _Reading(tokenizer, add_bos, vocab_size, "", ConfigError)
    if decode.prompt_ids is not None:
        reading = dataclasses.replace(reading, where=f"prompt_ids={decode.prompt_ids}")
        return [reading.from_ids(_split_ids(part, reading)) for part in decode.prompt_ids.split(";")]
    if decode.prompt_file is not None:
        lines = _read_lines(Path(decode.prompt_file))
        return [
            _from_line(line, dataclasses.replace(reading, where=f"{decode.prompt_file}:{number}", error=DataError))
            for number, line in enumerate(lines, 1)
        ]
    return [dataclasses.replace(reading, where=f"prompt={decode.prompt!r}").from_text(decode.prompt)]


def _split_ids(text: str, reading: _Reading) -> list[Any]:
    # What is no number stays text, for the message that shows it.
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    return [int(part) if part.removeprefix("-").isdecimal() and len(part) < 20 else part for part in parts]


def _read_lines(file: Path) -> list[str]:
    try:
        # Not splitlines: it also cuts at form feeds and at U+2028, which may stand inside a prompt.
        lines = file.expanduser().read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(f"prompt_file={file} can't be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"prompt_file={file} is not UTF-8 text (byte {error.start}).") from error
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise DataError(f"prompt_file={file} is empty; write one prompt a line.")
    return lines


def _from_line(line: str, reading: _Reading) -> Prompt:
    if not line.strip():
        raise DataError(f'{reading.where}: the prompt is empty; take the line out, or write {{"prompt": ""}}.')
    if not line.startswith("{"):
        return reading.from_text(line)
    try:
        row = json.loads(line)
    except (RecursionError, ValueError) as error:
        if not isinstance(error, json.JSONDecodeError):
            raise DataError(f"{reading.where}: JSON that is nested too deeply or holds too long a number.") from error
        raise DataError(
            f"{reading.where}: a line that begins with {{ is read as JSON, and this is none ({error.msg} at character "
            f'{error.pos + 1}); text that begins so is written {{"prompt": "..."}}.'
        ) from error
    given = [name for name in ("prompt", "prompt_ids") if name in row]
    if len(given) != 1:
        found = "both" if given else f"neither, only {', '.join(row) or 'nothing'}"
        raise DataError(f"{reading.where}: an object needs prompt or prompt_ids, and this one has {found}.")
    value = row[given[0]]
    wanted: type = str if given == ["prompt"] else list
    if not isinstance(value, wanted):
        kind = "text" if wanted is str else "a list of token ids"
        raise DataError(f"{reading.where}: {given[0]} must be {kind}, not {json.dumps(value)}.")
    return reading.from_text(value) if wanted is str else reading.from_ids(value)
