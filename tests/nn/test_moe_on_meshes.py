"""The layer on meshes of fake devices, alone and within checkpoints, against one device; and compiled for TPUs."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding

from maxlite.nn.moe import MoE
from maxlite.parallel.sharding import partition_spec, use_mesh
from maxlite.parallel.topology import build_topology, without_compile_cache
from tests.nn.layers import run
from tests.nn.moe_settings import DEEPSEEK3, DIM, EXPERTS, GEMMA4, GPT_OSS, LLAMA4, build

# One layer for several tests, by which what they expect comes from one program.
COMMON = (*GPT_OSS, "norm_topk_prob=false", "shared_expert_mlp_dim=20", "shared_expert_gate=true")
# Name: degrees, settings.
MESHES = {
    "expert": ({"expert": 8}, GPT_OSS),
    "expert, fsdp": ({"expert": 4, "fsdp": 2}, DEEPSEEK3),
    "expert, tensor, fsdp": ({"expert": 2, "tensor": 2, "fsdp": 2}, COMMON),
    "context, expert, data": ({"context": 2, "expert": 2, "data": 2}, COMMON),
    "fsdp, context, tensor": ({"fsdp": 2, "context": 2, "tensor": 2}, (*GEMMA4, "mlp_bias=true")),
    "scaled inputs": ({"expert": 2, "tensor": 2}, LLAMA4),
    "all to one expert": ({"expert": 4, "tensor": 2}, ("router_bias=true", "num_experts_per_tok=1")),
    "capacity": ({"expert": 2, "tensor": 2, "data": 2}, (*DEEPSEEK3, "capacity_factor=0.75")),
}
AXES = ("data", "stage", "fsdp", "context", "expert", "tensor")


def mesh_of(degrees, devices=None):
    shape = [degrees.get(axis, 1) for axis in AXES]
    devices = np.array((devices or jax.devices())[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 6)


def placed_on(mesh, rules, state, *leading):
    """Each weight where its logical axes say, with `leading` ones in front."""

    def place(leaf):
        spec = partition_spec((*leading, *leaf.get_metadata()["axes"]), rules)
        return leaf.replace(jax.device_put(leaf.get_raw_value(), NamedSharding(mesh, spec)))

    return jax.tree.map(place, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def packed(generator, num_rows=8, length=12):
    """x [B, T, D], and segment ids [B, T] with padding, one row being padding alone."""
    segment_ids = np.ones((num_rows, length), np.int32)
    segment_ids[1, 7:] = segment_ids[3] = segment_ids[6, 10:] = 0
    segment_ids[2, 5:] = 2
    return generator.normal(size=(num_rows, length, DIM)).astype(np.float32), segment_ids


def assert_equal(results, expected):
    for left, right in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        scale = max(1.0, np.max(np.abs(right)))
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-5 * scale)


def loss(graphdef, state, x, segment_ids):
    y, stats = nnx.merge(graphdef, state)(x, segment_ids)
    return jnp.sum(jnp.sin(y)) + 0.3 * stats.balance, (y, stats)


def with_gradients(loss):
    """A program of its own: one that was traced without a mesh must not serve with it."""
    return jax.jit(jax.value_and_grad(loss, (1, 2), has_aux=True), static_argnums=0)


on_one_device = with_gradients(loss)
# The others are run by CI.
QUICK = ("expert, tensor, fsdp", "context, expert, data")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MESHES])
def test_on_a_mesh(name, tiny_config):
    degrees, overrides = MESHES[name]
    rules = tiny_config().parallel.logical_axis_rules
    layer, _ = build(tiny_config, *overrides)
    graphdef, state = nnx.split(layer)
    if name == "all to one expert":
        state["router"]["bias"] = state["router"]["bias"].replace(np.float32(99 * (np.arange(EXPERTS) == 5)))
    x, segment_ids = packed(np.random.default_rng(3))
    expected = on_one_device(graphdef, state, x, segment_ids)
    assert np.sum(expected[0][1][1].load) == np.sum(segment_ids != 0) * layer.rule.num_experts_per_tok
    mesh = mesh_of(degrees)
    with use_mesh(mesh, rules):
        placed = placed_on(mesh, rules, state)
        batch = jax.device_put(x, NamedSharding(mesh, partition_spec(("batch", "length", "activation_embed"), rules)))
        results = with_gradients(loss)(graphdef, placed, batch, segment_ids)
    assert_equal(results, expected)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3)])
def test_rows_and_lengths_that_a_mesh_does_not_divide(shape, tiny_config):
    rules = tiny_config().parallel.logical_axis_rules
    layer, _ = build(tiny_config, *GPT_OSS)
    graphdef, state = nnx.split(layer)
    x = np.random.default_rng(3).normal(size=(*shape, DIM)).astype(np.float32)
    expected = run(layer, x, None)
    mesh = mesh_of({"expert": 2, "context": 2, "tensor": 2})
    with use_mesh(mesh, rules):
        placed = placed_on(mesh, rules, state)
        results = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x, None))(placed, x)
    assert_equal(results, expected)


def test_within_checkpoints_of_stages(tiny_config):
    """Two layers at a time, each on its own rows; and each of them alone."""
    rules = tiny_config().parallel.logical_axis_rules
    graphdef, first = nnx.split(build(tiny_config, *COMMON)[0])
    second = jax.tree.map(lambda leaf: 0.5 * leaf, first)
    x, segment_ids = packed(np.random.default_rng(3))
    alone = [on_one_device(graphdef, first, x, segment_ids), on_one_device(graphdef, second, x[::-1], segment_ids)]
    (total, made), (gradients, x_gradients) = jax.tree.map(lambda *leaves: np.stack(leaves), *alone)
    expected = (total.sum(), made), (gradients, x_gradients[0] + x_gradients[1, ::-1])

    def staged(graphdef, stacked, x, segment_ids):
        layer = jax.checkpoint(functools.partial(loss, graphdef))
        totals, made = jax.vmap(layer, (0, 0, None), spmd_axis_name="stage")(
            stacked, jnp.stack([x, x[::-1]]), segment_ids
        )
        return jnp.sum(totals), made

    mesh = mesh_of({"expert": 2, "tensor": 2, "stage": 2})
    with use_mesh(mesh, rules):
        placed = placed_on(mesh, rules, jax.tree.map(lambda *leaves: np.stack(leaves), first, second), "layers")
        results = with_gradients(staged)(graphdef, placed, x, segment_ids)
    assert_equal(results, expected)


@pytest.mark.slow
def test_within_checkpoints_of_a_scan(tiny_config):
    rules = tiny_config().parallel.logical_axis_rules
    graphdef, first = nnx.split(build(tiny_config, *GPT_OSS)[0])
    stacked = jax.tree.map(lambda leaf: np.stack([leaf, 0.5 * leaf]), first)
    x, segment_ids = packed(np.random.default_rng(3))

    def scanned(graphdef, stacked, x, segment_ids):
        def block(x, state):
            y, stats = nnx.merge(graphdef, state)(x, segment_ids)
            return x + jnp.tanh(y), stats

        y, stats = jax.lax.scan(jax.checkpoint(block, prevent_cse=False), x, stacked)
        return jnp.sum(jnp.sin(y)) + jnp.sum(stats.balance), (y, stats)

    expected = with_gradients(scanned)(graphdef, stacked, x, segment_ids)
    mesh = mesh_of({"expert": 2, "tensor": 2, "fsdp": 2})
    with use_mesh(mesh, rules):
        placed = placed_on(mesh, rules, stacked, "layers")
        results = with_gradients(scanned)(graphdef, placed, x, segment_ids)
    assert_equal(results, expected)


@pytest.mark.tpu
def test_compiled_for_tpus(tiny_config):
    """Experts, their width and their input's width cut: a ragged exchange, and no layer's kernel outside its turn."""
    config = tiny_config(
        "mlp_pattern=moe", "emb_dim=256", "num_experts=8", "moe_mlp_dim=512", "num_experts_per_tok=2", "dtype=bfloat16"
    )
    rules, layers = config.parallel.logical_axis_rules, 3
    graphdef, state = nnx.split(MoE(config.model, config.compute, rngs=None))
    mesh = mesh_of({"fsdp": 2, "expert": 2, "tensor": 2}, build_topology("v5e-8", 1).devices)

    def loss(state, x):
        def block(x, state):
            y, stats = nnx.merge(graphdef, state)(x, None)
            return x + y, stats

        y, stats = jax.lax.scan(jax.checkpoint(block, prevent_cse=False), x, state)
        return jnp.sum(y.astype(jnp.float32)) + jnp.sum(stats.balance)

    def stacked(leaf):
        spec = partition_spec(("layers", *leaf.get_metadata()["axes"]), rules)
        shape = leaf.get_raw_value()
        return leaf.replace(
            jax.ShapeDtypeStruct((layers, *shape.shape), shape.dtype, sharding=NamedSharding(mesh, spec))
        )

    with use_mesh(mesh, rules), without_compile_cache():
        state = jax.tree.map(stacked, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        sharding = NamedSharding(mesh, partition_spec(("batch", "norm_length", None), rules))
        x = jax.ShapeDtypeStruct((8, 128, 256), jnp.bfloat16, sharding=sharding)
        program = jax.jit(jax.grad(loss)).lower(state, x).compile().as_text()
    # There and home, in the forward pass, again, and in the backward pass.
    assert len(re.findall(r" ragged-all-to-all(?:-start)?\(", program)) == 6
    # E/2, D/2, F/2 of a kernel lie here; D is gathered. Rounded kernels of all layers would stand in front.
    assert "bf16[4,256,256]" in program
    assert not re.search(r"bf16\[3,4,(128|256),(128|256)\]", program)
