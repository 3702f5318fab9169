"""Counts the arithmetic of a traced step, recomputation and all, by walking its jaxpr.

What metrics/flops.py counts is the model's work; this is the program's. Only matrix products are counted, two FLOP
for each multiply-add. XLA's own count takes the body of a loop once; here it is taken as often as it runs.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


def program_flops(jaxpr: Any, platform: str) -> int:
    """Returns the FLOP of one call over all devices. jaxpr: of `jitted.trace(...)`. platform: of the devices.

    A loop whose length depends on data counts once, and of the branches of a conditional the most costly; where the
    platform decides it is the platform's own.
    """
    return sum(_equation_flops(equation, platform) for equation in _open(jaxpr).eqns)


def _equation_flops(equation: Any, platform: str) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _dot_flops(equation)
    if name == "ragged_dot_general":
        return _ragged_dot_flops(equation)
    if name == "conv_general_dilated":
        return _convolution_flops(equation)
    if name == "pallas_call":
        return _kernel_flops(params, platform)
    inner = [program_flops(jaxpr, platform) for value in params.values() for jaxpr in _jaxprs(value)]
    if name == "cond":
        chosen = _branch_of(params.get("branches_platforms"), platform)
        return max(inner) if chosen is None else inner[chosen]
    if name == "scan":
        return params["length"] * sum(inner)
    if name == "shard_map":
        return _num_shards(params) * sum(inner)
    return sum(inner)


def _dot_flops(equation: Any) -> int:
    left = equation.invars[0].aval.shape
    (contracting, _), _ = equation.params["dimension_numbers"]
    return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracting)


def _ragged_dot_flops(equation: Any) -> int:
    """Each row meets one group's matrix; where rows are summed over, each meets all columns once."""
    rows, columns = (operand.aval.shape for operand in equation.invars[:2])
    result = equation.outvars[0].aval.shape
    numbers = equation.params["ragged_dot_dimension_numbers"]
    contracting = numbers.dot_dimension_numbers[0][0]
    if set(numbers.lhs_ragged_dimensions) & set(contracting):
        return 2 * math.prod(rows) * math.prod(columns) // math.prod(rows[axis] for axis in contracting)
    return 2 * math.prod(result) * math.prod(rows[axis] for axis in contracting)


def _convolution_flops(equation: Any) -> int:
    kernel = equation.invars[1].aval.shape
    out_feature_axis = equation.params["dimension_numbers"].rhs_spec[0]
    each = math.prod(kernel) // kernel[out_feature_axis]
    return 2 * math.prod(equation.outvars[0].aval.shape) * each


def _kernel_flops(params: dict[str, Any], platform: str) -> int:
    estimate = params.get("cost_estimate")
    if estimate is not None:
        return int(estimate.flops)
    steps = math.prod(size for size in params["grid_mapping"].grid if isinstance(size, int))
    return steps * program_flops(params["jaxpr"], platform)


def _branch_of(platforms: Sequence[Sequence[str] | None] | None, platform: str) -> int | None:
    """The branch of a `platform_dependent`; None for another conditional. platforms: of each branch, None of the last
    for those that are not named."""
    if platforms is None:
        return None
    # jax tells GPUs apart by their makers here, and nowhere else.
    names = {"cuda", "rocm"} if platform == "gpu" else {platform}
    return next(index for index, those in enumerate(platforms) if those is None or names & set(those))


def _num_shards(params: dict[str, Any]) -> int:
    shape = params["mesh"].shape
    manual = params.get("manual_axes", shape)
    return math.prod(shape[axis] for axis in manual)


def _jaxprs(value: Any) -> Iterator[Any]:
    if isinstance(value, ClosedJaxpr | Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _jaxprs(item)


def _open(jaxpr: Any) -> Any:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
