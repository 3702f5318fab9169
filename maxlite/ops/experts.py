"""Rows of tokens sorted by expert, and the product of each row with its own expert's matrix.

On TPU and GPU the product is `lax.ragged_dot`. On a CPU XLA computes that one densely, every row with every
expert; there a loop over the experts multiplies blocks of rows instead. A block may run past the end of its
expert's rows: what it writes there the next expert, whose rows they are, overwrites.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# A larger block gains no speed on a CPU, and wastes more where an expert's rows do not fill it.
LARGEST_BLOCK = 256
# Blocks of up to so many rows read a matrix in slices of so many bytes.
FEW_ROWS = 16
SLICE_BYTES = 128 * 1024


@functools.partial(jax.tree_util.register_dataclass, data_fields=["sizes"], meta_fields=["share", "blocks"])
@dataclasses.dataclass(frozen=True)
class RowGroups:
    """How rows sorted by expert fall on E experts; rows after the last expert's are padding.

    sizes: [E] int32, rows of each expert.
    share: about how many rows an expert has when all have as many.
    blocks: how many rows the CPU multiplies at once, falling; there are at least as many rows of padding as the last.
    """

    sizes: jax.Array
    share: int
    blocks: tuple[int, ...]


class Places(NamedTuple):
    """M slots (T tokens times k choices) and R rows, of which the experts' products are taken.

    order: [R] int32, the slot that a row is; M where the row is padding.
    inverse: [M] int32, the row that a slot became; R where it became none.
    """

    order: jax.Array
    inverse: jax.Array


def group_by_expert(experts: jax.Array, num_experts: int) -> tuple[Places, RowGroups]:
    """Sorts slots by expert.

    experts: [..., k] int32, each below num_experts.
    Returns: their places, all slots having one, with padding at the end; and how the rows fall on the experts.
    """
    slots = experts.reshape(-1)
    sizes = jnp.sum(slots[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    groups = row_groups(sizes, slots.size)
    order = jnp.argsort(slots, stable=True).astype(jnp.int32)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(slots.size, dtype=jnp.int32), unique_indices=True)
    return Places(jnp.pad(order, (0, groups.blocks[-1]), constant_values=slots.size), inverse), groups


def row_groups(sizes: jax.Array, num_rows: int) -> RowGroups:
    """sizes: [E] int32; num_rows: their sum, or what may be expected of it."""
    num_experts = sizes.size
    return RowGroups(sizes, max(1, num_rows // num_experts), block_sizes(num_rows, num_experts))


def block_sizes(num_slots: int, num_experts: int) -> tuple[int, ...]:
    """Returns the CPU's blocks: up to two experts' share of the rows, then a quarter of it for what is left."""
    if num_slots <= num_experts:
        return (1,)
    share = min(LARGEST_BLOCK, num_slots, 2 * num_slots // num_experts)
    largest = 1 << (share.bit_length() - 1)
    return (largest, largest // 4) if largest >= 32 else (largest,)


def to_experts(slots: jax.Array, places: Places) -> jax.Array:
    """slots: [M, D]. Returns: rows [R, D], zeros where they are padding."""
    return _permute(slots, places.order, places.inverse)


def from_experts(rows: jax.Array, places: Places) -> jax.Array:
    """rows: [R, D]. Returns: slots [M, D], zeros for those that have no row."""
    return _permute(rows, places.inverse, places.order)


@jax.custom_vjp
def _permute(x: jax.Array, forward: jax.Array, backward: jax.Array) -> jax.Array:
    """x[forward], zeros outside x; its gradient is a gather too, by `backward`, where jax's own is a scatter."""
    del backward
    return jnp.take(x, forward, axis=0, mode="fill", fill_value=0)


def _permute_forward(x: jax.Array, forward: jax.Array, backward: jax.Array) -> tuple[jax.Array, Any]:
    return _permute(x, forward, backward), (forward, backward)


def _permute_backward(residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None, None]:
    forward, backward = residuals
    return _permute(gradient, backward, forward), None, None


_permute.defvjp(_permute_forward, _permute_backward)


def row_numbers(groups: RowGroups, num_rows: int) -> jax.Array:
    """Returns the expert of each row [num_rows], E where it is padding."""
    return jnp.searchsorted(jnp.cumsum(groups.sizes), jnp.arange(num_rows), side="right")


def grouped_bias(bias: jax.Array, groups: RowGroups, num_rows: int) -> jax.Array:
    """bias: [E, F]. Returns: the bias of each row's expert [num_rows, F], zeros where it is padding."""
    expert = row_numbers(groups, num_rows)
    # A product, because the gradient of a gather would add row by row.
    chosen = jax.nn.one_hot(expert, bias.shape[0], dtype=bias.dtype)
    return jnp.einsum("RE,EF->RF", chosen, bias, precision=jax.lax.Precision.HIGHEST)


class Gathering(NamedTuple):
    """How an array's parts on the devices become whole: mesh axes, and the dimension that lies along them."""

    axes: tuple[str, ...] = ()
    dimension: int = 0


NOT_CUT = Gathering()


def whole(gathering: Gathering, array: jax.Array) -> jax.Array:
    """Returns the whole of which a device has a part; the gradient is summed over devices and cut again."""
    if not gathering.axes:
        return array
    return jax.lax.all_gather(array, gathering.axes, axis=gathering.dimension, tiled=True)


def grouped_product(
    rows: jax.Array, kernel: jax.Array, groups: RowGroups | None, gathering: Gathering = NOT_CUT
) -> jax.Array:
    """Each row times its expert's matrix; padding gives values without meaning, but finite.

    The backward pass gathers a kernel again, so that no policy keeps it whole, and sums its gradient over devices in
    the kernel's own dtype.

    rows: [R, D] sorted by expert, zeros where they are padding. Without `groups`: [E, R, D].
    kernel: [E, D, F] of the same dtype, or a device's part of it, which `gathering` makes whole.
    Returns: [R, F], or [E, R, F].
    """
    return _product(gathering, rows, kernel, groups)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(gathering: Gathering, rows: jax.Array, kernel: jax.Array, groups: RowGroups | None) -> jax.Array:
    kernel = whole(gathering, kernel)
    if groups is None:
        return jnp.einsum("ERD,EDF->ERF", rows, kernel)
    return jax.lax.platform_dependent(rows, kernel, groups, cpu=_loop_product, default=_ragged_product)


def _product_forward(
    gathering: Gathering, rows: jax.Array, kernel: jax.Array, groups: RowGroups | None
) -> tuple[jax.Array, Any]:
    return _product(gathering, rows, kernel, groups), (rows, kernel, groups)


def _product_backward(
    gathering: Gathering, residuals: tuple[jax.Array, jax.Array, RowGroups | None], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows, kernel, groups = residuals
    kernel, scatter = jax.vjp(functools.partial(whole, gathering), kernel)
    if groups is None:
        rows_gradient = jnp.einsum("ERF,EDF->ERD", gradient, kernel)
        kernel_gradient = jnp.einsum("ERD,ERF->EDF", rows, gradient)
    else:
        rows_gradient, kernel_gradient = jax.lax.platform_dependent(
            rows, kernel, groups, gradient, cpu=_loop_gradients, default=_ragged_gradients
        )
    return rows_gradient, *scatter(kernel_gradient), None


_product.defvjp(_product_forward, _product_backward)


def _ragged_product(rows: jax.Array, kernel: jax.Array, groups: RowGroups) -> jax.Array:
    """No expert takes the padding, which may be far more than the rows; ragged_dot leaves it undefined."""
    return without_padding(jax.lax.ragged_dot(rows, kernel, groups.sizes), groups)


def _ragged_gradients(
    rows: jax.Array, kernel: jax.Array, groups: RowGroups, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    by_row = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    rows_gradient = jax.lax.ragged_dot_general(gradient, kernel, groups.sizes, by_row)
    over_rows = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    kernel_gradient = jax.lax.ragged_dot_general(rows, without_padding(gradient, groups), groups.sizes, over_rows)
    return without_padding(rows_gradient, groups), kernel_gradient


def without_padding(rows: jax.Array, groups: RowGroups) -> jax.Array:
    """rows: [R, D]. Returns: zeros where they are padding."""
    return jnp.where(jnp.arange(rows.shape[0])[:, None] < jnp.sum(groups.sizes), rows, 0)


def _loop_product(rows: jax.Array, kernel: jax.Array, groups: RowGroups) -> jax.Array:
    def prepare(expert: jax.Array) -> Callable[[jax.Array], jax.Array]:
        if groups.blocks[0] <= FEW_ROWS:
            return lambda block: _slice_by_slice(block, kernel, expert)
        matrix = jax.lax.dynamic_index_in_dim(kernel, expert, keepdims=False)
        return lambda block: block @ matrix

    return over_experts(rows, kernel.shape[2], groups, prepare)


def over_experts(
    rows: jax.Array,
    width: int,
    groups: RowGroups,
    prepare: Callable[[jax.Array], Callable[[jax.Array], jax.Array]],
    dtype: jnp.dtype | None = None,
) -> jax.Array:
    """Runs through the experts that have rows, in decoding a few, and through blocks of each one's rows.

    prepare: given an expert, returns what makes [n, width] of a block of its rows [n, D].
    Returns: [R, width] of `dtype`; None is that of the rows.
    """
    sizes, blocks = groups.sizes, groups.blocks
    starts = jnp.cumsum(sizes) - sizes
    busy = jnp.argsort(sizes == 0, stable=True)
    num_busy = jnp.sum(sizes > 0)

    def of_expert(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        index, output = carry
        expert = busy[index]
        multiply = prepare(expert)

        def of_block(first: jax.Array, size: int, output: jax.Array) -> jax.Array:
            start = starts[expert] + first
            made = multiply(jax.lax.dynamic_slice_in_dim(rows, start, size))
            return jax.lax.dynamic_update_slice_in_dim(output, made, start, 0)

        return index + 1, _over_blocks(blocks, sizes[expert], of_block, output)

    output = jnp.zeros((rows.shape[0], width), dtype or rows.dtype)
    return jax.lax.while_loop(lambda carry: carry[0] < num_busy, of_expert, (jnp.int32(0), output))[1]


def _slice_by_slice(block: jax.Array, kernel: jax.Array, expert: jax.Array) -> jax.Array:
    """block @ kernel[expert], for a block so small that reading the matrix is what costs.

    Taking a matrix out of the kernel copies it; in slices that stay in a core's cache it is read from memory once.
    """
    _, dim, width = kernel.shape
    fitting = max(1, SLICE_BYTES // (width * kernel.dtype.itemsize))
    height = next(height for height in range(min(dim, fitting), 0, -1) if dim % height == 0)

    def step(index: jax.Array, total: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice(kernel, (expert, index * height, 0), (1, height, width))[0]
        columns = jax.lax.dynamic_slice_in_dim(block, index * height, height, 1)
        return total + jnp.matmul(columns, part, preferred_element_type=jnp.float32)

    total = jax.lax.fori_loop(0, dim // height, step, jnp.zeros((block.shape[0], width), jnp.float32))
    return total.astype(block.dtype)


def _loop_gradients(
    rows: jax.Array, kernel: jax.Array, groups: RowGroups, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Expert by expert; the gradient of a whole matrix exists in float32 for one expert at a time."""
    sizes, blocks = groups.sizes, groups.blocks

    def of_expert(
        rows_gradient: jax.Array, expert: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        matrix, start, count = expert

        def of_block(first: jax.Array, size: int, rows_gradient: jax.Array) -> jax.Array:
            block = jax.lax.dynamic_slice_in_dim(gradient, start + first, size)
            made = jnp.einsum("RF,DF->RD", block, matrix)
            return jax.lax.dynamic_update_slice_in_dim(rows_gradient, made, start + first, 0)

        rows_gradient = _over_blocks(blocks, count, of_block, rows_gradient)
        return rows_gradient, matrix_gradient(rows, gradient, start, count, groups.share).astype(matrix.dtype)

    starts = jnp.cumsum(sizes) - sizes
    return jax.lax.scan(of_expert, jnp.zeros_like(rows), (kernel, starts, sizes))


def matrix_gradient(rows: jax.Array, gradient: jax.Array, start: jax.Array, count: jax.Array, share: int) -> jax.Array:
    """The product of `count` rows and their gradients, [D, F]: one product, if they are few enough.

    rows, gradient: floats, or codes of few bits. Returns: what these are added up in, as `sum_dtype` says.

    Adding up a product for each block would read and write the matrix as often, which costs more than to multiply
    with some zeros.
    """
    quarter = max(1, share // 4)
    capacities = sorted({min(quarter * quarters, rows.shape[0]) for quarters in (2, 4, 5, 8)})

    def product(first: jax.Array | int, capacity: int) -> jax.Array:
        at = jnp.minimum(start + first, rows.shape[0] - capacity)
        place = at + jnp.arange(capacity)
        wanted = (place >= start + first) & (place < start + count)
        block = jnp.where(wanted[:, None], jax.lax.dynamic_slice_in_dim(rows, at, capacity), 0)
        block_gradient = jax.lax.dynamic_slice_in_dim(gradient, at, capacity)
        over_rows = (((0,), (0,)), ((), ()))
        return jax.lax.dot_general(block, block_gradient, over_rows, preferred_element_type=sum_dtype(rows))

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return state[0] + capacities[-1], state[1] + product(state[0], capacities[-1])

    smallest = jnp.sum(count > jnp.array(capacities[:-1], jnp.int32))
    total = jax.lax.switch(smallest, [functools.partial(product, 0, capacity) for capacity in capacities])
    return jax.lax.while_loop(lambda state: state[0] < count, step, (jnp.int32(capacities[-1]), total))[1]


def sum_dtype(array: jax.Array) -> jnp.dtype:
    """Returns what products of floats or of codes are added up in."""
    return jnp.dtype(jnp.int32 if jnp.issubdtype(array.dtype, jnp.integer) else jnp.float32)


def _over_blocks(
    blocks: tuple[int, ...], count: jax.Array, of_block: Callable[[jax.Array, int, Any], Any], carry: Any
) -> Any:
    """Runs `of_block(first row, rows, carry)` over `count` rows: whole blocks of each size; the last size ends it."""
    first = jnp.int32(0)
    for size in blocks:
        # Rows of the next expert or padding may fill up a block of the last size only.
        needed = 1 if size == blocks[-1] else size

        def goes_on(state: tuple[jax.Array, Any], needed: int = needed) -> jax.Array:
            return state[0] + needed <= count

        def step(state: tuple[jax.Array, Any], size: int = size) -> tuple[jax.Array, Any]:
            return state[0] + size, of_block(state[0], size, state[1])

        first, carry = jax.lax.while_loop(goes_on, step, (first, carry))
    return carry
