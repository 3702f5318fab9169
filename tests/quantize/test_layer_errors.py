"""Errors of products, against numpy on the inputs that a model without compilation has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.nn.observe import observing
from maxlite.quantize.layer_errors import build_output_step, kernel_squares, layer_errors
from maxlite.quantize.measure import on_host
from tests.quantize.two_models import batch_of, float_kernel, node_of, two_models

INT4 = ("weight_quantization=int4", "weight_quant_tile_size=16")
EXPERTS = ("mlp_pattern=[moe]", "num_experts=4", "num_experts_per_tok=2", "moe_mlp_dim=32")

ONE = "num_decoder_layers=1"


def squares(setup, whole, stored, batches):
    kernels = on_host(kernel_squares(setup, whole, stored))
    step = build_output_step(setup, whole.model, stored.model)
    found = [on_host(step((whole.params, stored.params), setup.place(batch))) for batch in batches]
    return kernels, jax.tree.map(lambda *parts: sum(parts), *found)


def kernels_of(product, repeat, whole, stored) -> tuple[np.ndarray, np.ndarray]:
    """The kernel of one layer and what became of it, float64."""
    node = node_of(stored.params, product.params_path)
    form, dims = product.equipment.stored, product.summed_dims
    made = float_kernel(node["codes"][repeat], node["scale"][repeat], dims, form.qtype, jnp.dtype("float32"))
    kernel = node_of(whole.params, product.params_path)["kernel"][repeat]
    return np.asarray(kernel, np.float64), np.asarray(made, np.float64)


def given(product, x, groups, kernel) -> np.ndarray:
    """What a product gives, row by row where rows fall on experts."""
    if groups is None:
        return np.einsum(product.equation, x, kernel)
    expert = np.repeat(np.arange(len(groups.sizes)), groups.sizes)
    return np.einsum("RD,RDF->RF", x[: len(expert)], kernel[expert])


def inputs_of(whole, batch):
    """Path -> (x, groups) of each repeat, as the model calls its products."""

    @jax.jit
    def run(params, *tokens):
        found = {}
        with observing(lambda path, x, groups: found.setdefault(path, []).append((x, groups))):
            whole.model.apply(whole.model.unstack(params), *tokens)
        return found

    return run(whole.params, batch.inputs, batch.positions, batch.segment_ids)


def reference(whole, stored, batch) -> dict[tuple[str, int], float]:
    """(path, repeat) -> relative error of what a product gives."""
    calls, errors = inputs_of(whole, batch), {}
    for product in stored.model.products:
        for repeat, (x, groups) in enumerate(calls[product.path]):
            x = np.asarray(x, np.float64)
            if not product.is_experts:
                x = x * (batch.segment_ids > 0).reshape(*batch.segment_ids.shape, *[1] * (x.ndim - 2))
            y, rounded = (given(product, x, groups, kernel) for kernel in kernels_of(product, repeat, whole, stored))
            errors[product.path, repeat] = np.linalg.norm(rounded - y) / np.linalg.norm(y)
    return errors


@pytest.mark.parametrize(
    ("layers", "keys"),
    [(2, ()), (1, EXPERTS), (1, (*EXPERTS, "capacity_factor=2.0"))],
    ids=("dense", "experts", "capacity"),
)
def test_each_product_of_each_layer_has_the_error_that_numpy_finds(layers, keys):
    _, setup, whole, stored = two_models(*INT4, *keys, f"num_decoder_layers={layers}")
    batch = batch_of(0)
    errors = layer_errors(stored.model, *squares(setup, whole, stored, [batch]))
    expected = reference(whole, stored, batch)
    assert len(errors) == len(expected) == 7 * layers
    products = {product.path: product for product in stored.model.products}
    for error in errors:
        assert error.output == pytest.approx(expected[error.path, error.layer], rel=1e-4), error
        kernel, made = kernels_of(products[error.path], error.layer, whole, stored)
        assert error.kernel == pytest.approx(np.linalg.norm(made - kernel) / np.linalg.norm(kernel), rel=1e-4)
        assert 0.01 < error.output < 0.3 and error.size == error.output


def test_layers_are_counted_through_patterns_and_groups():
    keys = ("num_decoder_layers=5", "attention_pattern=[local,full]", "sliding_window_size=8", *INT4)
    _, setup, whole, stored = two_models(*keys)
    kernels = on_host(kernel_squares(setup, whole, stored))
    kernels["group_0/block_1/mlp/up"][1] = [9.0, 1.0]
    kernels["group_1/block_0/mlp/up"][0] = [16.0, 1.0]
    errors = layer_errors(stored.model, kernels, None)
    assert [error.layer for error in errors] == [layer for layer in range(5) for _ in range(7)]
    assert {error.layer: error.kernel for error in errors if error.kernel > 1} == {3: 3.0, 4: 4.0}


def test_only_what_is_rounded_has_errors_and_less_of_them_with_more_bits():
    path = "weight_quant_module_path=.*/mlp/.*"
    found = {}
    for qtype in ("int8", "int4"):
        _, setup, whole, stored = two_models(f"weight_quantization={qtype}", path)
        found[qtype] = layer_errors(stored.model, *squares(setup, whole, stored, [batch_of(1), batch_of(2)]))
    assert [error.name for error in found["int8"]] == ["mlp/down", "mlp/gate", "mlp/up"] * 2
    for fine, coarse in zip(found["int8"], found["int4"], strict=True):
        assert 10 * fine.output < coarse.output and 10 * fine.kernel < coarse.kernel


def test_without_text_kernels_alone_have_errors():
    _, setup, whole, stored = two_models(*INT4)
    errors = layer_errors(stored.model, on_host(kernel_squares(setup, whole, stored)), None)
    assert all(error.output is None and error.size == error.kernel > 0 for error in errors)


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        pytest.param((*EXPERTS, ONE), ("ici_expert_parallelism=4", "ici_fsdp_parallelism=2"), id="experts"),
        pytest.param((ONE,), ("ici_context_parallelism=4", "ici_fsdp_parallelism=2"), id="context"),
        pytest.param(
            (*EXPERTS, ONE), ("ici_tensor_parallelism=4", "ici_data_parallelism=2"), marks=pytest.mark.slow, id="tensor"
        ),
        pytest.param((), ("ici_pipeline_parallelism=2", "ici_fsdp_parallelism=4"), marks=pytest.mark.slow, id="stages"),
    ],
)
def test_eight_devices_find_what_one_does(model, mesh):
    keys = ("num_query_heads=4", "num_kv_heads=4", "weight_quantization=int8", *model)
    alone = squares(*two_models(*keys)[1:], [batch_of(3)])
    many = squares(*two_models(*keys, *mesh, devices=8)[1:], [batch_of(3)])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4), many, alone)
