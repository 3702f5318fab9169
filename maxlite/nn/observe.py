"""Lets a caller see what goes into the products of the layers, for calibration. Costs nothing when nobody looks."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import jax

from maxlite.ops.experts import RowGroups

Observer = Callable[[str, jax.Array, RowGroups | None], None]
_OBSERVER: contextvars.ContextVar[Observer | None] = contextvars.ContextVar("observer", default=None)


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Calls observer(path, x, groups) for each product of a layer while the model is traced.

    With unstacked parameters the layers are traced one after the other, so that the nth call with a path is of the
    nth repeat, and x belongs to the trace of the whole model.
    """
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def note_input(path: str, x: jax.Array, groups: RowGroups | None = None) -> None:
    """x: what a product multiplies with its kernel; of experts [E, R, in], or rows [R, in] that fall as groups says."""
    observer = _OBSERVER.get()
    # Without a path it is a gate, which nobody rounds.
    if observer is not None and path:
        observer(path, x, groups)
