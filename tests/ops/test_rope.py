"""Rotary embeddings: frequencies against the published formulas, rotations against their geometry."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.ops.rope import RopeScaling, apply_rope, inverse_frequencies, rotation

LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def published_llama3(head_dim: int, theta: float, scaling: RopeScaling) -> list[float]:
    """Llama 3.1's frequencies one by one, as its reference code states them."""
    frequencies = []
    for index in range(0, head_dim, 2):
        frequency = 1.0 / theta ** (index / head_dim)
        wavelength = 2 * math.pi / frequency
        longest_kept = scaling.original_max_position_embeddings / scaling.high_freq_factor
        shortest_stretched = scaling.original_max_position_embeddings / scaling.low_freq_factor
        if wavelength > shortest_stretched:
            frequency = frequency / scaling.factor
        elif wavelength >= longest_kept:
            smooth = scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor
            smooth /= scaling.high_freq_factor - scaling.low_freq_factor
            frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        frequencies.append(frequency)
    return frequencies


def test_plain_frequencies_are_powers_of_theta():
    np.testing.assert_allclose(inverse_frequencies(8, 10000.0, None), [1.0, 0.1, 0.01, 0.001], rtol=1e-7)
    assert inverse_frequencies(8, 10000.0, RopeScaling()).dtype == np.float32


def test_linear_scaling_divides_every_frequency():
    plain = inverse_frequencies(16, 500000.0, None)
    np.testing.assert_allclose(inverse_frequencies(16, 500000.0, RopeScaling("linear", 4.0)), plain / 4.0, rtol=1e-6)


@pytest.mark.parametrize("scaling", [LLAMA3, RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)])
def test_llama3_scaling_matches_the_published_formula(scaling: RopeScaling):
    got = inverse_frequencies(128, 500000.0, scaling)
    np.testing.assert_allclose(got, published_llama3(128, 500000.0, scaling), rtol=1e-6)
    plain = inverse_frequencies(128, 500000.0, None)
    assert got[0] == plain[0]
    np.testing.assert_allclose(got[-1], plain[-1] / scaling.factor, rtol=1e-6)


@pytest.mark.parametrize("arguments", [("yarn",), ("linear", 0.0), ("llama3", 8.0, 4.0, 4.0)])
def test_bad_scaling_is_refused(arguments: tuple):
    with pytest.raises(ValueError, match="rope scaling"):
        RopeScaling(*arguments)


def test_odd_head_dim_is_refused():
    with pytest.raises(ValueError, match="even head_dim"):
        inverse_frequencies(7, 10000.0, None)


def test_apply_rope_turns_feature_pairs_as_complex_numbers():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(2, 5, 3, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [7, 8, 100, 101, 4000]], np.int32)
    frequencies = inverse_frequencies(8, 10000.0, None)
    got = apply_rope(jnp.asarray(x), *rotation(jnp.asarray(positions), frequencies))
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[..., None] * frequencies.astype(np.float64))[
        :, :, None
    ]
    np.testing.assert_allclose(got, np.concatenate([turned.real, turned.imag], axis=-1), atol=2e-3)
    np.testing.assert_allclose(got[0], np.concatenate([turned.real, turned.imag], axis=-1)[0], atol=1e-5)


def test_scores_depend_on_relative_positions_only():
    generator = np.random.default_rng(1)
    query, key = (jnp.asarray(generator.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))
    frequencies = inverse_frequencies(16, 10000.0, None)

    def score(query_position: int, key_position: int) -> float:
        turned = [
            apply_rope(x, *rotation(jnp.full((1, 1), position, jnp.int32), frequencies))
            for x, position in ((query, query_position), (key, key_position))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(3, 1) == pytest.approx(score(103, 101), abs=1e-4)


def test_bfloat16_keeps_its_dtype_and_rounds_once():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 4, 2, 8)), jnp.bfloat16)
    angles = rotation(jnp.arange(4, dtype=jnp.int32)[None], inverse_frequencies(8, 10000.0, None))
    got = apply_rope(x, *angles)
    assert got.dtype == jnp.bfloat16
    assert (got == apply_rope(x.astype(jnp.float32), *angles).astype(jnp.bfloat16)).all()


@pytest.mark.torch
@pytest.mark.parametrize("scaling", [RopeScaling(), RopeScaling("linear", 4.0), LLAMA3])
def test_frequencies_match_transformers(scaling: RopeScaling):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = inverse_frequencies(64, 500000.0, scaling)
    parameters = {"rope_type": scaling.kind, "rope_theta": 500000.0, "factor": scaling.factor}
    if scaling.kind == "llama3":
        parameters |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position_embeddings,
        }
    if scaling.kind == "none":
        parameters = {"rope_type": "default", "rope_theta": 500000.0}
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=131072, rope_parameters=parameters
    )
    if scaling.kind == "none":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        published = LlamaRotaryEmbedding(config).inv_freq
    else:
        published, _ = ROPE_INIT_FUNCTIONS[scaling.kind](config, "cpu")
    np.testing.assert_allclose(plain, published.numpy(), rtol=1e-6)
