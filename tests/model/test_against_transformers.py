"""Logits of maxlite and of transformers' Llama, with the same noisy weights."""

import jax
import numpy as np
import pytest

from maxlite.model.build import build_model
from tests.reference import params_from_hugging_face

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LENGTH = 48
TOKENS = np.asarray([(7 * i * i + 3 * i + 5) % 128 for i in range(LENGTH)], np.int32)[None]
SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5,
)  # fmt: skip
OVERRIDES = (
    "vocab_size=128", "emb_dim=64", "mlp_dim=96", "num_decoder_layers=2", "num_query_heads=4", "num_kv_heads=2",
    "max_position_embeddings=256", "logits_via_embedding=false",
)  # fmt: skip
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, **SCALING}
OURS = ("rope_type=llama3", "rope_max_timescale=5e5", *(f"{name if 'original' in name else 'rope_' + name}={value:g}"
        for name, value in SCALING.items()))  # fmt: skip
# For each case: transformers' settings, maxlite's, and transformers' settings with the one under test turned.
CASES = {
    "plain": ({}, (), {"num_key_value_heads": 4}),
    "multi-head": ({"num_key_value_heads": 4}, ("num_kv_heads=4",), None),
    "head_dim": ({"head_dim": 24}, ("head_dim=24",), None),
    "tied": ({"tie_word_embeddings": True}, ("logits_via_embedding=true",), {"tie_word_embeddings": False}),
    "theta": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        ("rope_max_timescale=5e5",),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "linear": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        ("rope_type=linear", "rope_factor=4"),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "llama3": ({"rope_parameters": LLAMA3}, OURS, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "epsilon": ({"rms_norm_eps": 0.3}, ("normalization_layer_epsilon=0.3",), {"rms_norm_eps": 1e-5}),
    "activation": ({"hidden_act": "gelu_pytorch_tanh"}, ("mlp_activation=gelu_tanh",), {"hidden_act": "silu"}),
}  # fmt: skip


def build_reference(**settings):
    """A float32 Llama whose every parameter is seeded noise: a default start would hide most mistakes."""
    config = transformers.LlamaConfig(**{**SIZES, **settings}, attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.15
            parameter.copy_(noise + 1 if "norm" in name else noise)
    return model


def reference_logits(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS).long()).logits.numpy()


def our_logits(config, reference) -> np.ndarray:
    model = build_model(config.model, config.compute)
    tensors = {name: tensor.detach().numpy() for name, tensor in reference.state_dict().items()}
    params = params_from_hugging_face(tensors, config.model)
    assert jax.tree.map(lambda x: x.shape, params) == jax.tree.map(lambda x: x.shape, model.abstract_params)
    positions = np.arange(LENGTH, dtype=np.int32)[None]

    @jax.jit
    def forward(params):
        return model.logits(params, model.apply(params, TOKENS, positions).hidden)

    return np.asarray(forward(params))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, tiny_config):
    settings, overrides, _ = CASES[case]
    given = {text.partition("=")[0] for text in overrides}
    config = tiny_config(*[o for o in OVERRIDES if o.partition("=")[0] not in given], *overrides)
    reference = build_reference(**settings)
    expected = reference_logits(reference)
    assert expected.std() > 0.5
    np.testing.assert_allclose(our_logits(config, reference), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", [case for case, (_, _, turned) in CASES.items() if turned is not None])
def test_turning_the_setting_moves_the_logits(case):
    settings, _, turned = CASES[case]
    moved = reference_logits(build_reference(**{**settings, **turned})) - reference_logits(build_reference(**settings))
    assert np.abs(moved).max() > 0.05
