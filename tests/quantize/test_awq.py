"""AWQ: folding changes no function, and the factors found lose less than none."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.config.load import load_config
from maxlite.model.build import build_model
from maxlite.nn.equipment import StoredForm
from maxlite.quantize.awq import apply_factors, find_folds, fold_input_scales, search_factors
from maxlite.quantize.calibrate import Inputs
from maxlite.quantize.tree import at_path, has_path, with_path
from tests.quantize.two_models import batch_of, float_kernel, noisy, round_kernel, rounded_params, two_models

QWEN3_NEXT = {
    "attention_norm -> query key value gate beta step",
    "attention_norm -> query key value gate",
    "mlp/shared/up -> down",
}
DEEPSEEK2 = {
    "attention_norm -> query key_value_a",
    "attention/key_value_a_norm -> key_value_b",
    "mlp_norm -> gate up",
    "mlp/up -> down",
    "mlp/shared/up -> down",
}
GEMMA4 = {"attention_norm -> query key value", "mlp/dense_norm -> gate up", "mlp/dense/up -> down"}
FOLDS = {
    "qwen3-next-80b-a3b": QWEN3_NEXT,
    "deepseek2-lite-16b": DEEPSEEK2,
    "gemma4-26b-a4b": GEMMA4 | {"attention_norm -> query key"},
    # Its gate joins no multiple of up.
    "gpt-oss-20b": {"attention_norm -> query key value"},
    # Norms stand behind the products alone.
    "olmo2-1b": {"mlp/up -> down"},
}


@pytest.mark.parametrize("name", FOLDS)
def test_folding_changes_no_function(name):
    keys = [f"model={name}", "smoke=true", "dtype=float32", "weight_dtype=float32", "dataset_type=synthetic"]
    config = load_config("base.yml", keys, {})
    stored = load_config("base.yml", [*keys, "weight_quantization=int4"], {})
    model, stored_model = build_model(config.model, config.compute), build_model(stored.model, stored.compute)
    before, folds = noisy(model), []
    random, described = np.random.default_rng(0), set()
    for fold in find_folds(before, stored_model):
        repeats, *_ = kernel_shape = at_path(before, fold.consumers[0])["kernel"].shape
        folds.append((fold, np.exp(random.normal(size=(repeats, kernel_shape[1]))).astype(np.float32)))
        consumers = " ".join(path.split("/")[-1] for path in fold.consumers)
        described.add(f"{fold.source.split('/', 3)[3]} -> {consumers}")
    assert described == FOLDS[name]

    @jax.jit
    def folded(params, factors):
        for (fold, _), own in zip(folds, factors, strict=True):
            params = apply_factors(params, fold, own, config.model.norm_scale_offset)
        return params

    after = folded(before, [factors for _, factors in folds])
    tokens = random.integers(0, config.model.vocab_size, (1, 16))
    run = jax.jit(lambda params: model.apply(params, tokens, np.arange(16)[None]).hidden)
    np.testing.assert_allclose(run(after), run(before), rtol=2e-3, atol=2e-3)


def test_a_factor_that_a_norms_dtype_cannot_hold_is_undone_as_it_was_held():
    _, _, whole, stored = two_models(
        "weight_dtype=bfloat16", "norm_scale_offset=1.0", "weight_quantization=int4", "num_decoder_layers=1"
    )
    fold = next(fold for fold in find_folds(whole.params, stored.model) if fold.source.endswith("attention_norm"))
    silent = at_path(whole.params, fold.source)["scale"].at[0, 3].set(-1.0)
    params = with_path(whole.params, f"{fold.source}/scale", silent)
    factors = jnp.asarray(np.exp(np.random.default_rng(1).normal(size=(1, 64))), jnp.float32)
    folded = apply_factors(params, fold, factors, 1.0)

    def rows(params):
        norm = np.float32(at_path(params, fold.source)["scale"])[0] + 1.0
        return norm[:, None] * np.float32(at_path(params, fold.consumers[0])["kernel"])[0].reshape(64, -1)

    assert at_path(folded, fold.source)["scale"].dtype == jnp.bfloat16
    # A kernel's element has 8 bits; the norm's error would come on top.
    np.testing.assert_allclose(rows(folded), rows(params), rtol=2**-8)
    assert not np.any(rows(folded)[3])


def test_the_factors_found_lose_less_than_none():
    random = np.random.default_rng(2)
    sizes = np.ones(64)
    sizes[[5, 40]] = 30.0
    x = np.float32(random.normal(size=(256, 64)) * sizes)
    matrix = np.float32(random.normal(size=(64, 32)))
    for form, most in ((StoredForm("int4", None), 0.75), (StoredForm("int4", 16), 0.9)):
        inputs = Inputs(jnp.asarray(x.T @ x), jnp.asarray(np.abs(x).sum(axis=0)))
        factors = np.asarray(search_factors(jnp.asarray(matrix), inputs, form))[:, None]
        assert factors[5] > factors[6]

        def lost(factors, form=form):
            codes, scale = round_kernel(np.float32(matrix * factors), (0,), form.qtype, form.tile_size)
            rounded = np.asarray(float_kernel(codes, scale, (0,), form.qtype, jnp.dtype("float32"))) / factors
            return np.linalg.norm(x @ (rounded - matrix))

        assert lost(factors) < most * lost(np.ones((64, 1)))


def test_inputs_that_never_come_leave_all_as_it_is():
    matrix = jnp.asarray(np.random.default_rng(3).normal(size=(16, 4)), jnp.float32)
    factors = search_factors(matrix, Inputs(jnp.zeros((16, 16)), jnp.zeros(16)), StoredForm("int4", None))
    np.testing.assert_allclose(factors, np.ones(16))


@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_a_model_is_folded_where_its_kernels_are_stored(devices):
    _, setup, whole, stored = two_models(
        "weight_quantization=int4", "weight_quant_module_path=.*/(query|up|down|out)", devices=devices
    )
    notes = io.StringIO()
    batches = [setup.place(batch_of(0))]
    params = fold_input_scales(whole, stored.model, batches, notes)
    assert notes.getvalue() == (
        "Rounded to nearest as they are, where AWQ does not reach: group_0/block_0/attention/out x 2 layers\n"
    )
    changed = {
        path
        for path in ("attention_norm/scale", "attention/key/kernel", "attention/out/kernel", "mlp/gate/kernel")
        if not np.array_equal(*(at_path(tree, f"group_0/layers/block_0/{path}") for tree in (params, whole.params)))
    }
    # key's kernel is not stored, and multiplies the same inputs as query's.
    assert changed == {"attention_norm/scale", "attention/key/kernel", "mlp/gate/kernel"}
    tokens = np.asarray(batches[0].inputs)[:1]
    run = jax.jit(lambda params: whole.model.apply(params, tokens, np.arange(tokens.shape[1])[None]).hidden)
    np.testing.assert_allclose(run(params), run(whole.params), rtol=1e-3, atol=1e-4)
    assert has_path(rounded_params(params, stored.model), "group_0/layers/block_0/mlp/up/codes")
