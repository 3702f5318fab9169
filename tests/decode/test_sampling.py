"""Which tokens may be drawn (case P44) and how draws depend on seed, row and step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.decode.sampling import Cuts, build_sampler, candidates

NUM_DRAWS = 2000


@pytest.fixture
def section(tiny_config):
    """section(strategy, top_k=...): the decode section with the keys that begin with decode_sampling_."""

    def make(strategy, seed=0, **keys):
        named = {f"decode_sampling_{name}": value for name, value in {"strategy": strategy, **keys}.items()}
        return dataclasses.replace(tiny_config().decode, decode_seed=seed, **named)

    return make


def draw(section, probabilities):
    logits = np.broadcast_to(np.log(np.array(probabilities, np.float32)), (NUM_DRAWS, len(probabilities)))
    return np.asarray(build_sampler(section)(jnp.asarray(logits), jnp.arange(NUM_DRAWS), jnp.int32(0)))


@pytest.mark.parametrize(
    ("probabilities", "strategy", "keys", "expected"),
    [
        ([0.4, 0.3, 0.2, 0.1], "nucleus", {"nucleus_p": 0.8}, {0, 1, 2}),
        ([0.4, 0.3, 0.2, 0.1], "nucleus", {"nucleus_p": 0.65}, {0, 1}),
        ([0.1, 0.2, 0.3, 0.4], "nucleus", {"nucleus_p": 0.65}, {2, 3}),
        ([0.9, 0.04, 0.03, 0.03], "nucleus", {"nucleus_p": 0.5}, {0}),
        ([0.2, 0.5, 0.2, 0.1], "nucleus", {"nucleus_p": 0.0}, {1}),
        ([0.3, 0.3, 0.3, 0.1], "nucleus", {"nucleus_p": 0.5}, {0, 1}),
        ([0.3, 0.3, 0.3, 0.1], "nucleus", {"nucleus_p": 1.0}, {0, 1, 2, 3}),
        ([0.1, 0.3, 0.3, 0.3], "topk", {"top_k": 2}, {1, 2}),
        ([0.4, 0.3, 0.2, 0.1], "topk", {"top_k": 99}, {0, 1, 2, 3}),
        ([0.4, 0.3, 0.2, 0.1], "topk", {"top_k": 0}, {0, 1, 2, 3}),
        ([0.4, 0.3, 0.2, 0.1], "topk", {"top_k": 1}, {0}),
        ([0.4, 0.3, 0.2, 0.1], "weighted", {}, {0, 1, 2, 3}),
        ([0.4, 0.3, 0.2, 0.1], "weighted", {"temperature": 0.0}, {0}),
        ([0.4, 0.3, 0.2, 0.1], "composite", {"temperature": 0.0, "top_k": 3}, {0}),
        ([0.4, 0.3, 0.2, 0.1], "composite", {"min_p": 0.6}, {0, 1}),
        ([0.4, 0.3, 0.2, 0.1], "composite", {}, {0, 1, 2, 3}),
        # After the cut to three tokens the first has 4/9 < 0.6, and the first two 7/9.
        ([0.4, 0.3, 0.2, 0.1], "composite", {"top_k": 3, "nucleus_p": 0.6}, {0, 1}),
        # At temperature 0.5 they have 16, 9, 4 and 1 of 30.
        ([0.4, 0.3, 0.2, 0.1], "composite", {"temperature": 0.5, "nucleus_p": 0.8}, {0, 1}),
        ([0.4, 0.3, 0.2, 0.1], "greedy", {}, {0}),
        ([0.1, 0.4, 0.4, 0.1], "greedy", {}, {1}),
    ],
)
def test_draws_exactly_the_kept_tokens(section, probabilities, strategy, keys, expected):
    assert set(draw(section(strategy, **keys), probabilities).tolist()) == expected


def kept_by_numpy(row, cuts):
    """The same rules, token by token in float64."""
    values = row.astype(np.float64) / cuts.temperature
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    order = order[: cuts.top_k or None]
    weights = np.exp(values[order] - values[order[0]])
    shares = weights / weights.sum()
    kept, total = [], 0.0
    for token, share in zip(order, shares, strict=True):
        if kept and cuts.nucleus_p < 1 and total >= cuts.nucleus_p:
            break
        total += share
        kept.append(token)
    return {token for token in kept if np.exp(values[token] - values[order[0]]) >= cuts.min_p}


@pytest.mark.parametrize(
    "cuts",
    [
        Cuts(),
        Cuts(0.7),
        Cuts(top_k=5),
        Cuts(1.3, nucleus_p=0.77),
        Cuts(min_p=0.05),
        Cuts(0.9, top_k=20, nucleus_p=0.6, min_p=0.11),
    ],
)
def test_candidates_equal_numpy(cuts):
    logits = np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32) * 2
    kept, ids = map(np.asarray, candidates(jnp.asarray(logits), cuts))
    for row in range(50):
        tokens = ids[row][np.isfinite(kept[row])]
        assert set(tokens.tolist()) == kept_by_numpy(logits[row], cuts)
        # Logits count up to a constant: they come back with the best one at 0.
        scaled = (logits[row][tokens] - logits[row].max()) / cuts.temperature
        np.testing.assert_allclose(kept[row][np.isfinite(kept[row])], scaled, rtol=1e-5, atol=1e-6)


def test_a_temperature_near_0_draws_the_best_token(section):
    assert set(draw(section("weighted", temperature=1e-40), [0.2, 0.5, 0.2, 0.1]).tolist()) == {1}


def test_frequencies_follow_the_temperature(section):
    found = np.bincount(draw(section("weighted", temperature=2.0), [0.64, 0.16, 0.04, 0.16]), minlength=4) / NUM_DRAWS
    # Square roots: 8, 4, 2, 4 of 18. Three standard deviations of 2,000 draws are 0.033.
    np.testing.assert_allclose(found, np.array([8, 4, 2, 4]) / 18, atol=0.035)


def test_a_row_does_not_depend_on_its_neighbours(section):
    sampler = jax.jit(build_sampler(section("weighted")))
    logits, rows = np.random.default_rng(1).normal(size=(8, 64)).astype(np.float32), np.arange(8)
    together = sampler(logits, rows, np.int32(3))
    alone = [int(sampler(logits[row : row + 1], rows[row : row + 1], np.int32(3))[0]) for row in range(8)]
    assert together.tolist() == alone


def test_seed_row_and_step_each_change_the_draw(section):
    logits, rows = np.zeros((64, 64), np.float32), np.arange(64)
    of_zero, of_one = (jax.jit(build_sampler(section("weighted", seed=seed))) for seed in (0, 1))
    first, again, step = (np.asarray(of_zero(logits, rows, np.int32(step))) for step in (0, 0, 1))
    assert first.tolist() == again.tolist()
    for other in (np.asarray(of_one(logits, rows, np.int32(0))), step, np.roll(first, 1)):
        assert np.mean(first == other) < 0.2
