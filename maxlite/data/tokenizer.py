"""Between text and token ids: what every tokenizer can do, and which one a config means."""

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from maxlite.config.schema import DataConfig
from maxlite.data.model_folder import tokenizer_file
from maxlite.data.tokenizer_bytes import ByteTokenizer
from maxlite.data.tokenizer_json import JsonTokenizer
from maxlite.errors import ConfigError


class StreamDecoder(Protocol):
    """Makes text of ids that arrive a few at a time."""

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text that is certain by now."""
        ...

    def finish(self) -> str:
        """Returns the rest, when no more ids come."""
        ...


class Tokenizer(Protocol):
    """Between text and ids.

    bos_id, eos_id: the marks that begin and end a document; None where the tokenizer has none.
    end_ids: the ids that end a continuation.
    vocab_size: the rows that a model needs for every text and for both marks.
    digest: what tokenizers have in common that make the same ids of every text, and the same marks.
    chat_template: the Jinja text by which a chat is written; None where the tokenizer has none.
    special_names: the tokens that such a text may name, such as bos_token.
    """

    @property
    def bos_id(self) -> int | None: ...  # noqa: D102

    @property
    def eos_id(self) -> int | None: ...  # noqa: D102

    @property
    def end_ids(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def vocab_size(self) -> int: ...  # noqa: D102

    @property
    def digest(self) -> str: ...  # noqa: D102

    @property
    def chat_template(self) -> str | None: ...  # noqa: D102

    @property
    def special_names(self) -> dict[str, str]: ...  # noqa: D102

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text` without marks; raises DataError for a lone surrogate."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of `text` with the marks that a model wants before it goes on; raises as `encode`."""
        ...

    def encode_batch(self, texts: list[str]) -> Sequence[Sequence[int]]:
        """Returns the ids of each text; raises as `encode`."""
        ...

    def encode_batch_with_starts(self, texts: list[str]) -> list[tuple[list[int], list[int]]]:
        """Returns the ids of each text, and for each id the character where it starts; raises as `encode`."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; marks have none."""
        ...

    def written(self, token: int) -> str | None:
        """Returns how the vocabulary writes `token`, a mark too; None if it does not have it."""
        ...

    def build_stream_decoder(self, after: Iterable[int] = ()) -> StreamDecoder:
        """Returns a decoder for ids that stand after the ids `after`."""
        ...


def build_tokenizer(data: DataConfig) -> Tokenizer | None:
    """Returns the tokenizer of tokenizer_path, else bytes; None for data that is no text, without a tokenizer_path.

    Raises ConfigError where tokenizer_path has no tokenizer that can be read.
    """
    if data.tokenizer_path is not None:
        file = tokenizer_file(data.tokenizer_path)
        return _json_tokenizer(data.tokenizer_path, 0 if file is None else file.stat().st_mtime_ns)
    is_text = data.dataset_type != "synthetic" and data.tokenize_train_data
    return ByteTokenizer() if is_text else None


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ConfigError if the model's `vocab_size` is too small for the tokenizer; it may be larger."""
    if tokenizer.vocab_size > vocab_size:
        name = "byte tokenizer (256 bytes, a begin mark, an end mark)"
        if not isinstance(tokenizer, ByteTokenizer):
            name = "tokenizer of tokenizer_path"
        raise ConfigError(
            f"vocab_size={vocab_size} is smaller than the {tokenizer.vocab_size} of the {name}. "
            f"Set vocab_size to {tokenizer.vocab_size} or more, or give the tokenizer that belongs to the model."
        )


@functools.lru_cache(maxsize=1)
def _json_tokenizer(path: str, changed: int) -> JsonTokenizer:
    # A command asks for it in several places, and a large file takes half a second to read.
    del changed
    return JsonTokenizer(Path(path))
