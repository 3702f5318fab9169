"""Experts' rounded products against the product of each expert alone, on one device and in parts on several."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from maxlite.config.quant_schema import QuantRule
from maxlite.ops.experts import NOT_CUT, Gathering, from_experts, group_by_expert, row_groups, to_experts
from maxlite.ops.quantized import quantized_product
from maxlite.ops.quantized_experts import Cuts, quantized_grouped_product

INT8 = QuantRule(".*", "int8", "int8", "int8")
RULES = {
    "int8": INT8,
    "int4": INT8._replace(weight_qtype="int4"),
    "fp8": QuantRule(".*", "fp8", "fp8", "fp8_e5m2"),
    "forward": INT8._replace(bwd_qtype=None),
}
WHOLE = Cuts(NOT_CUT, (), (), ())
DIM, HIDDEN = 16, 24
# tokens, experts, choices: decoding, blocks of several sizes, and experts without a row.
CASES = {"decoding": (2, 8, 2), "some": (61, 3, 2), "many": (300, 2, 1)}


def inputs(case):
    """choices [T, k], slots [T x k, D], kernel [E, D, F], gradient [T x k, F], of expert 0 large ones."""
    tokens, experts, k = CASES[case]
    random = np.random.default_rng(0)
    choices = np.stack([random.permutation(experts)[:k] for _ in range(tokens)])
    shapes = ((tokens * k, DIM), (experts, DIM, HIDDEN), (tokens * k, HIDDEN))
    slots, kernel, gradient = (random.normal(size=shape).astype(np.float32) for shape in shapes)
    return choices, slots, kernel, gradient * (1 + 50 * (choices.reshape(-1) == 0))[:, None]


@functools.cache
def alone(name):
    """A program: one expert's rows, its matrix and a gradient give the product and both gradients."""

    def run(rows, kernel, gradient):
        product = functools.partial(quantized_product, "BTD,DF->BTF", rule=RULES[name])
        y, backward = jax.vjp(product, rows[None], kernel)
        of_rows, of_kernel = backward(gradient[None])
        return y[0], of_rows[0], of_kernel

    return jax.jit(run)


def one_by_one(name, choices, slots, kernel, gradient):
    """Each expert's rows through the rounded product of one matrix, as if all others were zeros."""
    y, slots_gradient, kernel_gradient = np.zeros_like(gradient), np.zeros_like(slots), np.zeros_like(kernel)
    for expert in range(kernel.shape[0]):
        mine = choices.reshape(-1) == expert
        if mine.any():
            made, of_rows, of_kernel = alone(name)(slots * mine[:, None], kernel[expert], gradient * mine[:, None])
            y[mine], slots_gradient[mine] = np.asarray(made)[mine], np.asarray(of_rows)[mine]
            kernel_gradient[expert] = of_kernel
    return y, slots_gradient, kernel_gradient


# The rounded types with blocks of one size after the other; how rows fall on blocks is alike for all.
@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("int8", case) for case in CASES),
        ("int4", "decoding"),
        ("fp8", "some"),
        ("fp8", "many"),
        ("forward", "some"),
    ],
)
def test_each_row_has_the_product_of_its_expert(case, name):
    choices, slots, kernel, gradient = inputs(case)

    @jax.jit
    def run(slots, kernel, gradient):
        places, groups = group_by_expert(jnp.asarray(choices, jnp.int32), kernel.shape[0])

        def product(slots, kernel):
            return from_experts(
                quantized_grouped_product(to_experts(slots, places), kernel, groups, WHOLE, RULES[name]), places
            )

        y, backward = jax.vjp(product, slots, kernel)
        return y, *backward(gradient)

    expected = one_by_one(name, choices, slots, kernel, gradient)
    for found, alone in zip(run(slots, kernel, gradient), expected, strict=True):
        np.testing.assert_allclose(found, alone, rtol=1e-4, atol=1e-4 * np.abs(alone).max())


@pytest.mark.parametrize("name", RULES)
def test_buffers_without_groups_are_the_same(name):
    random = np.random.default_rng(0)
    rows, kernel, gradient = (
        random.normal(size=shape).astype(np.float32) for shape in ((3, 9, DIM), (3, DIM, HIDDEN), (3, 9, HIDDEN))
    )

    @jax.jit
    def run(rows, kernel, gradient):
        y, backward = jax.vjp(lambda *both: quantized_grouped_product(*both, None, WHOLE, RULES[name]), rows, kernel)
        return y, *backward(gradient)

    choices = np.repeat(np.arange(3), 9)[:, None]
    expected = one_by_one(name, choices, rows.reshape(-1, DIM), kernel, gradient.reshape(-1, HIDDEN))
    for found, alone in zip(run(rows, kernel, gradient), expected, strict=True):
        np.testing.assert_allclose(np.asarray(found).reshape(alone.shape), alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("qtype", ["int8", "fp8"])
def test_both_ways_through_the_rows_give_the_same(qtype, monkeypatch):
    """The loop that a CPU runs, and the ragged products of other platforms."""
    choices, slots, kernel, gradient = inputs("some")
    rule = RULES[qtype]

    def traced():
        def run(slots, kernel, gradient):
            places, groups = group_by_expert(jnp.asarray(choices, jnp.int32), kernel.shape[0])
            rows = to_experts(slots, places)
            y, backward = jax.vjp(lambda *both: quantized_grouped_product(*both, groups, WHOLE, rule), rows, kernel)
            return from_experts(y, places), *backward(to_experts(gradient, places))

        return jax.jit(run).trace(slots, kernel, gradient)

    looped = traced().lower().compile()(slots, kernel, gradient)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arguments, cpu, default: default(*arguments))
    ragged = traced()
    assert "ragged_dot" in str(ragged.jaxpr) and "while" not in str(ragged.jaxpr)
    for found, expected in zip(ragged.lower().compile()(slots, kernel, gradient), looped, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("platform", "is_ragged"), [("cpu", False), ("tpu", True), ("cuda", True)])
def test_the_platform_that_is_compiled_for_decides(platform, is_ragged):
    rows, kernel = jax.ShapeDtypeStruct((12, DIM), jnp.bfloat16), jax.ShapeDtypeStruct((2, DIM, HIDDEN), jnp.bfloat16)

    def run(rows, kernel, sizes):
        return quantized_grouped_product(rows, kernel, row_groups(sizes, 8), WHOLE, INT8)

    sizes = jax.ShapeDtypeStruct((2,), jnp.int32)
    program = export.export(jax.jit(run), platforms=[platform])(rows, kernel, sizes).mlir_module()
    assert ("ragged_dot" in program) == is_ragged and "xi8>" in program


@pytest.mark.parametrize("is_down", [False, True])
def test_parts_on_devices_have_the_codes_of_the_whole(is_down):
    """Data x fsdp x tensor: rows apart, the embed dimension gathered, the hidden one in parts."""
    mesh = Mesh(
        np.array(jax.devices()[:8]).reshape(2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3
    )
    random = np.random.default_rng(0)
    size_in, size_out = (HIDDEN, DIM) if is_down else (DIM, HIDDEN)
    rows, kernel = random.normal(size=(4, 12, size_in)), random.normal(size=(3, size_in, size_out))
    gradient = random.normal(size=(4, 12, size_out))
    arrays = [array.astype(np.float32) for array in (rows, kernel, gradient)]
    hidden = ("tensor",)
    gathering = Gathering(("fsdp",), 2 if is_down else 1)
    cuts = Cuts(gathering, hidden if is_down else (), () if is_down else hidden, ("data", "fsdp"))
    batch = ("data", "fsdp")
    rows_spec, made_spec = P(batch, None, hidden if is_down else None), P(batch, None, None if is_down else hidden)
    kernel_spec = P(None, hidden, "fsdp") if is_down else P(None, "fsdp", hidden)

    def on_device(rows, kernel):
        """One row of the batch is a buffer of each expert's rows."""
        buffers = rows.reshape(3, -1, rows.shape[-1])
        y = quantized_grouped_product(buffers, kernel, None, cuts, INT8).reshape(*rows.shape[:2], -1)
        return jax.lax.psum(y, hidden) if is_down else y

    parts = jax.shard_map(on_device, mesh=mesh, in_specs=(rows_spec, kernel_spec), out_specs=made_spec, check_vma=False)

    def whole(rows, kernel):
        buffers = rows.reshape(4, 3, 4, -1).swapaxes(0, 1).reshape(3, 16, -1)
        y = quantized_grouped_product(buffers, kernel, None, WHOLE, INT8)
        return y.reshape(3, 4, 4, -1).swapaxes(0, 1).reshape(4, 12, -1)

    def both(function):
        def run(rows, kernel, gradient):
            y, backward = jax.vjp(function, rows, kernel)
            return y, *backward(gradient)

        return jax.jit(run)(*arrays)

    for found, expected in zip(both(parts), both(whole), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
