"""Windows over pieces of documents: every token but a piece's first is a target once, and what is cut is counted."""

import numpy as np
import pytest

from maxlite.data.windows import EndlessWindows, Pieces, Windows


def pieces_of(*pieces: tuple[int, int, int]) -> Pieces:
    """Returns pieces given as (document, start, stop)."""
    return Pieces(*(np.array(part, np.int64) for part in zip(*pieces, strict=True)))


def located(windows: Windows) -> list[tuple[int, int, int]]:
    """Returns (document, start, length) of every window."""
    found = windows.locate(np.arange(len(windows)))
    return list(zip(*(part.tolist() for part in found), strict=True))


@pytest.mark.parametrize("lengths", [(10, 100, 33), (1, 32, 31, 64, 65, 0, 2), (2,)])
def test_split_makes_each_token_a_target_once(lengths: tuple[int, ...]) -> None:
    """Windows of a document follow one another, all but the last of full length (P32)."""
    windows = Windows(pieces_of(*((place, 0, length) for place, length in enumerate(lengths))), 32, truncate=False)
    targets = [
        (document, start + offset + 1) for document, start, length in located(windows) for offset in range(length)
    ]
    assert targets == [(document, place) for document, length in enumerate(lengths) for place in range(1, length)]
    assert all(1 <= length <= 32 for _, _, length in located(windows))
    assert windows.num_targets == len(targets) and windows.num_cut == 0
    assert windows.num_without_targets == sum(length < 2 for length in lengths)


def test_truncate_keeps_the_first_window_and_counts_the_rest() -> None:
    """Of 11, 101 and 34 targets, 32 each are kept (P32)."""
    windows = Windows(pieces_of((0, 0, 12), (1, 0, 102), (2, 0, 35)), 32, truncate=True)
    assert located(windows) == [(0, 0, 11), (1, 0, 32), (2, 0, 32)]
    assert (windows.num_targets, windows.num_cut) == (75, 71)


def test_a_piece_of_a_document_begins_where_it_says() -> None:
    """Nothing before its start or behind its stop is read."""
    assert located(Windows(pieces_of((3, 5, 12)), 4, truncate=False)) == [(3, 5, 4), (3, 9, 2)]


def test_whole_pieces() -> None:
    """One window each, however long; without a pair there is none."""
    windows = Windows(pieces_of((0, 0, 100), (1, 0, 1), (2, 0, 3)), 4, truncate=False, whole=True)
    assert located(windows) == [(0, 0, 99), (2, 0, 2)]


def test_endless_windows() -> None:
    """Window k is all of document k."""
    found = EndlessWindows(7).locate(np.array([5, 10**12]))
    assert [part.tolist() for part in found] == [[5, 10**12], [0, 0], [7, 7]]
