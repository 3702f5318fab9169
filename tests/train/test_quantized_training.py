"""Training with rounded products: the same on any mesh but for rounding, and as good as training with floats."""

import re

import jax
import numpy as np
import pytest

from tests.train.test_mesh_equality import MESHES, MODELS, PLAIN, degrees, run

# Stages and accumulation round the gradients of fewer rows at a time, by other scales: the noise of rounding is theirs.
EXACT, NOISY = 1e-2, 5e-2
CASES = [
    ("plain", "fsdp x tensor", EXACT),
    pytest.param("dense", "ring x tensor", EXACT, marks=pytest.mark.slow),
    pytest.param("dense", "stage x fsdp x tensor", NOISY, marks=pytest.mark.slow),
    pytest.param("dense", "accumulated, data x fsdp", NOISY, marks=pytest.mark.slow),
    pytest.param("moe", "expert x fsdp x tensor", 2e-2, marks=pytest.mark.slow),
    pytest.param("mla", "context x expert x data", 2e-2, marks=pytest.mark.slow),
]


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize(("model", "mesh", "tolerance"), CASES)
def test_a_mesh_rounds_as_one_device_does(model, mesh, tolerance):
    keys = (*({"plain": PLAIN} | MODELS)[model], "quantization=int8")
    expected_losses, expected_gradient, *_ = run((*keys, "cpu_devices=1"))
    losses, gradient, *_ = run((*keys, *degrees(MESHES[mesh])))
    # Later steps go apart where a last bit decides between two codes.
    np.testing.assert_allclose(losses[0], expected_losses[0], atol=1e-4)
    np.testing.assert_allclose(losses, expected_losses, atol=2e-2)
    found, expected = flat(gradient), flat(expected_gradient)
    assert np.linalg.norm(found - expected) < tolerance * np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_default_run_is_within_two_percent_of_floats_after_200_steps(run_maxlite, tmp_path):
    def loss(*overrides):
        arguments = ["train", "base.yml", "steps=200", *overrides, f"base_output_directory={tmp_path}"]
        finished = run_maxlite(arguments, timeout=1400)
        assert finished.code == 0, finished.stderr
        printed = finished.stdout + finished.stderr
        return float(re.findall(r"eval after train step 199, loss=([0-9.]+)", printed)[-1])

    floats, rounded = loss("run_name=floats"), loss("quantization=int8", "run_name=rounded")
    assert abs(rounded - floats) < 0.02 * floats
