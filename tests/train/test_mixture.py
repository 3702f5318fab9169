"""The loss of each source of a mixture: in a step, an evaluation and the files of a run."""

import json

import jax
import numpy as np
import pytest

from maxlite.data.batch import Batch
from maxlite.parallel.sharding import use_mesh
from maxlite.train.setup import build_setup
from maxlite.train.state import init_state
from maxlite.train.step import SOURCE_LOSSES, SOURCE_TARGETS

ROWS, LENGTH, VOCAB = 8, 32, 264


def mixture(tmp_path) -> str:
    """Three sources of which the last is used once and no more."""
    for name, text, count in (("a", "abcdefgh", 12), ("b", "xyz", 12), ("c", "0123456789", 4)):
        lines = [json.dumps({"text": text * number}) + "\n" for number in range(1, count + 1)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    rows = [f"{{path: {tmp_path}/{name}.jsonl, weight: {weight}}}" for name, weight in (("a", 2), ("b", 1))]
    return f"dataset_mixture=[{', '.join([*rows, f'{{path: {tmp_path}/c.jsonl, weight: 1, epochs: 1}}'])}]"


def batch_of_two_sources() -> Batch:
    """Rows of which each holds tokens of sources 0 and 2, none of 1; some targets do not count."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    cut = random.integers(4, LENGTH - 4, (ROWS, 1))
    places = np.arange(LENGTH)
    segments = np.where(places < cut, 1, 2).astype(np.int32)
    positions = np.where(places < cut, places, places - cut).astype(np.int32)
    mask = (random.random((ROWS, LENGTH)) < 0.7).astype(np.float32)
    sources = np.where(places < cut, 0, 2).astype(np.int32)
    return Batch(tokens[:, :-1], tokens[:, 1:], mask, positions, segments, sources)


MESHES = [
    ("one device", "cpu_devices=1 per_device_batch_size=8 attention=dot_product remat_policy=none"),
    (
        "accumulated, fsdp x context x tensor",
        "cpu_devices=8 ici_fsdp_parallelism=2 ici_context_parallelism=2 ici_tensor_parallelism=2 "
        "gradient_accumulation_steps=2",
    ),
]


@pytest.mark.parametrize("keys", [keys for _, keys in MESHES], ids=[name for name, _ in MESHES])
def test_the_mean_of_each_source_is_that_of_its_targets_alone(tiny_config, tmp_path, keys):
    common = ("dataset_type=jsonl", f"vocab_size={VOCAB}", "z_loss_multiplier=0.001", "num_vocab_tiling=2")
    setup = build_setup(tiny_config(mixture(tmp_path), *common, *keys.split()))
    assert setup.batches.source_names == ("a", "b", "c")
    assert setup.abstract_batch.source_ids.shape == (ROWS, LENGTH)
    batch = batch_of_two_sources()
    with use_mesh(setup.mesh, setup.rules, execution=setup.execution):
        shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract)
        start = jax.jit(lambda key: init_state(setup.model, setup.optimizer, key), out_shardings=shardings)
        state = start(jax.random.key(0))
        alone = []
        for source in (0, 2):
            part = batch._replace(loss_mask=batch.loss_mask * (batch.source_ids == source))
            alone.append(setup.eval_step(state.params, setup.place(part)))
        sums = setup.eval_step(state.params, setup.place(batch))
        _, metrics = setup.train_step(state, setup.place(batch))
    expected = [float(alone[0].lm_loss), 0.0, float(alone[1].lm_loss)]
    targets = [float(alone[0].targets), 0.0, float(alone[1].targets)]
    np.testing.assert_allclose(sums.source_losses, expected, rtol=1e-6)
    np.testing.assert_allclose(metrics[SOURCE_LOSSES], expected, rtol=2e-6)
    np.testing.assert_array_equal(sums.source_targets, targets)
    np.testing.assert_array_equal(metrics[SOURCE_TARGETS], targets)
    assert float(metrics["lm_loss"]) == pytest.approx(sum(expected) / sum(targets), abs=1e-5)
    assert targets[0] > 0 and targets[2] > 0


def test_without_a_mixture_the_step_knows_nothing_of_sources(tiny_config):
    setup = build_setup(tiny_config("cpu_devices=1"))
    assert setup.abstract_batch.source_ids is None
    with use_mesh(setup.mesh, setup.rules, execution=setup.execution):
        _, metrics = jax.eval_shape(setup.train_step, setup.abstract, setup.abstract_batch)
    assert not {SOURCE_LOSSES, SOURCE_TARGETS} & metrics.keys()


def test_a_run_logs_the_loss_of_each_source_where_it_has_targets(train, tmp_path):
    keys = (mixture(tmp_path), "dataset_type=jsonl", f"vocab_size={VOCAB}", "per_device_batch_size=2", "cpu_devices=1")
    rows_of = ("eval_fraction=0.3", "eval_steps=-1", "eval_interval=4", "steps=12", "enable_checkpointing=false")
    result = train(*keys, *rows_of, "max_target_length=64")
    lines = (result.run_directory / "metrics" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 12 and "NaN" not in "".join(lines)
    given = [{name for name in "abc" if f"learning/loss_{name}" in row} for row in rows]
    assert "c" in set().union(*given) and "c" not in given[-1], given
    assert all(names for names in given) and any("b" not in names for names in given)
    for row in rows:
        sources = [row[f"learning/loss_{name}"] for name in "abc" if f"learning/loss_{name}" in row]
        assert min(sources) - 1e-5 <= row["learning/lm_loss"] <= max(sources) + 1e-5
    evaluations = [row for row in rows if "eval/avg_loss" in row]
    assert len(evaluations) == 3
    for row in evaluations:
        sources = [row[f"eval/avg_loss_{name}"] for name in "abc"]
        assert min(sources) < row["eval/avg_loss"] < max(sources)
