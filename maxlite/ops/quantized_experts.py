"""The product of each row with its own expert's matrix, both rounded to few bits, forward and backward.

As in ops/quantized.py: codes are multiplied with codes, and scales act on the result. A row has a scale, and each
channel of an expert's matrix. On a mesh the devices agree on the scales, so that codes are those of one device, and
what they gather of a kernel is its codes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from qwix._src.core.qarray import QArray

from maxlite.config.quant_schema import QuantRule
from maxlite.ops.experts import (
    Gathering,
    RowGroups,
    grouped_product,
    matrix_gradient,
    over_experts,
    row_numbers,
    sum_dtype,
    whole,
    without_padding,
)
from maxlite.ops.quantized import codes_by_scale, named, round_to_codes


class Cuts(NamedTuple):
    """Mesh axes along which devices have parts.

    gathering: of the kernel, which is put together for the product.
    summed, made: of the dimension that the product sums over, and of the one it makes; these parts stay apart.
    rows: of the rows that fall on one expert.
    """

    gathering: Gathering
    summed: tuple[str, ...]
    made: tuple[str, ...]
    rows: tuple[str, ...]


def quantized_grouped_product(
    rows: jax.Array, kernel: jax.Array, groups: RowGroups | None, cuts: Cuts, rule: QuantRule
) -> jax.Array:
    """As grouped_product, of operands that are rounded as the rule says: both, each row and channel as a whole."""
    assert rule.act_qtype and rule.weight_qtype and rule.tile_size is None and rule.calibration == "absmax", rule
    return _product(cuts, rule, rows, kernel, groups)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(cuts: Cuts, rule: QuantRule, rows: jax.Array, kernel: jax.Array, groups: RowGroups | None) -> jax.Array:
    return _forward(cuts, rule, rows, kernel, groups)[0]


def _forward(
    cuts: Cuts, rule: QuantRule, rows: jax.Array, kernel: jax.Array, groups: RowGroups | None
) -> tuple[jax.Array, Any]:
    assert rule.act_qtype and rule.weight_qtype
    coded_rows = round_to_codes(rows, rule.act_qtype, (rows.ndim - 1,), cuts.summed)
    # The kernel's summed dimension may be in parts that stay apart, or in parts that are put together.
    over = cuts.gathering.axes if cuts.gathering.dimension == 1 else ()
    coded_kernel = round_to_codes(kernel, rule.weight_qtype, (1,), (*over, *cuts.summed))
    codes, scale = _whole(coded_kernel, cuts.gathering)
    y = _multiply(coded_rows.qvalue, codes, groups, transposed=False)
    y = (y * coded_rows.scale * _of_rows(scale, groups, rows.shape[0])).astype(rows.dtype)
    if rule.bwd_qtype is None:
        return y, (rows, kernel, groups)
    return y, (named(coded_rows), named(coded_kernel), groups)


def _backward(cuts: Cuts, rule: QuantRule, residuals: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows, kernel, groups = residuals
    if rule.bwd_qtype is None:
        _, gradients = jax.vjp(lambda rows, kernel: grouped_product(rows, kernel, groups, cuts.gathering), rows, kernel)
        return *gradients(gradient), None
    codes, scale = _whole(kernel, cuts.gathering)
    for_rows = gradient * _of_rows(scale, groups, gradient.shape[0])
    for_rows = round_to_codes(for_rows, rule.bwd_qtype, (gradient.ndim - 1,), cuts.made)
    rows_gradient = _multiply(for_rows.qvalue, codes, groups, transposed=True) * for_rows.scale
    for_kernel = _round_for_kernel(gradient * rows.scale, groups, rule.bwd_qtype, codes.shape[0], cuts)
    kernel_gradient = _kernel_gradient(rows.qvalue, for_kernel.qvalue, groups, codes.shape[0]) * for_kernel.scale
    dtype = gradient.dtype
    part = jax.ShapeDtypeStruct(kernel.shape, dtype)
    (scattered,) = jax.linear_transpose(functools.partial(whole, cuts.gathering), part)(kernel_gradient.astype(dtype))
    return rows_gradient.astype(dtype), scattered, None


_product.defvjp(_forward, _backward)


def _whole(kernel: QArray, gathering: Gathering) -> tuple[jax.Array, jax.Array]:
    """Codes [E, D, F] and scales [E, 1, F]; these are the same on all devices where D is what was cut."""
    scale = kernel.scale if gathering.dimension == 1 else whole(gathering, kernel.scale)
    return whole(gathering, kernel.qvalue), scale


def _of_rows(scale: jax.Array, groups: RowGroups | None, num_rows: int) -> jax.Array:
    """scale: [E, 1, F]. Returns: that of each row's expert [R, F]; without groups as it is."""
    if groups is None:
        return scale
    return jnp.take(scale[:, 0], row_numbers(groups, num_rows), axis=0, mode="clip")


def _round_for_kernel(
    gradient: jax.Array, groups: RowGroups | None, qtype: str, num_experts: int, cuts: Cuts
) -> QArray:
    """Codes of a gradient, whose channels have a scale for each expert, [E, 1, F]."""
    if groups is None:
        return round_to_codes(gradient, qtype, (1,), cuts.rows)
    experts = row_numbers(groups, gradient.shape[0])
    largest = jax.ops.segment_max(jnp.abs(gradient), experts, num_experts, indices_are_sorted=True)
    # Of an expert without rows it is minus infinity.
    largest = jnp.maximum(jax.lax.pmax(largest, cuts.rows) if cuts.rows else largest, 0)
    rounded = codes_by_scale(gradient, qtype, largest, lambda scale: jnp.take(scale, experts, axis=0, mode="clip"))
    return QArray(rounded.qvalue, rounded.scale[:, None], None, rounded.qtype)


def _multiply(rows: jax.Array, kernel: jax.Array, groups: RowGroups | None, *, transposed: bool) -> jax.Array:
    """Codes of each row times those of its expert's matrix, or of that turned round; sums as they come."""
    dtype, dim = sum_dtype(rows), 2 if transposed else 1
    if groups is None:
        return jax.lax.dot_general(rows, kernel, (((2,), (dim,)), ((0,), (0,))), preferred_element_type=dtype)

    def looped(rows: jax.Array, kernel: jax.Array, groups: RowGroups) -> jax.Array:
        def prepare(expert: jax.Array) -> Any:
            matrix = jax.lax.dynamic_index_in_dim(kernel, expert, keepdims=False)
            return lambda block: jax.lax.dot_general(
                block, matrix, (((1,), (dim - 1,)), ((), ())), preferred_element_type=dtype
            )

        return over_experts(rows, kernel.shape[3 - dim], groups, prepare, dtype)

    def ragged(rows: jax.Array, kernel: jax.Array, groups: RowGroups) -> jax.Array:
        numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (dim,)), ((), ())), [0], [0])
        rows, kernel = _multipliable(rows), _multipliable(kernel)
        y = jax.lax.ragged_dot_general(rows, kernel, groups.sizes, numbers, preferred_element_type=dtype)
        return without_padding(y, groups)

    return jax.lax.platform_dependent(rows, kernel, groups, cpu=looped, default=ragged)


def _kernel_gradient(rows: jax.Array, gradient: jax.Array, groups: RowGroups | None, num_experts: int) -> jax.Array:
    """Codes of rows times those of their gradients, summed over each expert's rows: [E, D, F], sums as they come."""
    dtype = sum_dtype(rows)
    if groups is None:
        return jax.lax.dot_general(rows, gradient, (((1,), (1,)), ((0,), (0,))), preferred_element_type=dtype)

    def looped(rows: jax.Array, gradient: jax.Array, groups: RowGroups) -> jax.Array:
        starts = jnp.cumsum(groups.sizes) - groups.sizes

        def of_expert(place: tuple[jax.Array, jax.Array]) -> jax.Array:
            return matrix_gradient(rows, gradient, place[0], place[1], groups.share)

        return jax.lax.map(of_expert, (starts, groups.sizes))

    def ragged(rows: jax.Array, gradient: jax.Array, groups: RowGroups) -> jax.Array:
        numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
        rows, gradient = _multipliable(rows), _multipliable(without_padding(gradient, groups))
        return jax.lax.ragged_dot_general(rows, gradient, groups.sizes, numbers, preferred_element_type=dtype)

    return jax.lax.platform_dependent(rows, gradient, groups, cpu=looped, default=ragged)


def _multipliable(codes: jax.Array) -> jax.Array:
    """Ragged products know no 8-bit floats; bfloat16 has all of their values."""
    return codes if jnp.issubdtype(codes.dtype, jnp.integer) else codes.astype(jnp.bfloat16)
