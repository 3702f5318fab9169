"""Logical axis names -> PartitionSpec, for weights where they are made and activations where they are named.

The mesh and the rules enter by one context, `use_mesh`, opened where a command runs. Without it `constrain`
is the identity, so that layers can be tested alone.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlite.config.schema import LogicalAxisRules

LogicalAxes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class _Context:
    mesh: Mesh
    rules: LogicalAxisRules


_CONTEXT: contextvars.ContextVar[_Context | None] = contextvars.ContextVar("mesh_and_rules", default=None)


@contextlib.contextmanager
def use_mesh(mesh: Mesh, rules: LogicalAxisRules, matmul_precision: str = "default") -> Iterator[None]:
    """Makes `mesh` and `rules` those that `constrain` follows, for all that is traced inside.

    matmul_precision: of every matrix product traced inside, those of backward passes too.
    """
    token = _CONTEXT.set(_Context(mesh, rules))
    try:
        precision = None if matmul_precision == "default" else matmul_precision
        with jax.set_mesh(mesh), jax.default_matmul_precision(precision):
            yield
    finally:
        _CONTEXT.reset(token)


def mesh_axes(axis: str | None, rules: LogicalAxisRules) -> tuple[str, ...]:
    """Returns the mesh axes that a logical axis lies along: those of the first row that names it."""
    return next((row for name, row in rules if name == axis), ())


def num_parts(axes: Iterable[str], mesh: Mesh) -> int:
    """Returns into how many parts a dimension along these mesh axes is cut."""
    return math.prod(mesh.shape[axis] for axis in axes)


def partition_spec(axes: LogicalAxes, rules: LogicalAxisRules) -> PartitionSpec:
    """Returns the spec of a tensor whose dimensions are named `axes`.

    A mesh axis is used once: where an earlier dimension took it, a later one goes without.
    """
    taken: set[str] = set()
    entries = []
    for axis in axes:
        free = tuple(mesh_axis for mesh_axis in mesh_axes(axis, rules) if mesh_axis not in taken)
        taken.update(free)
        entries.append(None if not free else free[0] if len(free) == 1 else free)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def fitting_rules(rules: LogicalAxisRules, mesh: Mesh, vocab_size: int) -> LogicalAxisRules:
    """Returns `rules`, by which the vocabulary is copied to all devices if its mesh axes do not divide it.

    The size of a vocabulary is the tokenizer's choice, not the user's. Padding it instead would give the softmax rows
    that no token has.
    """
    return rules if vocab_size % num_parts(mesh_axes("vocab", rules), mesh) == 0 else (("vocab", ()), *rules)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Names the dimensions of an activation, so that the partitioner places it as the rules say."""
    context = _CONTEXT.get()
    if context is None or context.mesh.size == 1:
        return x
    assert len(axes) == x.ndim, f"{len(axes)} names for {x.ndim} dimensions"
    sharding = NamedSharding(context.mesh, partition_spec(axes, context.rules))
    return jax.lax.with_sharding_constraint(x, sharding)


def shardings_of(shapes: Any, axes: Mapping[str, Any], mesh: Mesh, rules: LogicalAxisRules) -> tuple[Any, list[str]]:
    """Returns the NamedSharding of every leaf of a nested dict of shapes with logical axes of the same tree.

    Beside them: one message for each dimension that its mesh axes do not divide.
    """
    problems: list[str] = []

    def of_leaf(path: tuple[Any, ...], shape: Any, names: LogicalAxes) -> NamedSharding:
        spec = partition_spec(names, rules)
        where = "/".join(str(getattr(step, "key", step)) for step in path)
        problems.extend(indivisible(f"parameter {where}", shape.shape, names, mesh, rules))
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(of_leaf, shapes, axes), problems


def indivisible(
    what: str, shape: tuple[int, ...], names: LogicalAxes, mesh: Mesh, rules: LogicalAxisRules
) -> Iterator[str]:
    """Yields a message for each dimension of `shape` that its mesh axes do not divide."""
    for size, name, entry in zip(shape, names, partition_spec(names, rules), strict=False):
        axes = (entry,) if isinstance(entry, str) else (entry or ())
        if size % num_parts(axes, mesh):
            yield (
                f"{what}: dimension {name} of size {size} is not divided by mesh axes {describe_axes(axes, mesh)}; "
                "change that size, the degrees, or the row of logical_axis_rules."
            )


def describe_axes(axes: Iterable[str], mesh: Mesh) -> str:
    """One phrase for messages: data=2 x fsdp=4."""
    return " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
