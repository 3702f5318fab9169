import contextlib
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlite.config.layers import LayerSpec
from maxlite.config.schema import REMAT_POLICY_NAMES
from maxlite.model.block import Block
from maxlite.model.build import build_model
from maxlite.model.remat import OFFLOADED_NAMES, SAVED_NAMES, rematerialize
from maxlite.nn.attention import AttentionContext
from maxlite.nn.rotary import rotary_tables, rotations

QKV = {"query_proj", "key_proj", "value_proj"}
# What each policy keeps, as docs/remat.md says; mlpwo is needed by no backward pass of this block.
KEPT = {
    "full": set(),
    "minimal": QKV | {"out_proj", "mlpwi_0", "mlpwi_1"},
    "minimal_with_context": QKV | {"out_proj", "mlpwi_0", "mlpwi_1", "context"},
    "save_dot_except_mlp": QKV | {"out_proj"},
    "save_dot_except_mlpwi": QKV | {"out_proj"},
    "save_dot_with_context_except_mlp": QKV | {"context", "out_proj"},
    "save_qkv_proj": QKV,
    "save_out_proj": {"out_proj"},
}


def block_of(tiny_config):
    """A block as a function of its parameters and input, and arguments for it."""
    config = tiny_config("emb_dim=32", "head_dim=8", "mlp_dim=48")
    abstract = nnx.eval_shape(
        lambda: Block(LayerSpec("full", "dense"), config.model, config.compute, rngs=nnx.Rngs(params=jax.random.key(0)))
    )
    graphdef, state = nnx.split(abstract)
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), nnx.to_pure_dict(state))
    positions, segments = jnp.arange(8)[None], jnp.ones((1, 8), jnp.int32)
    turns = rotations(rotary_tables(config.model), positions)
    context = AttentionContext(positions, segments, positions, segments, turns, None)
    return lambda params, x: nnx.merge(graphdef, params)(x, context, None)[0], params, jnp.ones((1, 8, 32))


def saved_residuals(block, policy, params, x) -> list[str]:
    """Lines for what the backward pass keeps, beside its arguments and constants."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        jax.ad_checkpoint.print_saved_residuals(rematerialize(block, policy, inside_scan=False), params, x)
    lines = printed.getvalue().splitlines()
    return [line for line in lines if "from the argument" not in line and "from a constant" not in line]


@pytest.mark.parametrize("policy", SAVED_NAMES)
def test_a_policy_keeps_what_it_names_and_nothing_else(policy, tiny_config):
    lines = saved_residuals(*(lambda block, params, x: (block, policy, params, x))(*block_of(tiny_config)))
    names = [re.search(r"named '(\w+)'", line)[1] for line in lines]
    assert set(names) == KEPT[policy]
    # The context comes with its logsumexp; all else is kept once.
    assert len(names) == len(set(names)) + ("context" in names)


@pytest.mark.parametrize(("policy", "count"), [("qkv_proj_offloaded", 3), ("minimal_offloaded", 6)])
def test_an_offloading_policy_keeps_on_the_host(policy, count, tiny_config):
    block, params, x = block_of(tiny_config)
    lines = saved_residuals(block, policy, params, x)
    assert len(lines) == count and all("<host>" in line for line in lines), lines


def test_none_keeps_more_than_any_other(tiny_config):
    block, params, x = block_of(tiny_config)
    assert rematerialize(block, "none", inside_scan=True) is block
    lines = saved_residuals(block, "none", params, x)
    assert len(lines) > max(map(len, KEPT.values())) + 5


def test_every_policy_name_is_tested():
    assert set(REMAT_POLICY_NAMES) == {"none", *KEPT, *OFFLOADED_NAMES}


def test_every_name_is_in_the_program(tiny_config):
    experts = ("mlp_pattern=moe", "num_experts=4", "num_experts_per_tok=2", "moe_mlp_dim=16")
    latents = ("attention_pattern=mla", "kv_lora_rank=16", "q_lora_rank=16", "qk_nope_head_dim=8", "qk_rope_head_dim=8",
               "v_head_dim=8", "num_kv_heads=4")  # fmt: skip
    tokens, program = jnp.zeros((1, 8), jnp.int32), ""
    for overrides in ((), experts, latents, ("attention_output_gate=true",)):
        config = tiny_config(*overrides)
        model = build_model(config.model, config.compute)

        def loss(params, model=model):
            return model.apply(params, tokens, tokens).hidden.sum()

        # In a loss, since attention names its context only where there is a backward pass.
        program += str(jax.make_jaxpr(jax.grad(loss))(model.abstract_params))
    names = {name for table in (SAVED_NAMES, OFFLOADED_NAMES) for row in table.values() for name in row}
    assert [name for name in sorted(names) if f"name={name}" not in program] == []


def gradients(tiny_config, noisy_params, *overrides):
    config = tiny_config("emb_dim=32", "mlp_dim=48", "head_dim=8", "vocab_size=32", *overrides)
    model = build_model(config.model, config.compute)
    tokens = jnp.asarray([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (2, 8))

    def loss(params):
        return (model.logits(params, model.apply(params, tokens, positions).hidden) ** 2).mean()

    return jax.jit(jax.grad(loss))(noisy_params(model))


@pytest.fixture(scope="module")
def plain_gradients(tiny_config, noisy_params):
    return gradients(tiny_config, noisy_params, "remat_policy=none")


QUICK = ("full",)


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name in REMAT_POLICY_NAMES
        if name != "none"
    ],
)
def test_gradients_do_not_depend_on_the_policy(policy, tiny_config, noisy_params, plain_gradients):
    found = gradients(tiny_config, noisy_params, f"remat_policy={policy}")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, plain_gradients)


def test_gradients_do_not_depend_on_the_loop(tiny_config, noisy_params, plain_gradients):
    found = gradients(tiny_config, noisy_params, "scan_layers=false")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, plain_gradients)
