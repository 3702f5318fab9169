"""Documents in memory: what goes in comes out, whatever the size of the vocabulary, masks and all."""

from collections import Counter

import numpy as np
import pytest

from maxlite.data.rows import Example
from maxlite.data.token_store import MemoryTokens, RandomTokens, Span

DOCUMENTS = [[1, 2, 3], [], [65535, 7]]


def examples(*masks: list[bool] | None) -> list[Example]:
    """Returns the documents with these masks."""
    return [
        Example(np.array(tokens, np.int32), None if mask is None else np.array(mask, bool))
        for tokens, mask in zip(DOCUMENTS, masks, strict=True)
    ]


@pytest.mark.parametrize("vocab_size", [65536, 65537])
def test_what_goes_in_comes_out(vocab_size: int) -> None:
    """Two bytes hold ids below 65,536; no id wraps around."""
    store = MemoryTokens(examples(None, None, None), vocab_size)
    assert store.num_tokens.tolist() == [3, 0, 2] and store.num_trained is None
    found = store.read_many([Span(2, 0, 2), Span(0, 1, 3), Span(1, 0, 0)])
    assert [example.tokens.tolist() for example in found] == [[65535, 7], [2, 3], []]
    assert all(example.tokens.dtype == np.int32 and example.trained is None for example in found)


def test_masks() -> None:
    """A document without a mask among others with one is trained whole."""
    store = MemoryTokens(examples([False, True, True], [], None), 70000)
    assert store.num_trained is not None and store.num_trained.tolist() == [2, 0, 2]
    first, last = store.read_many([Span(0, 0, 2), Span(2, 0, 2)])
    assert first.trained is not None and first.trained.tolist() == [False, True]
    assert last.trained is not None and last.trained.tolist() == [True, True]


def test_the_digest_tells_documents_tokens_and_masks_apart() -> None:
    """Nor is a document cut in two the same as one."""
    plain = MemoryTokens(examples(None, None, None), 70000)
    others = [
        MemoryTokens(examples([True, True, False], [], None), 70000),
        MemoryTokens([Example(np.array([1, 2, 3, 65535, 7], np.int32), None)], 70000),
        MemoryTokens([Example(np.array(tokens, np.int32), None) for tokens in ([1, 2, 4], [], [65535, 7])], 70000),
    ]
    assert plain.digest == MemoryTokens(examples(None, None, None), 70000).digest
    assert len({plain.digest, *(other.digest for other in others)}) == 4


def test_random_ids_fill_the_vocabulary() -> None:
    """Each document depends on seed and number alone; all ids occur, none is out of range."""
    spans = [Span(10**15, 0, 501), Span(1, 3, 9)]
    first, second = RandomTokens(500, 7, seed=0).read_many(spans)
    again, _ = RandomTokens(500, 7, seed=0).read_many(spans)
    other, _ = RandomTokens(500, 7, seed=1).read_many(spans)
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens, other.tokens) and len(second.tokens) == 6
    counts = Counter(first.tokens.tolist())
    assert set(counts) == set(range(7)) and min(counts.values()) > 40
