"""The training step: exact accumulation, clipping, losses in float32, tiles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.data.batch import Batch
from maxlite.model.build import build_model
from maxlite.train.optimizer import build_optimizer, build_schedule
from maxlite.train.state import init_state
from maxlite.train.step import automatic_tiles, build_eval_step, build_loss, build_train_step
from tests.conftest import load_tiny

# The smallest program, of which most tests share one: batches have four rows.
SMALL = ("attention=dot_product", "remat_policy=none", "adam_weight_decay=0", "z_loss_multiplier=0.001")


def make_batch(lengths: list[int], length: int = 32, vocab_size: int = 64, seed: int = 0) -> Batch:
    """One row for each of `lengths`: that many real targets, then padding."""
    tokens = np.random.default_rng(seed).integers(0, vocab_size, (len(lengths), length + 1), np.int32)
    real = np.arange(length) < np.array(lengths)[:, None]
    positions = np.where(real, np.arange(length), 0).astype(np.int32)
    return Batch(
        np.where(real, tokens[:, :-1], 0),
        np.where(real, tokens[:, 1:], 0),
        real.astype(np.float32),
        positions,
        real.astype(np.int32),
    )


@functools.cache
def build_parts(*overrides: str):
    config = load_tiny(*{text.partition("=")[0]: text for text in (*SMALL, *overrides)}.values())
    model = build_model(config.model, config.compute)
    schedule = build_schedule(config.optimizer, config.train.steps)
    optimizer = build_optimizer(config.optimizer, schedule, model.decays)
    loss = build_loss(model, config.compute.num_vocab_tiling or 1, config.train.z_loss_multiplier)
    step = jax.jit(build_train_step(loss, optimizer, schedule, config.train, config.optimizer))
    state = jax.jit(lambda key: init_state(model, optimizer, key))(jax.random.key(0))
    return model, loss, step, state


def test_accumulation_equals_one_batch_with_unequal_rows():
    batches = [make_batch([3, 13, 32, 7], seed=seed) for seed in range(3)]
    results = []
    for more in ((), ("gradient_accumulation_steps=2",)):
        _, _, step, state = build_parts(*more)
        losses = []
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        results.append((losses, float(metrics["raw_grad_norm"]), state.params))
    assert float(metrics["total_weights"]) == 55
    (whole_losses, whole_norm, whole), (losses, norm, params) = results
    np.testing.assert_allclose(losses, whole_losses, atol=1e-6)
    np.testing.assert_allclose(norm, whole_norm, rtol=1e-5)
    for left, right in zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)


def test_the_loss_is_the_mean_over_real_targets_not_of_row_means():
    _, loss, step, state = build_parts()
    evaluate = jax.jit(build_eval_step(loss))
    # One document each, in a row of its own, and both.
    first, second, both = (make_batch(lengths) for lengths in ([3, 0, 0, 0], [0, 13, 0, 0], [3, 13, 0, 0]))
    sums = [evaluate(state.params, batch) for batch in (first, second)]
    means = [float(s.lm_loss) / float(s.targets) for s in sums]
    _, metrics = step(state, both)
    wanted = (3 * means[0] + 13 * means[1]) / 16
    assert float(metrics["lm_loss"]) == pytest.approx(wanted, abs=1e-5)
    assert abs(wanted - np.mean(means)) > 1e-3


def test_clipping_bounds_the_global_norm():
    keys = ("gradient_clipping_threshold=0.05", "opt_type=sgd", "learning_rate=1", "warmup_steps_fraction=0")
    _, _, step, state = build_parts(*keys)
    after, metrics = step(state, make_batch([32, 32]))
    moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), after.params, state.params)
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(moved)))
    assert float(metrics["raw_grad_norm"]) > 0.05
    assert float(metrics["grad_norm"]) == pytest.approx(0.05)
    assert norm == pytest.approx(0.05, rel=1e-4)


def test_a_batch_without_targets_logs_loss_0_and_moves_nothing_but_decay():
    _, _, step, state = build_parts()
    state, _ = step(state, make_batch([32, 32, 32, 32]))
    after, metrics = step(state, make_batch([0, 0, 0, 0]))
    assert float(metrics["current_learning_rate"]) > 0
    assert float(metrics["loss"]) == 0 and float(metrics["total_weights"]) == 0
    for left, right in zip(jax.tree.leaves(after.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(left, right)


def test_bfloat16_logits_are_summed_in_float32():
    model, loss, _, state = build_parts("dtype=bfloat16", "z_loss_multiplier=0.01", "num_vocab_tiling=3")
    batch = make_batch([5, 32])
    sums = jax.jit(build_eval_step(loss))(state.params, batch)
    hidden = jax.jit(model.apply)(state.params, batch.inputs, batch.positions, batch.segment_ids).hidden
    logits = np.asarray(model.logits(state.params, hidden), np.float64)
    normalizer = np.log(np.exp(logits).sum(-1))
    picked = np.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
    assert sums.lm_loss.dtype == jnp.float32
    assert float(sums.lm_loss) / 37 == pytest.approx(((normalizer - picked) * batch.loss_mask).sum() / 37, abs=1e-4)
    assert float(sums.z_loss) == pytest.approx(0.01 * (normalizer**2 * batch.loss_mask).sum(), rel=1e-4)


def test_packed_documents_give_the_loss_of_each_alone():
    keys = ("attention=autoselected", "attention_pattern=[full,local]", "sliding_window_size=4")
    model, loss, _, state = build_parts(*keys)
    alone = [make_batch([n], seed=n) for n in (5, 9, 7)]
    fields = []
    for name in Batch._fields[:5]:
        parts = [getattr(row, name)[0, :n] for row, n in zip(alone, (5, 9, 7), strict=True)]
        if name == "segment_ids":
            parts = [part * number for number, part in enumerate(parts, 1)]
        fields.append(np.pad(np.concatenate(parts), (0, 11))[None])
    packed = Batch(*fields)
    step = jax.jit(build_eval_step(loss))
    total = sum(float(step(state.params, row).lm_loss) for row in alone)
    assert float(step(state.params, packed).lm_loss) == pytest.approx(total, abs=1e-4)
    assert float(step(state.params, packed).targets) == 21
    changed = packed._replace(inputs=packed.inputs.copy())
    changed.inputs[0, 0] += 1
    apply = jax.jit(model.apply)
    hidden = [np.asarray(apply(state.params, b.inputs, b.positions, b.segment_ids).hidden) for b in (packed, changed)]
    assert np.abs(hidden[0][0, :5] - hidden[1][0, :5]).max() > 1e-3
    np.testing.assert_array_equal(hidden[0][0, 5:21], hidden[1][0, 5:21])


@pytest.mark.parametrize(("weight_dtype", "parts"), [("float32", 2), ("bfloat16", 1), ("bfloat16", 2)])
def test_a_step_changes_no_dtype_of_the_state(weight_dtype, parts):
    _, _, step, state = build_parts(f"weight_dtype={weight_dtype}", f"gradient_accumulation_steps={parts}")
    after, metrics = jax.eval_shape(step, state, make_batch([32, 9]))
    assert jax.tree.map(lambda leaf: leaf.dtype, after) == jax.tree.map(lambda leaf: leaf.dtype, state)
    assert {str(value.dtype) for value in metrics.values()} == {"float32"}


@pytest.mark.parametrize("tiles", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_the_number_of_tiles_changes_no_loss_and_no_gradient(tiles):
    batch = make_batch([32, 9, 0, 17])
    _, _, step, state = build_parts()
    _, _, tiled, _ = build_parts(f"num_vocab_tiling={tiles}")
    (_, one), (_, many) = step(state, batch), tiled(state, batch)
    for name in ("loss", "raw_grad_norm"):
        np.testing.assert_allclose(float(one[name]), float(many[name]), rtol=1e-5)


def test_automatic_tiles_bound_the_logits_of_one():
    assert automatic_tiles((4, 256), 264) == 1
    assert automatic_tiles((4, 512), 32000) == 4
    assert automatic_tiles((64, 4), 10**9) == 4
