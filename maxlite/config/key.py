"""How a key is declared: what it means and what it may be."""

import dataclasses
from typing import Any


def key(
    meaning: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> Any:
    """Declares a key. `above` is an exclusive lower bound; `choices` also bound the items of a list."""
    return dataclasses.field(
        metadata={"meaning": meaning, "choices": choices, "minimum": minimum, "maximum": maximum, "above": above}
    )
