"""Rows become examples: text is cut into tokens, many texts at once, and what is trained is marked token by token."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from maxlite.config.schema import DataConfig
from maxlite.data.chat_template import CharacterSpan
from maxlite.data.readers import TEXT
from maxlite.data.rows import BadRow, Example, Row
from maxlite.data.sft import Passage, RowError, SftReader, kind_of, missing_column
from maxlite.data.tokenizer import Tokenizer
from maxlite.errors import ConfigError, DataError

# Characters that are encoded at once, by all cores; their encodings need far more memory than the tokens.
BATCH_CHARACTERS = 4_000_000
DEFAULT_ID_COLUMNS = ("input_ids", "loss_mask")


class Encoder(Protocol):
    """Makes an Example of each row, or a BadRow that says why not, in their order."""

    def __call__(self, rows: Sequence[Row]) -> list[Example | BadRow]:
        """Returns as many as there are rows.

        Raises DataError for a token that the model does not have and for a chat template that hides who says what,
        ConfigError for rows that need a setting which is not there.
        """
        ...


def build_encoder(data: DataConfig, tokenizer: Tokenizer | None, vocab_size: int) -> Encoder:
    """Returns the encoder that objective, tokenize_train_data and train_data_columns ask for.

    vocab_size: rows of the model's embedding. tokenizer: may be None if rows hold ids.
    Raises ConfigError for keys that do not go together, and for a tokenizer without what they need.
    """
    if not data.tokenize_train_data:
        return IdsEncoder(_id_columns(data), vocab_size)
    assert tokenizer is not None, "only random tokens have no tokenizer"
    if data.objective == "sft":
        # Whether rows need an end mark shows only when they come, unless the columns say so.
        needs_marks = data.train_data_columns is not None and len(data.train_data_columns) == 2
        reader = SftReader(data, tokenizer).read
    else:
        needs_marks = True
        reader = _text_reader(data)
    encoder = TextEncoder(reader, data, tokenizer, vocab_size)
    if needs_marks:
        encoder.check_marks()
    return encoder


class TextEncoder:
    """Rows of text or of conversations, as what reads them makes them a Passage.

    add_bos gives a begin mark to a tokenizer that puts one itself, add_eos always gives an end mark; text without
    any token gets neither. An end mark is trained, a begin mark only where all is.
    """

    def __init__(self, read: Callable[[Row], Passage], data: DataConfig, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Takes `read`, which raises RowError for a row that it cannot read."""
        self._read = read
        self._data = data
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._first = _mark(tokenizer.bos_id if data.add_bos else None)
        self._last = _mark(tokenizer.eos_id if data.add_eos else None)

    def check_marks(self) -> None:
        """Raises ConfigError if there is no end mark to give."""
        if self._data.add_eos and self._last.size == 0:
            raise ConfigError(
                f"add_eos=true, but the tokenizer of {self._data.tokenizer_path} has no end mark; set add_eos=false."
            )

    def __call__(self, rows: Sequence[Row]) -> list[Example | BadRow]:
        """Returns the examples of `rows`; see Encoder."""
        found: list[Example | BadRow] = []
        for batch in self._batches(rows):
            good = [(row, passage) for row, passage in batch if isinstance(passage, Passage)]
            examples = iter(self._encode(good))
            found += [passage if isinstance(passage, BadRow) else next(examples) for _, passage in batch]
        return found

    def _batches(self, rows: Sequence[Row]) -> Iterator[list[tuple[Row, Passage | BadRow]]]:
        batch: list[tuple[Row, Passage | BadRow]] = []
        num_characters = 0
        for row in rows:
            passage = self._passage(row)
            batch.append((row, passage))
            num_characters += len(passage.text) if isinstance(passage, Passage) else 0
            if num_characters >= BATCH_CHARACTERS:
                yield batch
                batch, num_characters = [], 0
        yield batch

    def _passage(self, row: Row) -> Passage | BadRow:
        try:
            passage = self._read(row)
            passage.text.encode("utf-8")
        except RowError as error:
            return BadRow(row.where, str(error))
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            return BadRow(row.where, f"{half!r} is half of a surrogate pair, which is no character")
        if not passage.has_marks:
            self.check_marks()
        return passage

    def _encode(self, good: Sequence[tuple[Row, Passage]]) -> Iterator[Example]:
        whole = [passage.text for _, passage in good if passage.spans is None]
        cut = [passage.text for _, passage in good if passage.spans is not None]
        whole_ids = iter(self._tokenizer.encode_batch(whole) if whole else [])
        cut_ids = iter(self._tokenizer.encode_batch_with_starts(cut) if cut else [])
        for row, passage in good:
            trained = None
            if passage.spans is None:
                ids = next(whole_ids)
            else:
                ids, starts = next(cut_ids)
                trained = trained_tokens(passage.text, starts, passage.spans)
            yield self._example(row, ids, trained, has_marks=passage.has_marks)

    def _example(self, row: Row, ids: Sequence[int], trained: np.ndarray | None, has_marks: bool) -> Example:
        # Bytes are numbers already; a list of them would cost more than all the rest.
        tokens = np.asarray(np.frombuffer(ids, np.uint8) if isinstance(ids, bytes) else ids, np.int32)
        if not has_marks and tokens.size:
            tokens = np.concatenate([self._first, tokens, self._last], dtype=np.int32)
            if trained is not None:
                trained = np.concatenate([np.zeros(len(self._first), bool), trained, np.ones(len(self._last), bool)])
        if tokens.size and tokens.max() >= self._vocab_size:
            token = int(tokens.max())
            raise DataError(
                f"{row.where} holds {self._tokenizer.written(token)!r}, token {token} of "
                f"tokenizer_path={self._data.tokenizer_path}, but the model's vocab_size={self._vocab_size} has no row "
                "for it. Take it out of the text or make vocab_size larger."
            )
        return Example(tokens, trained)


class IdsEncoder:
    """Rows that hold token ids, marks included: nothing is put around them."""

    def __init__(self, columns: Sequence[str], vocab_size: int) -> None:
        """Takes the column of ids and, if there are two, that of which of them are trained."""
        self._columns = columns
        self._vocab_size = vocab_size

    def __call__(self, rows: Sequence[Row]) -> list[Example | BadRow]:
        """Returns the examples of `rows`; see Encoder."""
        return [self._example(row) for row in rows]

    def _example(self, row: Row) -> Example | BadRow:
        try:
            tokens = _whole_numbers(row, self._columns[0])
            masks = [_whole_numbers(row, column, (int, bool)) for column in self._columns[1:]]
            outside = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
            if outside.size:
                raise RowError(f"{self._columns[0]} holds {outside[0]}, not an id from 0 to {self._vocab_size - 1}")
            for mask in masks:
                if mask.shape != tokens.shape or not np.isin(mask, (0, 1)).all():
                    raise RowError(f"{self._columns[1]} is not one 0 or 1 for each of {len(tokens)} ids")
        except RowError as error:
            return BadRow(row.where, str(error))
        return Example(tokens.astype(np.int32), masks[0].astype(bool) if masks else None)


def trained_tokens(text: str, starts: Sequence[int], spans: Sequence[CharacterSpan]) -> np.ndarray:
    """Says of each token whether it is trained: bool [n].

    starts: the characters of `text` where tokens start, never falling. A token that begins before a span and goes on
    into it is trained if it holds more of the span than space: " Yes" behind "Answer: " is what the model is to say,
    while space between two words may belong to no token at all.
    """
    begins = np.array(starts, np.int64)
    trained = np.zeros(len(begins), bool)
    for start, end in spans:
        first, last = np.searchsorted(begins, (start, end))
        next_begin = begins[first] if first < len(begins) else len(text)
        if first and text[start : min(next_begin, end)].strip():
            # Several tokens may make up one character, and then start where it does.
            first = np.searchsorted(begins, begins[first - 1])
        trained[first:last] = True
    return trained


def _mark(token: int | None) -> np.ndarray:
    return np.array([] if token is None else [token], np.int32)


def _text_reader(data: DataConfig) -> Callable[[Row], Passage]:
    column = _only_column(data, TEXT)

    def read(row: Row) -> Passage:
        if column not in row.fields:
            raise RowError(missing_column(column, row))
        text = row.fields[column]
        if not isinstance(text, str):
            raise RowError(f"{column} is {kind_of(text)}, not text")
        return Passage(text, None, has_marks=False)

    return read


def _only_column(data: DataConfig, default: str) -> str:
    columns = [*(data.train_data_columns or (default,))]
    if len(columns) > 1:
        raise ConfigError(
            f"train_data_columns={','.join(columns)} has {len(columns)} columns; objective=pretrain reads one. "
            "Name one, or set objective=sft for a prompt and its completion."
        )
    return columns[0]


def _id_columns(data: DataConfig) -> tuple[str, ...]:
    if data.objective == "pretrain":
        return (_only_column(data, DEFAULT_ID_COLUMNS[0]),)
    num_columns = 2 if data.sft_train_on_completion_only else 1
    columns = data.train_data_columns or DEFAULT_ID_COLUMNS[:num_columns]
    if len(columns) != num_columns:
        raise ConfigError(
            f"train_data_columns={','.join(columns)} has {len(columns)} columns; objective=sft with "
            "tokenize_train_data=false reads two, the ids and a 0 or 1 for each that says whether it is trained, or "
            "with sft_train_on_completion_only=false the ids alone."
        )
    return columns


def _whole_numbers(row: Row, column: str, types: tuple[type, ...] = (int,)) -> np.ndarray:
    """Returns a column's whole numbers [n], of a dtype that holds them."""
    if column not in row.fields:
        raise RowError(missing_column(column, row))
    value = row.fields[column]
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list):
        raise RowError(f"{column} is {kind_of(value)}, not a list of whole numbers")
    for item in value:
        if type(item) not in types:
            raise RowError(f"{column} holds {kind_of(item)}, not only whole numbers")
    return np.array(value, None if value else np.int64)
