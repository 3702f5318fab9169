"""Perplexity and divergence of two models, against numpy on their whole logits and against the eval command's loss."""

import jax
import numpy as np
import pytest

from maxlite.parallel.sharding import use_mesh
from maxlite.quantize.measure import TextSums, build_text_step, on_host, text_report
from maxlite.train.evaluate import evaluate
from tests.quantize.two_models import batch_of, noisy, setup_of

SIZES = ("num_query_heads=4", "num_kv_heads=4")


def two_params(model, noise: float = 0.02):
    """Parameters, and the same with noise in every matrix."""
    whole, random = jax.tree.map(np.asarray, noisy(model)), np.random.default_rng(1)
    return whole, jax.tree.map(lambda leaf: leaf + np.float32(noise * random.normal(size=leaf.shape)), whole)


def measure(config, setup, params, batches) -> TextSums:
    step = build_text_step(config, setup, setup.model, setup.model)
    shardings = setup.model.shardings(setup.mesh, setup.rules)
    with use_mesh(setup.mesh, setup.rules, "default", setup.execution):
        placed = tuple(jax.device_put(own, shardings) for own in params)
        found = [on_host(step(placed, setup.place(batch))) for batch in batches]
    return jax.tree.map(lambda *parts: sum(parts), *found)


def reference(model, params, batches) -> np.ndarray:
    """Both losses, the divergence and the agreement by numpy, in float64."""
    totals = np.zeros(4)

    @jax.jit
    def whole_logits(params, *tokens):
        return model.logits(params, model.apply(params, *tokens).hidden)

    for batch in batches:
        logs = []
        for own in params:
            logits = np.asarray(whole_logits(own, batch.inputs, batch.positions, batch.segment_ids), np.float64)
            logs.append(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))
        counted = batch.loss_mask > 0
        losses = [-np.take_along_axis(log, batch.targets[..., None], -1)[..., 0][counted].sum() for log in logs]
        divergence = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)[counted].sum()
        totals += [*losses, divergence, (logs[0].argmax(-1) == logs[1].argmax(-1))[counted].sum()]
    return totals


def test_two_models_are_compared_as_numpy_does():
    config, setup = setup_of()
    params, batches = two_params(setup.model), [batch_of(0), batch_of(1)]
    found = text_report(measure(config, setup, params, batches))
    targets = int(sum(batch.loss_mask.sum() for batch in batches))
    whole, stored, divergence, agreed = reference(setup.model, params, batches)
    assert found.targets == targets
    assert found.whole_perplexity == pytest.approx(np.exp(whole / targets), rel=1e-5)
    assert found.stored_perplexity == pytest.approx(np.exp(stored / targets), rel=1e-5)
    assert found.divergence == pytest.approx(divergence / targets, rel=1e-4)
    assert found.agreement == agreed / targets
    assert 0.01 < found.divergence and 0.05 < found.agreement < 0.95


def test_a_model_beside_itself_has_divergence_zero_and_the_perplexity_of_the_eval_command():
    config, setup = setup_of()
    params, batches = two_params(setup.model)[0], [batch_of(2), batch_of(3)]
    found = text_report(measure(config, setup, (params, params), batches))
    assert found.divergence == pytest.approx(0, abs=1e-9) and found.agreement == 1
    with use_mesh(setup.mesh, setup.rules):
        tags = evaluate(setup, params, iter(batches), -1)
    assert found.whole_perplexity == found.stored_perplexity
    assert found.whole_perplexity == pytest.approx(tags["eval/avg_perplexity"], rel=1e-6)
    assert found.targets == tags["eval/total_weights"]


@pytest.fixture(scope="module")
def of_one_device():
    """Parameters of two models, batches, and what one device measures."""
    config, setup = setup_of(*SIZES)
    params, batches = two_params(setup.model), [batch_of(4)]
    return params, batches, measure(config, setup, params, batches)


@pytest.mark.parametrize(
    "keys",
    [
        ("ici_fsdp_parallelism=2", "ici_tensor_parallelism=4", "gradient_accumulation_steps=2"),
        ("ici_context_parallelism=4", "ici_data_parallelism=2"),
        ("ici_pipeline_parallelism=2", "ici_fsdp_parallelism=4", "num_vocab_tiling=5"),
    ],
    ids=("tensor, in two parts", "context", "stages"),
)
def test_eight_devices_measure_what_one_does(of_one_device, keys):
    params, batches, alone = of_one_device
    many = measure(*setup_of(*SIZES, *keys, devices=8), params, batches)
    np.testing.assert_allclose(many, alone, rtol=1e-5)
