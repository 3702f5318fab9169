"""Logical axis names -> PartitionSpec, for weights where they are made and activations where they are named.

The mesh and the rules enter by one context, `use_mesh`, opened where a command runs. Without it `constrain`
is the identity, so that layers can be tested alone.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlite.config.schema import LogicalAxisRules
from maxlite.errors import ConfigError

LogicalAxes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class _Context:
    mesh: Mesh
    rules: LogicalAxisRules


_CONTEXT: contextvars.ContextVar[_Context | None] = contextvars.ContextVar("mesh_and_rules", default=None)


@contextlib.contextmanager
def use_mesh(mesh: Mesh, rules: LogicalAxisRules) -> Iterator[None]:
    """Makes `mesh` and `rules` those that `constrain` follows, also for what is traced inside."""
    token = _CONTEXT.set(_Context(mesh, rules))
    try:
        with jax.set_mesh(mesh):
            yield
    finally:
        _CONTEXT.reset(token)


def partition_spec(axes: LogicalAxes, rules: LogicalAxisRules) -> PartitionSpec:
    """Returns the spec of a tensor whose dimensions are named `axes`.

    The first row that names an axis decides, and a mesh axis is used once: where an earlier dimension took
    it, a later one goes without.
    """
    taken: set[str] = set()
    entries = []
    for axis in axes:
        mesh_axes = next((row for name, row in rules if name == axis), ()) if axis is not None else ()
        free = tuple(mesh_axis for mesh_axis in mesh_axes if mesh_axis not in taken)
        taken.update(free)
        entries.append(None if not free else free[0] if len(free) == 1 else free)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Names the dimensions of an activation, so that the partitioner places it as the rules say."""
    context = _CONTEXT.get()
    if context is None or context.mesh.size == 1:
        return x
    assert len(axes) == x.ndim, f"{len(axes)} names for {x.ndim} dimensions"
    sharding = NamedSharding(context.mesh, partition_spec(axes, context.rules))
    return jax.lax.with_sharding_constraint(x, sharding)


def shardings_of(shapes: Any, axes: Mapping[str, Any], mesh: Mesh, rules: LogicalAxisRules) -> Any:
    """Returns the NamedSharding of every leaf of a nested dict of shapes with logical axes of the same tree.

    Raises:
        ConfigError: lists every dimension that its mesh axes do not divide, by parameter, axis and size.
    """
    problems: list[str] = []

    def of_leaf(path: tuple[Any, ...], shape: Any, names: LogicalAxes) -> NamedSharding:
        spec = partition_spec(names, rules)
        where = "/".join(str(getattr(step, "key", step)) for step in path)
        problems.extend(_indivisible(f"parameter {where}", shape.shape, names, spec, mesh))
        return NamedSharding(mesh, spec)

    result = jax.tree_util.tree_map_with_path(of_leaf, shapes, axes)
    if problems:
        raise ConfigError("\n".join(problems))
    return result


def require_divisible(
    what: str, shape: tuple[int, ...], axes: LogicalAxes, mesh: Mesh, rules: LogicalAxisRules
) -> None:
    """Raises ConfigError if a dimension of `shape` is not divided by the mesh axes it lies along."""
    problems = _indivisible(what, shape, axes, partition_spec(axes, rules), mesh)
    if problems:
        raise ConfigError("\n".join(problems))


def _indivisible(
    what: str, shape: tuple[int, ...], names: LogicalAxes, spec: PartitionSpec, mesh: Mesh
) -> Iterator[str] | list[str]:
    problems = []
    for size, name, entry in zip(shape, names, spec, strict=False):
        mesh_axes = (entry,) if isinstance(entry, str) else (entry or ())
        parts = 1
        for axis in mesh_axes:
            parts *= mesh.shape[axis]
        if size % parts:
            product = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in mesh_axes)
            problems.append(
                f"{what}: dimension {name} of size {size} is not divided by mesh axes {product}; "
                "change that size, the degrees, or the row of logical_axis_rules."
            )
    return problems
