"""How the devices of a mesh share the work of the loss: each has some of the tokens, and computes some of the words.

The output matrix [D, V] is stored in parts of D. Multiplying needs whole columns, and there are two ways to them:
  gather    every device fetches all columns: D x V numbers, and as many of the gradient go back;
  exchange  every device fetches its share of the columns, and the tokens of the others that it then has to serve.
Between g devices that exchange, a device moves about D * (3 * V / g + 2 * g * tokens) numbers (the gradient of the
matrix is twice as wide as the rest), so the g to aim at is sqrt(1.5 * V / tokens). Beyond it columns are gathered.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from maxlite.parallel.sharding import axis_size


class Group(NamedTuple):
    """Devices along a mesh axis that take part in one collective: all of them, or runs of `size` at a `stride`."""

    axis: str
    size: int
    stride: int

    def members(self) -> list[list[int]] | None:
        """Returns the groups as collectives want them; None for the whole axis."""
        whole = axis_size((self.axis,))
        if self.size == whole:
            return None
        block = self.size * self.stride
        starts = [start + offset for start in range(0, whole, block) for offset in range(self.stride)]
        return [[start + self.stride * place for place in range(self.size)] for start in starts]

    def index(self) -> jax.Array:
        """Returns this device's place in its group."""
        return lax.axis_index(self.axis) // self.stride % self.size


class Step(NamedTuple):
    """One step on the way from stored parts of the matrix to the columns that a device multiplies with."""

    group: Group
    exchange: bool


class Split(NamedTuple):
    """stored: groups along which the columns lie apart as they are stored, outermost first.

    steps: in the order in which they are taken, so from the innermost mesh axis of D outwards.
    token_axes: mesh axes along which tokens differ. tokens: groups whose tokens a device serves, in order of gathering.
    """

    stored: tuple[Group, ...]
    steps: tuple[Step, ...]
    token_axes: tuple[str, ...]

    @property
    def columns(self) -> tuple[Group, ...]:
        """Groups whose devices have different columns, outermost first."""
        return (*self.stored, *(step.group for step in self.steps if step.exchange))

    @property
    def tokens(self) -> tuple[Group, ...]:
        """Groups whose tokens a device serves."""
        return tuple(group for group in self.columns if group.axis in self.token_axes)

    def matrix(self, part: jax.Array) -> jax.Array:
        """The part that is stored here -> all rows of the columns that are multiplied here."""
        for group, exchange in self.steps:
            groups = group.members()
            if exchange:
                part = lax.all_to_all(part, group.axis, 1, 0, tiled=True, axis_index_groups=groups)
            else:
                part = lax.all_gather(part, group.axis, axis=0, tiled=True, axis_index_groups=groups)
        return part

    def matrix_gradient(self, gradient: jax.Array) -> jax.Array:
        """What these columns got from the tokens that are served here -> the sum for the part that is stored here."""
        for group, exchange in reversed(self.steps):
            groups = group.members()
            if exchange:
                gradient = lax.all_to_all(gradient, group.axis, 0, 1, tiled=True, axis_index_groups=groups)
            else:
                gradient = lax.psum_scatter(
                    gradient, group.axis, scatter_dimension=0, tiled=True, axis_index_groups=groups
                )
                if group.axis not in self.token_axes:
                    # All of them had the same tokens.
                    gradient = gradient / group.size
        used = {group.axis for group in (*self.stored, *(step.group for step in self.steps))}
        others = tuple(axis for axis in self.token_axes if axis not in used)
        return lax.psum(gradient, others) if others else gradient

    def gather(self, tokens: jax.Array, axis: int = 0) -> jax.Array:
        """Tokens of this device, counted along `axis` -> those of all devices that it serves."""
        for group in self.tokens:
            tokens = lax.all_gather(tokens, group.axis, axis=axis, tiled=True, axis_index_groups=group.members())
        return tokens

    def scatter(self, partial: jax.Array) -> jax.Array:
        """What these columns give every token that is served here -> the sum over all columns, for this device's."""
        for group in reversed(self.tokens):
            partial = lax.psum_scatter(
                partial, group.axis, scatter_dimension=0, tiled=True, axis_index_groups=group.members()
            )
        for group in self.columns:
            if group not in self.tokens:
                partial = lax.psum(partial, group.axis, axis_index_groups=group.members())
        return partial

    def sum_columns(self, x: jax.Array) -> jax.Array:
        """Sum over the devices that have the other columns."""
        for group in self.columns:
            x = lax.psum(x, group.axis, axis_index_groups=group.members())
        return x

    def max_columns(self, x: jax.Array) -> jax.Array:
        """Maximum over the devices that have the other columns."""
        for group in self.columns:
            x = lax.pmax(x, group.axis, axis_index_groups=group.members())
        return x

    def sum_tokens(self, x: jax.Array) -> jax.Array:
        """A sum over the tokens that are served here -> the sum over all tokens."""
        served = math.prod(group.size for group in self.tokens)
        return lax.psum(x, self.token_axes) / served if self.token_axes else x

    def first_column(self, num_columns: int) -> jax.Array:
        """Index in the vocabulary of the first of the `num_columns` columns that are multiplied here."""
        place: Any = jnp.int32(0)
        for group in self.columns:
            place = place * group.size + group.index()
        return place * num_columns


def plan_split(
    tokens: int,
    columns: int,
    *,
    matrix_axes: Sequence[str],
    column_axes: Sequence[str],
    token_axes: Sequence[str],
) -> Split:
    """Chooses which mesh axes exchange and which gather.

    tokens, columns: what one device has of them as they come.
    matrix_axes, column_axes, token_axes: mesh axes along which D, V and the tokens lie, outermost first.
    """
    aim, steps = max(1, int(math.sqrt(1.5 * columns / tokens))), []
    for axis in reversed(matrix_axes):
        size = axis_size((axis,))
        wanted = next(part for part in range(min(size, aim), 0, -1) if size % part == 0 and columns % part == 0)
        if wanted > 1:
            steps.append(Step(Group(axis, wanted, 1), exchange=True))
        if wanted < size:
            steps.append(Step(Group(axis, size // wanted, wanted), exchange=False))
        aim, columns = (aim // wanted if wanted == size else 1), columns // wanted
    stored = tuple(Group(axis, axis_size((axis,)), 1) for axis in column_axes)
    return Split(stored, tuple(steps), tuple(token_axes))
