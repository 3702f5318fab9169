"""A whole model with adapters: it decodes as it trains, and computes what the merged kernels do."""

import jax
import numpy as np
import pytest

from maxlite.model.build import build_model
from tests.conftest import LATENT

EXPERTS = ("mlp_pattern=[moe]", "num_experts=4", "num_experts_per_tok=2", "moe_mlp_dim=16", "shared_expert_mlp_dim=8")


@pytest.mark.parametrize(
    "keys",
    [LATENT, EXPERTS, pytest.param((*EXPERTS, "weight_quantization=int8"), marks=pytest.mark.slow)],
    ids=["latent", "experts", "stored experts"],
)
def test_decoding_computes_what_training_does(tiny_config, noisy_params, empty_cache, keys):
    config = tiny_config(*keys, "lora_rank=3", "lora_alpha=6")
    model = build_model(config.model, config.compute)
    # Codes are those of a model's own values.
    params = jax.jit(model.init)(jax.random.key(0)) if config.compute.weight_quantization else noisy_params(model)
    draw = np.random.default_rng(0)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            np.asarray(draw.normal(size=leaf.shape) * 0.3, leaf.dtype) if path[-1].key == "lora_b" else leaf
        ),
        params,
    )
    tokens = draw.integers(0, 64, (2, 8)).astype(np.int32)
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), tokens.shape)

    @jax.jit
    def run(params, *inputs):
        output = model.apply(params, *inputs)
        return model.logits(params, output.hidden), output.cache

    whole, _ = run(params, tokens, positions)
    apart, cache = model.unstack(params), empty_cache(model, 2, 8, stacked=False)
    for place in range(8):
        now = slice(place, place + 1)
        logits, cache = run(apart, tokens[:, now], positions[:, now], np.ones((2, 1), np.int32), cache)
        np.testing.assert_allclose(np.asarray(logits)[:, 0], np.asarray(whole)[:, place], atol=2e-4)
