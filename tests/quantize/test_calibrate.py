"""What goes into the products: against inputs worked out otherwise, in parts, beside experts and on eight devices."""

import dataclasses

import jax
import numpy as np
import pytest

from maxlite.errors import DataError
from maxlite.model.build import build_model
from maxlite.nn.norm import rms_normalize
from maxlite.parallel.sharding import use_mesh
from maxlite.quantize.calibrate import Place, calibration_batches, observed_inputs, places_of
from maxlite.quantize.tree import at_path, with_path
from maxlite.train.eval_setup import build_eval_setup, open_data
from tests.conftest import load_tiny
from tests.quantize.two_models import batch_of, noisy, setup_of

BLOCK = "group_0/layers/block_0"


def products_named(model, *names: str):
    return [product for product in model.products if product.path.split("/")[-1] in names]


def sums_of(rows: np.ndarray, batch) -> tuple[np.ndarray, np.ndarray]:
    """rows: [B, T, D] of a batch. Returns the two sums over its real tokens, in float64."""
    rows = np.asarray(rows, np.float64)[batch.segment_ids != 0]
    return rows.T @ rows, np.abs(rows).sum(axis=0)


def test_the_sums_are_those_of_what_each_layer_multiplies():
    """Of the second layer's query: its input is what a model of one layer gives, by the second one's norm."""
    config, setup = setup_of()
    params, batches = noisy(setup.model), [batch_of(0), batch_of(1)]
    shallow = build_model(dataclasses.replace(config.model, num_decoder_layers=1), config.compute)
    first = jax.tree.map(lambda leaf: leaf[:1], params["group_0"])
    norm = {"scale": at_path(params, f"{BLOCK}/attention_norm/scale")[1]}
    expected = np.zeros((64, 64)), np.zeros(64)
    one_layer = params | {"group_0": first, "final_norm": norm}
    run = jax.jit(lambda params, *tokens: shallow.apply(params, *tokens).hidden)
    for batch in batches:
        hidden = run(one_layer, batch.inputs, batch.positions, batch.segment_ids)
        expected = tuple(old + new for old, new in zip(expected, sums_of(hidden, batch), strict=True))
    out, query = products_named(setup.model, "query", "out")
    found = dict(observed_inputs(setup.model, params, [Place(query, 1), Place(out, 0)], batches))
    for ours, theirs in zip(found[Place(query, 1)], expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)
    assert found[Place(out, 0)].products.shape == (64, 64)


def test_the_first_layers_sums_by_hand_and_parts_of_them():
    _, setup = setup_of("num_decoder_layers=1")
    params, batch = noisy(setup.model), batch_of(2)
    embedded = np.asarray(params["embedding"]["table"])[batch.inputs]
    scale = at_path(params, f"{BLOCK}/attention_norm/scale")[0]
    expected, magnitudes = sums_of(rms_normalize(embedded, 1e-5) * scale, batch)
    places = places_of(products_named(setup.model, "query", "key", "down"))
    whole = list(observed_inputs(setup.model, params, places, [batch]))
    # Room for one of them at a time.
    parts = list(observed_inputs(setup.model, params, places, [batch], bytes_at_once=1))
    assert [place for place, _ in whole] == [place for place, _ in parts] == places
    for (_, one), (_, other) in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one.products, other.products, rtol=1e-5, atol=1e-4)
    for _, inputs in whole[:2]:
        np.testing.assert_allclose(inputs.products, expected, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(inputs.magnitudes, magnitudes, rtol=1e-4)
    assert whole[2][1].products.shape == (96, 96)


def test_layers_come_one_after_the_other():
    _, setup = setup_of("num_decoder_layers=3", "mlp_pattern=dense,dense")
    names = [(place.product.path, place.repeat) for place in places_of(products_named(setup.model, "up"))]
    assert names == [("group_0/block_0/mlp/up", layer) for layer in range(3)]


def test_eight_devices_see_what_one_sees_beside_experts_too():
    keys = ("num_experts=4", "num_experts_per_tok=2", "moe_mlp_dim=32", "mlp_pattern=moe", "num_decoder_layers=1")
    found = []
    for devices in (1, 8):
        degrees = (
            ("ici_fsdp_parallelism=2", "ici_expert_parallelism=2", "ici_data_parallelism=2") if devices == 8 else ()
        )
        config, setup = setup_of(*keys, *degrees, devices=devices)
        shardings = setup.model.shardings(setup.mesh, setup.rules)
        params = jax.device_put(noisy(setup.model), shardings)
        places = places_of(products_named(setup.model, "query", "out"))
        with use_mesh(setup.mesh, setup.rules, "highest", setup.execution):
            batches = [setup.place(batch_of(3))]
            found.append([inputs for _, inputs in observed_inputs(setup.model, params, places, batches)])
    for one, eight in zip(*found, strict=True):
        np.testing.assert_allclose(eight.products, one.products, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(eight.magnitudes, one.magnitudes, rtol=1e-4)


def test_batches_are_the_first_of_training(tmp_path):
    (tmp_path / "some.txt").write_text("some words " * 40)
    keys = ("dataset_type=text", f"dataset_path={tmp_path}", "vocab_size=320", "num_epoch=1", "calibration_steps=2")
    config = load_tiny(*keys, "cpu_devices=1", "per_device_batch_size=2", "jax_cache_dir=null")
    setup = build_eval_setup(config)
    dataset = open_data(config, setup)
    first = next(open_data(config, setup).train)
    batches = calibration_batches(config, setup, dataset)
    np.testing.assert_array_equal(np.asarray(batches[0].inputs), first.inputs)
    assert len(batches) == 2
    for _ in dataset.train:
        pass
    with pytest.raises(DataError, match="no batch to calibrate on"):
        calibration_batches(config, setup, dataset)


def test_a_model_that_gives_no_numbers_is_told_of():
    _, setup = setup_of("num_decoder_layers=1")
    params = noisy(setup.model)
    path = f"{BLOCK}/attention/value/kernel"
    params = with_path(params, path, at_path(params, path) * np.nan)
    places = places_of(products_named(setup.model, "query", "out"))
    with pytest.raises(DataError, match="the inputs of group_0/block_0/attention/out in repeat 0 are not finite"):
        list(observed_inputs(setup.model, params, places, [batch_of(4)]))
