"""Rounded products inside of a model: under scan and remat, in the compiled program, and in what is kept."""

import contextlib
import io
import re

import jax
import numpy as np
import pytest

from maxlite.model.build import build_model

SMALL = ("emb_dim=32", "mlp_dim=48", "head_dim=8", "vocab_size=32")
MOE = ("mlp_pattern=moe", "num_experts=4", "moe_mlp_dim=24", "num_experts_per_tok=2")
TOKENS = np.asarray([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]], np.int32)
POSITIONS = np.broadcast_to(np.arange(8, dtype=np.int32), (2, 8))


def loss_of(tiny_config, *overrides):
    """A model and its loss as a function of the parameters."""
    config = tiny_config(*SMALL, *overrides)
    model = build_model(config.model, config.compute)

    def loss(params):
        return (model.logits(params, model.apply(params, TOKENS, POSITIONS).hidden) ** 2).mean()

    return model, loss


def gradients(tiny_config, noisy_params, *overrides):
    model, loss = loss_of(tiny_config, *overrides)
    return jax.jit(jax.value_and_grad(loss))(noisy_params(model))


def assert_near(found, expected, tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=tolerance), found, expected)


# What "full" multiplies is read from its program below.
QUICK = ("remat_policy=minimal_with_context_and_quantization",)


@pytest.mark.parametrize(
    ("overrides", "policies"),
    [
        ((), QUICK),
        pytest.param((), ("remat_policy=full",), marks=pytest.mark.slow),
        pytest.param(MOE, (*QUICK, "remat_policy=full"), marks=pytest.mark.slow),
    ],
    ids=["dense", "dense, full", "moe"],
)
def test_the_loop_and_remat_change_nothing(overrides, policies, tiny_config, noisy_params):
    keys = (*overrides, "quantization=int8")
    expected = gradients(tiny_config, noisy_params, *keys, "remat_policy=none", "scan_layers=false")
    model, loss = loss_of(tiny_config, *overrides)
    plain = float(jax.jit(loss)(noisy_params(model)))
    assert 1e-5 < abs(float(expected[0]) - plain) < 0.05 * plain
    for policy in policies:
        assert_near(gradients(tiny_config, noisy_params, *keys, policy), expected, 1e-4)


@pytest.mark.parametrize(("name", "dtype"), [("int8", "s8"), ("int4", "s8"), ("fp8", "f8")])
def test_the_compiled_step_multiplies_codes(name, dtype, tiny_config):
    model, loss = loss_of(tiny_config, f"quantization={name}")
    text = jax.jit(jax.grad(loss)).lower(model.abstract_params).as_text("hlo")
    products = [line for line in text.splitlines() if re.search(r" dot\(", line)]
    types = dict(re.findall(r"(\S+) = (\w+)\[[^\n]*", text))
    operands = [re.search(r" dot\((\S+), (\S+)\)", line).groups() for line in products]
    coded = [pair for pair in operands if all(types[operand].startswith(dtype) for operand in pair)]
    # Seven products forward, two for each backward, and again by remat all but the last, which nothing needs.
    assert len(coded) == 7 + 14 + 6


@pytest.mark.slow
def test_the_optimized_program_still_does(tiny_config):
    model, loss = loss_of(tiny_config, "quantization=int8")
    text = jax.jit(jax.grad(loss)).lower(model.abstract_params).compile().as_text()
    assert len(re.findall(r"= s32\[[^\n]* dot\(", text)) >= 21


@pytest.mark.parametrize(
    ("policy", "is_kept"),
    [("minimal", False), ("minimal_with_quantization", True), ("minimal_with_context_and_quantization", True)],
)
def test_policies_with_quantization_keep_the_codes(policy, is_kept, tiny_config):
    model, loss = loss_of(tiny_config, "quantization=int8", f"remat_policy={policy}", "scan_layers=false")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        jax.ad_checkpoint.print_saved_residuals(loss, model.abstract_params)
    kept = [line for line in printed.getvalue().splitlines() if line.startswith(("i8[", "int8["))]
    assert bool(kept) == is_kept
    # Codes of x and of the kernel of each of seven products.
    assert not is_kept or len(kept) == 14, printed.getvalue()


def test_a_cache_gives_the_hidden_states_of_the_whole_row(tiny_config, noisy_params, empty_cache):
    model, _ = loss_of(tiny_config, "quantization=int8")
    params, apply = noisy_params(model), jax.jit(model.apply)
    whole = apply(params, TOKENS, POSITIONS).hidden
    cached = apply(params, TOKENS, POSITIONS, np.ones_like(TOKENS), empty_cache(model, 2, 12)).hidden
    np.testing.assert_allclose(cached, whole, atol=1e-4)
