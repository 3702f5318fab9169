"""What passes from files to batches: rows as a file has them, and examples of tokens."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np


class Row(NamedTuple):
    """One row of a source: a line, a record, or a whole file of text.

    name: the same wherever the source lies, and no other row's. where: file and line, for messages.
    fields: column -> value; a file of text has the column `text`.
    """

    name: str
    where: str
    fields: Mapping[str, Any]


class BadRow(NamedTuple):
    """A row that cannot be read. where: file and line; problem: a phrase such as `broken JSON at column 12`."""

    where: str
    problem: str


class Example(NamedTuple):
    """A document in tokens, marks included.

    tokens: int32 [n]. trained: bool [n], the tokens that count as targets; None = all.
    """

    tokens: np.ndarray
    trained: np.ndarray | None
