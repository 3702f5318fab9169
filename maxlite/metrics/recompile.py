"""Times the compilation of a jitted function and says why it was compiled again."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import jax
import jax.monitoring

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_COMPILE_PHASES = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    _BACKEND_COMPILE,
)
_MOST_SHOWN = 5

_Signature = dict[str, dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Compilation:
    """What one call spent on compiling.

    seconds: tracing, lowering and compiling, or fetching from the compile cache.
    warning: None for the first compilation of a variant; after it, what changed since the nearest earlier one.
    """

    seconds: float
    warning: str | None


class RecompileWatch:
    """Listens to jax for compilations of the function called `name`, and to nothing between them.

    A watch costs a step nothing: the arguments are looked at only when a compilation has happened. Use it as a context
    manager, or `close` it, to stop listening.
    """

    def __init__(self, name: str) -> None:
        """`name`: `__name__` of the jitted function; jax reports compilations by it."""
        self._name = name
        self._seconds = 0.0
        self._compiled = False
        self._signatures: dict[Hashable, list[_Signature]] = {}
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def check(self, arguments: Mapping[str, Any], variant: Hashable = None) -> Compilation | None:
        """Returns what the call just made spent on compiling, or None if it compiled nothing.

        arguments: name -> pytree, as given to that call. Donated arrays are fine: only their types are read.
        variant: of the program, where it is known that there are several, such as one for each length of rows.
        """
        if not self._compiled:
            return None
        seconds, self._seconds, self._compiled = self._seconds, 0.0, False
        signature, before = _signature(arguments), self._signatures.setdefault(variant, [])
        warning = self._warning(signature, seconds, before) if before else None
        before.append(signature)
        return Compilation(seconds, warning)

    def close(self) -> None:
        """Stops listening."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops listening."""
        self.close()

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event in _COMPILE_PHASES and kwargs.get("fun_name") in (self._name, f"jit({self._name})"):
            self._seconds += duration_secs
            self._compiled |= event == _BACKEND_COMPILE

    def _warning(self, signature: _Signature, seconds: float, before: Sequence[_Signature]) -> str:
        changes = min((_changes(earlier, signature) for earlier in before), key=len)
        head = f"{self._name} was compiled again, in {seconds:.1f} s: "
        if not changes:
            return head + "its arguments are of the same kind as before, so a jax setting or the mesh has changed."
        shown = "; ".join(changes[:_MOST_SHOWN])
        more = f"; and {len(changes) - _MOST_SHOWN} more" if len(changes) > _MOST_SHOWN else ""
        return f"{head}{shown}{more}. Keep these the same from call to call."


def _signature(arguments: Mapping[str, Any]) -> _Signature:
    """Returns path of leaf -> property -> text, for all that jit compiles anew for."""
    return {
        name + jax.tree_util.keystr(path): _leaf_properties(leaf)
        for name, tree in arguments.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _leaf_properties(leaf: Any) -> dict[str, str]:
    kind = jax.typeof(leaf)
    return {
        "shape": str(list(kind.shape)),
        "dtype": str(kind.dtype),
        "weak type": str(kind.weak_type),
        "sharding": _sharding_text(leaf),
    }


def _sharding_text(leaf: Any) -> str:
    if not isinstance(leaf, jax.Array):
        return "on the host"
    return f"{leaf.sharding}" + ("" if leaf.committed else ", free to move")


def _changes(earlier: _Signature, now: _Signature) -> list[str]:
    """Says which leaves differ, and in what, in the order of the arguments."""
    changes = [f"{path} is gone" for path in earlier if path not in now]
    for path, properties in now.items():
        if path not in earlier:
            changes.append(f"{path} is new")
            continue
        differing = [name for name, text in properties.items() if text != earlier[path][name]]
        if differing:
            changes.append(f"{path} " + ", ".join(f"{n} {earlier[path][n]} -> {properties[n]}" for n in differing))
    return changes
