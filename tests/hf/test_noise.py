"""The golden logits belong to these very weights."""

import numpy as np

from tests.hf.noise import noise, noise_kind, noisy_tensors

EXPECTED = [[0.07534107565879822, -0.06860031932592392], [0.23158079385757446, -0.054061904549598694]]


def test_noise_is_the_same_everywhere():
    found = noise("model.norm.weight", (2, 2))
    np.testing.assert_array_equal(found, np.array(EXPECTED, np.float32))
    np.testing.assert_array_equal(noise("model.norm.weight", (2, 2), "scale"), found + np.float32(1))


def test_noise_depends_on_the_name():
    assert not np.array_equal(noise("a", (64,)), noise("b", (64,)))
    assert 0.13 < noise("a", (4096,)).std() < 0.17


def test_norms_are_around_one_unless_they_are_offsets():
    assert noise_kind("model.layers.0.input_layernorm.weight", "llama") == "scale"
    assert noise_kind("model.layers.0.input_layernorm.weight", "gemma2") == "plain"
    assert noise_kind("model.layers.0.self_attn.q_proj.weight", "llama") == "plain"
    for name in ("post_feedforward_layernorm_1.weight", "layer_scalar", "router.scale", "router.per_expert_scale"):
        assert noise_kind(f"model.layers.0.{name}", "gemma4_text") == "scale"
    assert 0.9 < noisy_tensors({"model.norm.weight": (64,)}, "llama")["model.norm.weight"].mean() < 1.1
