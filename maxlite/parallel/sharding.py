"""Logical axis names -> PartitionSpec, for weights where they are made and activations where they are named.

The mesh and the rules enter by one context, `use_mesh`, opened where a command runs. Without it `constrain`
is the identity, so that layers can be tested alone.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlite.config.schema import LogicalAxisRules
from maxlite.parallel.execution import Execution

LogicalAxes = tuple[str | None, ...]
# Dimensions that may be too small to cut: the rows and tokens of a step of decoding.
_MAY_BE_WHOLE = ("batch", "length", "norm_length")


@dataclasses.dataclass(frozen=True)
class _Context:
    mesh: Mesh
    rules: LogicalAxisRules
    execution: Execution


_CONTEXT: contextvars.ContextVar[_Context | None] = contextvars.ContextVar("mesh_and_rules", default=None)


@contextlib.contextmanager
def use_mesh(
    mesh: Mesh,
    rules: LogicalAxisRules,
    matmul_precision: str = "default",
    execution: Execution = Execution(),  # noqa: B008  (frozen)
) -> Iterator[None]:
    """Makes `mesh` and `rules` those that `constrain` follows, for all that is traced inside.

    matmul_precision: of every matrix product traced inside, those of backward passes too.
    execution: what `current_execution` returns inside.
    """
    token = _CONTEXT.set(_Context(mesh, rules, execution))
    try:
        precision = None if matmul_precision == "default" else matmul_precision
        with jax.set_mesh(mesh), jax.default_matmul_precision(precision):
            yield
    finally:
        _CONTEXT.reset(token)


def current_execution() -> Execution:
    """Returns how the step in context runs; the plain way without one."""
    context = _CONTEXT.get()
    return Execution() if context is None else context.execution


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
    spec = _activation_spec(x.shape, axes, context)
    return jax.lax.with_sharding_constraint(x, NamedSharding(context.mesh, spec))


def per_device(function: Callable[..., Any], in_axes: Any, out_axes: Any) -> Callable[..., Any]:
    """Returns `function` as each device runs it, on its own part of the arguments (jax.shard_map over the whole mesh).

    in_axes, out_axes: a tuple of arguments (a pytree of results) whose leaves are tuples of logical axes; for an
    argument that is None, None. An argument is copied along mesh axes that its names do not lie along, and a result
    must be equal along those. Collectives inside go over `live_axes`. Without a mesh, or with one device, it is the
    function itself.
    """
    context = _CONTEXT.get()
    if context is None or context.mesh.size == 1:
        return function

    def run(*arguments: Any) -> Any:
        specs = tuple(_argument_specs(part, axes, context) for part, axes in zip(arguments, in_axes, strict=True))
        # A result's batch and length are those of the arguments, and are cut as these are.
        sizes = _sizes(arguments, in_axes)
        out_specs = jax.tree.map(
            lambda axes: _spec_of_sizes([sizes.get(axis) for axis in axes], axes, context), out_axes, is_leaf=_is_axes
        )
        # Kernels and loops below mix what differs between devices with constants, which jax's check would refuse.
        mapped = jax.shard_map(function, mesh=context.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        return mapped(*arguments)

    return run


def split_rows(rows: jax.Array, parts: int) -> jax.Array:
    """[B, ...] -> [parts, B / parts, ...]; every n-th row together, so that no row changes its device."""
    return rows.reshape(-1, parts, *rows.shape[1:]).swapaxes(0, 1)


def live_axes(axis: str) -> tuple[str, ...]:
    """Returns the mesh axes of more than one device that a logical axis lies along; none without a mesh."""
    context = _CONTEXT.get()
    if context is None:
        return ()
    return tuple(name for name in mesh_axes(axis, context.rules) if context.mesh.shape[name] > 1)


def cutting_axes(axis: str, size: int) -> tuple[str, ...]:
    """Returns those of `live_axes` along which a batch or a length of this size is cut: the first that divide it."""
    context = _CONTEXT.get()
    return () if context is None else _dividing(live_axes(axis), size, context.mesh)


def axis_size(axes: Iterable[str]) -> int:
    """Returns into how many parts these mesh axes of the context cut a dimension."""
    context = _CONTEXT.get()
    return 1 if context is None else num_parts(axes, context.mesh)


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple) and all(name is None or isinstance(name, str) for name in node)


def _argument_specs(argument: Any, axes: Any, context: _Context) -> Any:
    if argument is None:
        return None
    return jax.tree.map(
        lambda names, array: _activation_spec(array.shape, names, context), axes, argument, is_leaf=_is_axes
    )


def _sizes(arguments: tuple[Any, ...], in_axes: tuple[Any, ...]) -> dict[str | None, int]:
    """Size of each of _MAY_BE_WHOLE that an argument has."""
    sizes: dict[str | None, int] = {}
    for argument, axes in zip(arguments, in_axes, strict=True):
        if argument is not None:
            named = zip(jax.tree.leaves(axes, is_leaf=_is_axes), jax.tree.leaves(argument), strict=True)
            pairs = [pair for names, array in named for pair in zip(names, array.shape, strict=True)]
            sizes |= {name: size for name, size in pairs if name in _MAY_BE_WHOLE}
    return sizes


def _activation_spec(shape: tuple[int, ...], axes: tuple[str | None, ...], context: _Context) -> PartitionSpec:
    assert len(axes) == len(shape), f"{len(axes)} names for {len(shape)} dimensions"
    return _spec_of_sizes(list(shape), axes, context)


def _spec_of_sizes(sizes: list[int | None], axes: tuple[str | None, ...], context: _Context) -> PartitionSpec:
    """The spec by the rules, without the mesh axes that do not divide a batch or a length: one row, one token."""
    entries: list[Any] = list(partition_spec(axes, context.rules))
    for place, (size, name) in enumerate(zip(sizes, axes, strict=True)):
        if place < len(entries) and name in _MAY_BE_WHOLE and size is not None:
            entries[place] = _dividing(entry_axes(entries[place]), size, context.mesh) or None
    return PartitionSpec(*entries)


def _dividing(axes: tuple[str, ...], size: int, mesh: Mesh) -> tuple[str, ...]:
    """The longest beginning of these mesh axes that cuts `size` into equal parts."""
    while size % num_parts(axes, mesh):
        axes = axes[:-1]
    return axes


def entry_axes(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec: a name, a tuple of names, or None."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


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
        axes = entry_axes(entry)
        if size % num_parts(axes, mesh):
            yield (
                f"{what}: dimension {name} of size {size} is not divided by mesh axes {describe_axes(axes, mesh)}; "
                "change that size, the degrees, or the row of logical_axis_rules."
            )


def describe_axes(axes: Iterable[str], mesh: Mesh) -> str:
    """One phrase for messages: data=2 x fsdp=4."""
    return " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
