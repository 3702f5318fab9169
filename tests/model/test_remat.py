import contextlib
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, SingleDeviceSharding

from maxlite.config.check_remat import remat_tensors
from maxlite.config.compute_schema import LAYER_INPUT, REMAT_POLICY_NAMES, REMAT_TENSORS
from maxlite.config.layers import LayerSpec
from maxlite.config.load import load_config, model_names
from maxlite.model.block import Block
from maxlite.model.build import build_model
from maxlite.model.remat import OFFLOADED_NAMES, SAVED_NAMES, kept_names, rematerialize
from maxlite.nn.attention import AttentionContext
from maxlite.nn.rotary import rotary_tables, rotations
from maxlite.parallel.execution import Execution
from maxlite.parallel.sharding import use_mesh
from maxlite.parallel.topology import build_topology, without_compile_cache

QKV = {"query_proj", "key_proj", "value_proj"}
# What each policy keeps, as docs/remat.md says; mlpwo is needed by no backward pass of this block.
KEPT = {
    "full": set(),
    "minimal": QKV | {"out_proj", "mlpwi_0", "mlpwi_1"},
    "minimal_with_context": QKV | {"out_proj", "mlpwi_0", "mlpwi_1", "context"},
    # Nothing is quantized here.
    "minimal_with_quantization": QKV | {"out_proj", "mlpwi_0", "mlpwi_1"},
    "minimal_with_context_and_quantization": QKV | {"out_proj", "mlpwi_0", "mlpwi_1", "context"},
    "save_dot_except_mlp": QKV | {"out_proj"},
    "save_dot_except_mlpwi": QKV | {"out_proj"},
    "save_dot_with_context_except_mlp": QKV | {"context", "out_proj"},
    "save_qkv_proj": QKV,
    "save_out_proj": {"out_proj"},
}
INPUT = "from the argument x"
TPU_ROWS = 16
# From least memory to most.
ORDERED = (
    "full",
    "save_out_proj",
    "save_qkv_proj",
    "save_dot_except_mlp",
    "save_dot_with_context_except_mlp",
    "minimal",
    "minimal_with_context",
    "none",
)


def block_of(tiny_config, *overrides):
    """A block as a function of its input and parameters, and arguments for it; the config's `compute` beside them."""
    config = tiny_config("emb_dim=32", "head_dim=8", "mlp_dim=48", *overrides)
    graphdef, state = nnx.split(Block(LayerSpec("full", "dense"), config.model, config.compute, rngs=None))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), nnx.to_pure_dict(state))
    positions, segments = np.arange(8)[None], np.ones((1, 8), np.int32)
    turns = rotations(rotary_tables(config.model), positions)
    context = AttentionContext(positions, segments, positions, segments, turns, None)
    return (
        lambda x, params: nnx.merge(graphdef, params)(x, context, None)[0],
        config.compute,
        (np.ones((1, 8, 32), np.float32), params),
    )


def saved_residuals(tiny_config, *overrides) -> list[str]:
    """Lines for what the backward pass keeps, beside the parameters and constants."""
    block, compute, arguments = block_of(tiny_config, *overrides)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        jax.ad_checkpoint.print_saved_residuals(
            rematerialize(block, kept_names(compute), inside_scan=False), *arguments
        )
    lines = [line for line in printed.getvalue().splitlines() if "from a constant" not in line]
    return [line for line in lines if "from the argument" not in line or line.endswith(INPUT)]


def names_of(lines: list[str]) -> list[str]:
    """Names of the residuals, the layer's own input left out."""
    return [re.search(r"named '(\w+)'", line)[1] for line in lines if not line.endswith(INPUT)]


@pytest.mark.parametrize("policy", SAVED_NAMES)
def test_a_policy_keeps_what_it_names_and_nothing_else(policy, tiny_config):
    names = names_of(saved_residuals(tiny_config, f"remat_policy={policy}"))
    assert set(names) == KEPT[policy]
    # The context comes with its logsumexp; all else is kept once.
    assert len(names) == len(set(names)) + ("context" in names)


@pytest.mark.parametrize("kernel", ["blockwise", "dot_product"])
@pytest.mark.parametrize(
    "overrides", [("remat_policy=minimal_with_context",), ("remat_policy=custom", "context=device")]
)
def test_kernels_in_plain_jax_name_their_context(kernel, overrides, tiny_config):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    with use_mesh(mesh, (), execution=Execution(kernels={"full": kernel})):
        lines = saved_residuals(tiny_config, *overrides)
    shapes = [line.split()[0] for line in lines if "named 'context'" in line]
    assert ("f32[1,8,2,2,8]" in shapes) and len(shapes) == {"blockwise": 2, "dot_product": 1}[kernel], lines


@pytest.mark.parametrize(("policy", "count"), [("qkv_proj_offloaded", 3), ("minimal_offloaded", 6)])
def test_an_offloading_policy_keeps_on_the_host(policy, count, tiny_config):
    lines = saved_residuals(tiny_config, f"remat_policy={policy}")
    kept = [line for line in lines if not line.endswith(INPUT)]
    assert len(kept) == count and all("<host>" in line for line in kept), lines


def test_none_keeps_more_than_any_other(tiny_config):
    block, compute, _ = block_of(tiny_config, "remat_policy=none")
    assert rematerialize(block, kept_names(compute), inside_scan=True) is block
    lines = saved_residuals(tiny_config, "remat_policy=none")
    assert len(lines) > max(map(len, KEPT.values())) + 5


def test_custom_places_each_tensor(tiny_config):
    lines = saved_residuals(tiny_config, "remat_policy=custom", "query_proj=device", "mlpwi_0=offload")
    lines = [line for line in lines if not line.endswith(INPUT)]
    # What is offloaded has lost its name: it is known by the width of the MLP.
    on_host, on_device = sorted(lines, key=lambda line: "<host>" not in line)
    assert on_host.startswith("f32<host>[1,8,48]") and names_of([on_device]) == ["query_proj"]


def test_custom_keeps_nothing_that_is_not_named(tiny_config):
    assert names_of(saved_residuals(tiny_config, "remat_policy=custom")) == []


def test_custom_takes_the_layer_input_to_the_host_and_keeps_it_nowhere_else(tiny_config):
    (line,) = saved_residuals(tiny_config, "remat_policy=custom", "decoder_layer_input=offload")
    assert line.startswith("f32<host>[1,8,32]")
    on_device = saved_residuals(tiny_config, "remat_policy=custom", "query_proj=device")
    assert sorted(line.endswith(INPUT) for line in on_device) == [False, True]


def test_every_policy_name_is_tested():
    assert set(REMAT_POLICY_NAMES) == {"none", "custom", *KEPT, *OFFLOADED_NAMES}


# One model for every set of tensors that a model may have.
FAMILIES = (
    "llama3-8b",
    "mixtral-8x7b",
    "llama4-17b-16e",
    "deepseek2-lite-16b",
    "deepseek3-671b",
    "qwen3-next-80b-a3b",
)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_names_of_a_model_are_those_in_its_program(name):
    config = load_config("base.yml", [f"model={name}", "smoke=true", "dtype=float32"], {})
    model = build_model(config.model, config.compute)
    tokens = np.zeros((1, 8), np.int32)
    # As for a gradient, since attention names its context only where there is a backward pass.
    program = jax.make_jaxpr(
        lambda params: jax.vjp(lambda params: model.apply(params, tokens, tokens).hidden, params)[0]
    )
    found = set(re.findall(r"name\[\s*name=(\w+)", str(program(model.abstract_params))))
    assert found == {LAYER_INPUT, *remat_tensors(config.model)}


@pytest.mark.slow
def test_every_model_is_like_one_that_is_tested():
    def tensors(name):
        return remat_tensors(load_config("base.yml", [f"model={name}"], {}).model)

    tested = {tensors(name) for name in FAMILIES}
    assert [name for name in model_names() if tensors(name) not in tested] == []
    policies = {name for table in (SAVED_NAMES, OFFLOADED_NAMES) for row in table.values() for name in row}
    assert {name for row in tested for name in row} == set(REMAT_TENSORS) == policies - {"quantization"}


def compiled(config, batch: int, length: int):
    """The compiled gradient of a model."""
    model = build_model(config.model, config.compute)
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)

    def loss(params, tokens):
        return model.apply(params, tokens, tokens).hidden.sum()

    return jax.jit(jax.grad(loss)).lower(model.abstract_params, tokens).compile()


def temporaries(tiny_config, policy: str) -> int:
    """Bytes of the temporaries of a gradient through 8 layers."""
    config = tiny_config("num_decoder_layers=8", f"remat_policy={policy}")
    return compiled(config, 4, 128).memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_policies_are_strictly_ordered_in_bytes(tiny_config):
    sizes = [temporaries(tiny_config, policy) for policy in ORDERED]
    assert sizes == sorted(set(sizes)), dict(zip(ORDERED, sizes, strict=True))


def tpu_memory(tiny_config, topology, policy: str):
    """Memory of the same gradient by the compiler for one TPU, 24 layers deep.

    So wide that every tensor a policy keeps is larger, over all layers, than a v6e's 128 MiB of VMEM: a smaller one
    may live there whole, and the bytes of HBM would say nothing of it.
    """
    wide = ("emb_dim=512", "mlp_dim=2048", "head_dim=128", "num_decoder_layers=24", "dtype=bfloat16")
    config = tiny_config(*wide, "max_target_length=512", f"remat_policy={policy}")
    model = build_model(config.model, config.compute)
    place = SingleDeviceSharding(topology.devices[0])
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), model.abstract_params
    )
    tokens = jax.ShapeDtypeStruct((TPU_ROWS, 512), jnp.int32, sharding=place)

    def loss(params, tokens):
        return model.apply(params, tokens, tokens).hidden.astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss)).lower(params, tokens).compile().memory_analysis()


@pytest.mark.tpu
@pytest.mark.timeout(900)
def test_policies_are_strictly_ordered_on_a_tpu(tiny_config):
    topology = build_topology("v6e-1", 1)
    with without_compile_cache():
        sizes = [tpu_memory(tiny_config, topology, policy).temp_size_in_bytes for policy in ORDERED]
    assert sizes == sorted(set(sizes)), dict(zip(ORDERED, sizes, strict=True))


@pytest.mark.tpu
def test_offloading_moves_bytes_to_the_host_on_a_tpu(tiny_config):
    topology = build_topology("v5e-1", 1)
    with without_compile_cache():
        kept, moved = (tpu_memory(tiny_config, topology, name) for name in ("save_qkv_proj", "qkv_proj_offloaded"))
    # 24 layers x rows x 512 tokens x (4 + 2 + 2) heads of 128, in bfloat16.
    assert moved.host_temp_size_in_bytes >= 24 * TPU_ROWS * 512 * 8 * 128 * 2 and kept.host_temp_size_in_bytes == 0
    assert moved.temp_size_in_bytes < kept.temp_size_in_bytes


def gradients(tiny_config, noisy_params, *overrides):
    config = tiny_config("emb_dim=32", "mlp_dim=48", "head_dim=8", "vocab_size=32", *overrides)
    model = build_model(config.model, config.compute)
    tokens = np.asarray([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]], np.int32)
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), (2, 8))

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
