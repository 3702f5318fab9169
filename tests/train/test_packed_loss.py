"""The loss of packed rows is that of their documents alone, for every way of packing and every attention (P29, P30)."""

import jax
import pytest

from maxlite.data.pipeline import build_dataset
from maxlite.parallel.sharding import use_mesh
from maxlite.train.eval_setup import build_eval_setup
from maxlite.train.evaluate import evaluate

WAYS = (
    ("packing=false",),
    ("packing=true", "packing_type=first_fit"),
    ("packing=true", "packing_type=best_fit", "max_segments_per_seq=2"),
    ("packing=true", "packing_type=first_fit", "enable_data_shuffling=false"),
)


@pytest.mark.parametrize("attention", ["dot_product", "flash"])
def test_packing_changes_no_loss(tiny_config, tmp_path, attention):
    """28 documents of 3 to 30 bytes: as many targets and the same sum of losses, however they share rows."""
    for index in range(28):
        (tmp_path / f"{index:02}.txt").write_text("the quick brown fox jumps over it"[: 3 + index])
    found, setup, params = [], None, None
    for way in WAYS:
        config = tiny_config(
            "dataset_type=text", f"eval_dataset_path={tmp_path}", f"dataset_path={tmp_path}", "vocab_size=258",
            f"attention={attention}", "per_device_batch_size=4", "cpu_devices=1", "max_target_length=48", *way,
        )  # fmt: skip
        # How rows are packed changes nothing of the compiled evaluation.
        setup = setup or build_eval_setup(config)
        with use_mesh(setup.mesh, setup.rules, config.compute.matmul_precision, setup.execution):
            dataset = build_dataset(config.data, vocab_size=258, batch_size=setup.rows)
            assert dataset.eval_batches is not None
            batches = list(dataset.eval_batches())
            params = params or jax.jit(setup.model.init)(jax.random.key(0))
            found.append((len(batches), evaluate(setup, params, iter(batches), -1)))
    # With both marks a document of n bytes has n + 1 targets.
    assert {tags["eval/total_weights"] for _, tags in found} == {sum(4 + index for index in range(28))}
    assert found[0][0] == 7 and all(count < 7 for count, _ in found[1:]), "nothing was packed"
    losses = [tags["eval/avg_loss"] for _, tags in found]
    assert losses == pytest.approx([losses[0]] * len(losses), abs=2e-6)
