"""The product of each row with its own expert's matrix, which is stored in few bits."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlite.ops.experts import Gathering, RowGroups, grouped_product, over_experts, whole
from maxlite.ops.stored import dequantize_kernel, kernel_shape, stored_product

_EQUATION = "ERD,EDF->ERF"


class StoredExperts(NamedTuple):
    """codes, scale: of all experts, the experts first, as ops/stored.py has them."""

    codes: jax.Array
    scale: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_stored_product(
    rows: jax.Array,
    stored: StoredExperts,
    groups: RowGroups | None,
    qtype: str,
    gatherings: tuple[Gathering, Gathering],
) -> jax.Array:
    """As grouped_product, of a kernel that is stored; it has a gradient for rows alone.

    On a CPU the floats of one expert at a time exist.

    stored: a device's part, which `gatherings` make whole: of codes, and of scale.
    """
    stored = _whole(stored, gatherings)
    if groups is None:
        return stored_product(_EQUATION, rows, *stored, qtype)
    cpu, default = functools.partial(_loop_product, qtype), functools.partial(_whole_product, qtype)
    return jax.lax.platform_dependent(rows, stored, groups, cpu=cpu, default=default)


def _forward(
    rows: jax.Array,
    stored: StoredExperts,
    groups: RowGroups | None,
    qtype: str,
    gatherings: tuple[Gathering, Gathering],
) -> tuple[jax.Array, tuple[StoredExperts, RowGroups | None]]:
    return grouped_stored_product(rows, stored, groups, qtype, gatherings), (stored, groups)


def _backward(
    qtype: str,
    gatherings: tuple[Gathering, Gathering],
    residuals: tuple[StoredExperts, RowGroups | None],
    gradient: jax.Array,
) -> tuple[jax.Array, None, None]:
    stored, groups = residuals
    stored = _whole(stored, gatherings)
    if groups is None:
        kernel = _kernel(stored, qtype, gradient.dtype)
        return jnp.einsum("ERF,EDF->ERD", gradient, kernel), None, None
    cpu, default = (functools.partial(way, qtype, transposed=True) for way in (_loop_product, _whole_product))
    return jax.lax.platform_dependent(gradient, stored, groups, cpu=cpu, default=default), None, None


grouped_stored_product.defvjp(_forward, _backward)


def _whole_product(
    qtype: str, rows: jax.Array, stored: StoredExperts, groups: RowGroups, *, transposed: bool = False
) -> jax.Array:
    kernel = _kernel(stored, qtype, rows.dtype)
    return grouped_product(rows, kernel.swapaxes(1, 2) if transposed else kernel, groups)


def _loop_product(
    qtype: str, rows: jax.Array, stored: StoredExperts, groups: RowGroups, *, transposed: bool = False
) -> jax.Array:
    def prepare(expert: jax.Array) -> Callable[[jax.Array], jax.Array]:
        of_expert = (jax.lax.dynamic_index_in_dim(array, expert) for array in stored)
        matrix = _kernel(StoredExperts(*of_expert), qtype, rows.dtype)[0]
        return lambda block: block @ (matrix.T if transposed else matrix)

    width = kernel_shape(stored.codes, (1,), qtype)[1 if transposed else 2]
    return over_experts(rows, width, groups, prepare)


def _kernel(stored: StoredExperts, qtype: str, dtype: jnp.dtype) -> jax.Array:
    """[E, D, F]."""
    return dequantize_kernel(*stored, (1,), qtype, dtype)


def _whole(stored: StoredExperts, gatherings: tuple[Gathering, Gathering]) -> StoredExperts:
    return StoredExperts(*(whole(gathering, array) for gathering, array in zip(gatherings, stored, strict=True)))
