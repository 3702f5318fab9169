"""What tests of reading have in common."""

import os

import pytest


@pytest.fixture
def read_counts(monkeypatch):
    """How many bytes each call of the operating system has read from files of weights."""
    counts: list[int] = []
    preadv = os.preadv

    def counting(*arguments) -> int:
        counts.append(preadv(*arguments))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counting)
    return counts
