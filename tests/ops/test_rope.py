"""Rotary embeddings: frequencies against the published formulas, rotations against their geometry."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.ops.rope import RopeScaling, apply_rope, inverse_frequencies, rotation

LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
# Llama 4's: no range between the kept and the stretched wavelengths.
LLAMA4 = RopeScaling("llama3", 16.0, 1.0, 1.0, 8192)
YARN = RopeScaling("yarn", 40.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
# name -> (theta, width of what turns, scaling, factor of cosines and sines, factor of the scores); the numbers are
# published ones or follow from the papers' formulas.
YARNS = {
    "deepseek 3": (1e4, 64, YARN, 1.0, 1.8738),
    "deepseek 2": (1e4, 64, dataclasses.replace(YARN, mscale=0.707, mscale_all_dim=0.707), 1.0, 1.5896),
    "kimi k2": (5e4, 64, dataclasses.replace(YARN, factor=32.0, beta_fast=1.0), 1.0, 1.8133),
    "gpt-oss": (1.5e5, 64, RopeScaling("yarn", 32.0, original_max_position_embeddings=4096, truncate=False), 1.3466, 1),
    "olmo 3": (5e5, 128, RopeScaling("yarn", 8.0), 1.2079, 1),
    "two mscales": (1e4, 64, dataclasses.replace(YARN, mscale_all_dim=0.5), 1.1557, 1.4029),
    "mscale alone": (1e4, 64, dataclasses.replace(YARN, mscale_all_dim=None), 1.3689, 1),
    "explicit": (1e4, 64, dataclasses.replace(YARN, attention_factor=0.9), 0.9, 1.8738),
    "no ramp": (1e4, 64, dataclasses.replace(YARN, beta_fast=2.0, beta_slow=2.0, truncate=False), 1.0, 1.8738),
    "short original": (1e6, 32, dataclasses.replace(YARN, original_max_position_embeddings=64), 1.0, 1.8738),
    "long original": (
        1e2,
        8,
        RopeScaling("yarn", 4.0, original_max_position_embeddings=131072, beta_fast=2e3),
        1.1386,
        1,
    ),
    "shrinking": (1e4, 64, RopeScaling("yarn", 0.5, original_max_position_embeddings=4096), 1.0, 1),
}


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


def published_yarn(dim: int, theta: float, scaling: RopeScaling) -> list[float]:
    """Yarn's frequencies one by one: the ramp's ends are pairs whose wavelength fits beta times into the original."""
    ends = []
    for beta in (scaling.beta_fast, scaling.beta_slow):
        radians_per_turn = scaling.original_max_position_embeddings / (2 * math.pi * beta)
        ends.append(dim / 2 * math.log(radians_per_turn, theta))
    if scaling.truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], dim - 1)
    last = last + 0.001 if first == last else last
    frequencies = []
    for pair in range(dim // 2):
        stretched = min(max((pair - first) / (last - first), 0.0), 1.0)
        plain = 1.0 / theta ** (2 * pair / dim)
        frequencies.append(plain * (1.0 - stretched) + plain / scaling.factor * stretched)
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


def test_llama3_scaling_without_a_range_between_is_a_step():
    plain, got = inverse_frequencies(128, 500000.0), inverse_frequencies(128, 500000.0, LLAMA4)
    slow = 2 * math.pi / plain.astype(np.float64) > 8192
    assert 0 < slow.sum() < 64
    np.testing.assert_allclose(got, np.where(slow, plain / 16.0, plain), rtol=1e-6)


@pytest.mark.parametrize(("theta", "dim", "scaling", "rotation_factor", "softmax_factor"), YARNS.values(), ids=YARNS)
def test_yarn_matches_the_published_formula(theta, dim, scaling, rotation_factor, softmax_factor):
    got = inverse_frequencies(dim, theta, scaling)
    np.testing.assert_allclose(got, published_yarn(dim, theta, scaling), rtol=1e-6)
    assert scaling.rotation_factor == pytest.approx(rotation_factor, abs=6e-5)
    assert scaling.softmax_factor == pytest.approx(softmax_factor, abs=6e-5)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    plain, got = inverse_frequencies(64, 10000.0), inverse_frequencies(64, 10000.0, YARN)
    np.testing.assert_allclose(got[:11], plain[:11], rtol=1e-6)
    np.testing.assert_allclose(got[23:], plain[23:] / 40.0, rtol=1e-6)
    assert ((got[11:23] < plain[11:23]) & (got[11:23] > plain[11:23] / 40.0)).all()


def test_other_kinds_have_no_factors():
    for scaling in (RopeScaling(), RopeScaling("linear", 4.0), LLAMA3, RopeScaling("linear", 4.0, mscale_all_dim=1.0)):
        assert scaling.rotation_factor == scaling.softmax_factor == 1.0


@pytest.mark.parametrize(
    "arguments",
    [
        {"kind": "longrope"},
        {"kind": "linear", "factor": 0.0},
        {"kind": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 1.0},
        {"kind": "llama3", "original_max_position_embeddings": 0},
        {"kind": "yarn", "original_max_position_embeddings": 0},
        {"kind": "yarn", "beta_fast": 1.0, "beta_slow": 32.0},
        {"kind": "yarn", "beta_slow": 0.0},
    ],
)
def test_bad_scaling_is_refused(arguments: dict):
    with pytest.raises(ValueError, match="rope scaling"):
        RopeScaling(**arguments)


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


def test_rotation_is_multiplied_by_its_factor():
    positions, frequencies = jnp.arange(6, dtype=jnp.int32)[None], inverse_frequencies(8, 10000.0)
    for plain, grown in zip(rotation(positions, frequencies), rotation(positions, frequencies, 1.25), strict=True):
        np.testing.assert_allclose(grown, 1.25 * plain, rtol=1e-6)
        assert grown.dtype == jnp.float32


@pytest.mark.parametrize("interleave", [False, True])
def test_features_behind_the_rotary_ones_pass_through(interleave: bool):
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, 5, 3, 16)), jnp.float32)
    positions = jnp.tile(jnp.arange(5, dtype=jnp.int32), (2, 1))
    angles = rotation(positions, inverse_frequencies(4, 10000.0))
    got = apply_rope(x, *angles, interleave)
    np.testing.assert_array_equal(got[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(got[..., :4], apply_rope(x[..., :4], *angles, interleave))
    assert (np.abs(got - x)[:, 1:, :, :4] > 0).all()


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_interleaved_products_match_complex_numbers(rotary_dim: int):
    generator = np.random.default_rng(4)
    query, key = (generator.normal(size=(2, 7, 3, 16)) for _ in range(2))
    positions = np.array([np.arange(7), np.arange(7) + 50])
    frequencies = inverse_frequencies(rotary_dim, 10000.0)
    turns = np.exp(1j * positions[..., None] * frequencies.astype(np.float64))[:, :, None]

    def complex_product() -> np.ndarray:
        pairs = [(x[..., :rotary_dim:2] + 1j * x[..., 1:rotary_dim:2]) * turns for x in (query, key)]
        rest = np.einsum("btnh,bsnh->bnts", query[..., rotary_dim:], key[..., rotary_dim:])
        return np.einsum("btnh,bsnh->bnts", pairs[0], pairs[1].conj()).real + rest

    angles = rotation(jnp.asarray(positions, jnp.int32), frequencies)
    got = [np.asarray(apply_rope(jnp.asarray(x, jnp.float32), *angles, interleave=True)) for x in (query, key)]
    np.testing.assert_allclose(np.einsum("btnh,bsnh->bnts", *got), complex_product(), atol=1e-4)
    half_split = [np.asarray(apply_rope(jnp.asarray(x, jnp.float32), *angles)) for x in (query, key)]
    assert np.abs(np.einsum("btnh,bsnh->bnts", *half_split) - complex_product()).max() > 0.1


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


def test_pairs_of_a_proportional_rotation_that_stand_still_are_not_rounded():
    frequencies = inverse_frequencies(16, 10000.0, RopeScaling("proportional", share=0.25))
    assert (frequencies != 0).tolist() == [True, True, *[False] * 6]
    x = np.random.default_rng(3).normal(size=(1, 4, 2, 16)).astype(jnp.bfloat16)
    turned = np.asarray(apply_rope(jnp.asarray(x), *rotation(np.arange(4, dtype=np.int32)[None], frequencies)))
    for start in (0, 8):
        assert (turned[..., start + 2 : start + 8] == x[..., start + 2 : start + 8]).all()
    assert (turned[:, 1:, :, [0, 1, 8, 9]] != x[:, 1:, :, [0, 1, 8, 9]]).mean() > 0.9


@pytest.mark.torch
@pytest.mark.parametrize(("dim", "share"), [(512, 0.25), (24, 0.3), (16, 1.0)])
def test_proportional_matches_transformers(dim: int, share: float):
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": share, "factor": 4.0}
    config = transformers.LlamaConfig(head_dim=dim, rope_parameters=rope)
    expected, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["proportional"](config)
    scaling = RopeScaling("proportional", 4.0, share=share)
    np.testing.assert_allclose(inverse_frequencies(dim, 1e6, scaling), expected.numpy(), rtol=1e-6)
    assert scaling.rotation_factor == factor


def test_bfloat16_keeps_its_dtype_and_rounds_once():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 4, 2, 8)), jnp.bfloat16)
    angles = rotation(jnp.arange(4, dtype=jnp.int32)[None], inverse_frequencies(8, 10000.0, None))
    got = apply_rope(x, *angles)
    assert got.dtype == jnp.bfloat16
    assert (got == apply_rope(x.astype(jnp.float32), *angles).astype(jnp.bfloat16)).all()


@pytest.mark.torch
@pytest.mark.parametrize("scaling", [RopeScaling(), RopeScaling("linear", 4.0), LLAMA3, LLAMA4])
def test_frequencies_match_transformers(scaling: RopeScaling):
    frequencies, factor = transformers_rope(500000.0, 64, scaling)
    np.testing.assert_allclose(inverse_frequencies(64, 500000.0, scaling), frequencies, rtol=1e-6)
    assert scaling.rotation_factor == factor


@pytest.mark.torch
@pytest.mark.parametrize("partial", [1.0, 0.25])
@pytest.mark.parametrize(("theta", "dim", "scaling"), [yarn[:3] for yarn in YARNS.values()], ids=YARNS)
def test_yarn_matches_transformers(theta: float, dim: int, scaling: RopeScaling, partial: float):
    frequencies, factor = transformers_rope(theta, dim, scaling, partial)
    got = inverse_frequencies(int(dim * partial), theta, scaling)
    np.testing.assert_allclose(got, frequencies, rtol=2e-6)
    assert scaling.rotation_factor == pytest.approx(factor, rel=1e-12)


def transformers_rope(
    theta: float, head_dim: int, scaling: RopeScaling, partial: float = 1.0
) -> tuple[np.ndarray, float]:
    """The frequencies and the factor of cosines and sines that transformers computes."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    names = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "mscale")
        + ("mscale_all_dim", "attention_factor"),
    }
    parameters = {name: getattr(scaling, name) for name in names.get(scaling.kind, ())}
    parameters = {name: number for name, number in parameters.items() if number is not None}
    kind = "default" if scaling.kind == "none" else scaling.kind
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": kind, "rope_theta": theta, "partial_rotary_factor": partial, **parameters},
    )
    if kind == "default":
        rotary = LlamaRotaryEmbedding(config)
        return rotary.inv_freq.numpy(), rotary.attention_scaling
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    return frequencies.numpy(), factor
