"""Models with kernels in few bits on eight devices, and what a decoding step holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.decode.generate import BatchShape, Generator, Programs
from maxlite.model.build import build_model
from maxlite.parallel.mesh import build_mesh
from maxlite.parallel.sharding import use_mesh
from tests.conftest import load_tiny
from tests.quantize.two_models import noisy, rounded_params

DENSE = ("num_kv_heads=4",)
MOE = (
    "num_kv_heads=4",
    "mlp_pattern=[moe]",
    "num_experts=4",
    "num_experts_per_tok=2",
    "moe_mlp_dim=32",
    "shared_expert_mlp_dim=32",
)
MLA = (
    "attention_pattern=[mla]",
    "num_kv_heads=4",
    "head_dim=24",
    "q_lora_rank=32",
    "kv_lora_rank=16",
    "qk_nope_head_dim=16",
    "qk_rope_head_dim=8",
    "v_head_dim=16",
)


def build(*keys: str):
    config = load_tiny("jax_cache_dir=null", "cpu_devices=8", *keys)
    return config, build_model(config.model, config.compute)


def forward(config, model, params):
    """Logits [8, 16, V], and the gradient of their loss for the embedding, on the config's mesh."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 64, (8, 16)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(16), tokens.shape)
    mesh, rules = build_mesh(config.parallel, jax.devices()), config.parallel.logical_axis_rules

    def loss(table, params):
        params = {**params, "embedding": {"table": table}}
        logits = model.logits(params, model.apply(params, tokens, positions, jnp.ones_like(tokens)).hidden)
        return jnp.mean(jnp.sin(logits)), logits

    with use_mesh(mesh, rules):
        placed = jax.device_put(params, model.shardings(mesh, rules))
        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (_, logits), gradient = step(placed["embedding"]["table"], placed)
    return np.asarray(logits), np.asarray(gradient)


TILE = "weight_quant_tile_size=8"


@pytest.mark.parametrize(
    ("sizes", "stored", "mesh"),
    [
        (DENSE, ("weight_quantization=nf4", "weight_quant_tile_size=32"), ("fsdp=2", "tensor=4")),
        pytest.param(MOE, ("weight_quantization=int8",), ("expert=2", "fsdp=2", "tensor=2"), marks=pytest.mark.slow),
        pytest.param(MOE, ("weight_quantization=int4", TILE), ("fsdp=2", "tensor=4"), marks=pytest.mark.slow),
        pytest.param(MLA, ("weight_quantization=fp8", TILE), ("fsdp=2", "tensor=4"), marks=pytest.mark.slow),
    ],
)
def test_eight_devices_compute_what_one_does(sizes, stored, mesh):
    keys = [f"ici_{degree.replace('=', '_parallelism=')}" for degree in mesh]
    _, plain = build(*sizes)
    config, model = build(*sizes, *stored, *keys)
    params = rounded_params(noisy(plain), model)
    alone = [key.replace(key.partition("=")[2], "1") for key in keys]
    expected = forward(build(*sizes, *stored, *alone, "ici_data_parallelism=8")[0], model, params)
    for one, other in zip(forward(config, model, params), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4 * np.abs(other).max())


# Latent attention multiplies by its up-projection in parts, apart from all other products.
WIDE_MLA = (
    *("attention_pattern=[mla]", "num_query_heads=16", "num_kv_heads=16", "head_dim=80", "q_lora_rank=64"),
    *("kv_lora_rank=128", "qk_nope_head_dim=64", "qk_rope_head_dim=16", "v_head_dim=64", "mlp_dim=256"),
)


@pytest.mark.parametrize(
    ("sizes", "qtype", "bits"),
    [(("mlp_dim=1024",), "int8", 8), (("mlp_dim=1024",), "nf4", 4), (WIDE_MLA, "int8", 8)],
)
def test_a_decoding_step_holds_what_the_sizes_say(sizes, qtype, bits):
    keys = ("emb_dim=256", "num_decoder_layers=6", *sizes)
    tile = 64
    _, plain = build(*keys)
    _, model = build(*keys, f"weight_quantization={qtype}", f"weight_quant_tile_size={tile}")
    kernels = [product.repeats * int(np.prod(product.shape)) for product in model.products]
    before, after = memory_of(plain), memory_of(model)
    saved = 4 * sum(kernels) - sum(kernels) * bits / 8 - 4 * sum(kernels) / tile
    assert before.argument_size_in_bytes - after.argument_size_in_bytes == saved
    # A few kernels of one layer are floats for a while, and never those of all.
    few = 3 * 4 * 256 * 1024
    assert after.temp_size_in_bytes - before.temp_size_in_bytes < few < 4 * sum(kernels) / 5
    assert after.temp_size_in_bytes < few


def memory_of(model):
    """Memory analysis of the step that decoding compiles."""
    params = jax.jit(model.unstack)(noisy(model))
    shape = BatchShape(rows=1, prompt_length=16, max_new_tokens=16)
    generator = Generator(
        Programs(model, lambda logits, *_: jnp.argmax(logits, -1).astype(jnp.int32), (), shape), params
    )
    return generator._step.memory_analysis()
