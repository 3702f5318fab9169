"""Turns documents into tokens under a tokenizer that has to see a document whole, before training begins."""

from collections.abc import Iterator, Sequence

import numpy as np

from maxlite.config.schema import DataConfig
from maxlite.data.documents import Document, read_bytes
from maxlite.data.tokenizer_json import JsonTokenizer
from maxlite.errors import ConfigError, DataError

# Text that is encoded at once, by all cores; its encodings need far more memory than its tokens.
BATCH_BYTES = 4_000_000


def document_tokens(
    documents: Sequence[Document], tokenizer: JsonTokenizer, data: DataConfig, vocab_size: int
) -> Iterator[np.ndarray | None]:
    """Yields the tokens of each document, int32 [n], with the marks that `data` asks for; None if it is not UTF-8.

    add_bos gives a begin mark to a tokenizer that puts one itself; add_eos always gives an end mark.

    Raises ConfigError if there is no end mark to give, DataError for a file that changed or for a token that the
    model does not have.
    """
    if data.add_eos and tokenizer.eos_id is None:
        raise ConfigError(
            f"add_eos=true, but the tokenizer of {data.tokenizer_path} has no end mark; set add_eos=false."
        )
    first = [tokenizer.bos_id] if data.add_bos and tokenizer.bos_id is not None else []
    last = [tokenizer.eos_id] if data.add_eos else []
    for batch in _batches(documents):
        texts = [_read_text(document) for document in batch]
        encoded = iter(tokenizer.encode_batch([text for text in texts if text is not None]))
        for document, text in zip(batch, texts, strict=True):
            if text is None:
                yield None
                continue
            ids = next(encoded)
            tokens = np.array([*first, *ids, *last], np.int32)
            if tokens.size and tokens.max() >= vocab_size:
                raise DataError(
                    f"{document.path} holds {tokenizer.written(int(tokens.max()))!r}, token {tokens.max()} of "
                    f"tokenizer_path={data.tokenizer_path}, but the model's vocab_size={vocab_size} has no row for it. "
                    "Take it out of the text or make vocab_size larger."
                )
            yield tokens


def _batches(documents: Sequence[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_bytes = 0
    for document in documents:
        if batch and num_bytes + document.num_bytes > BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(document)
        num_bytes += document.num_bytes
    if batch:
        yield batch


def _read_text(document: Document) -> str | None:
    try:
        return read_bytes(document, 0, document.num_bytes).decode("utf-8")
    except UnicodeDecodeError:
        return None
