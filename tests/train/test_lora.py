"""Training of adapters: what moves and what stays, gradients, memory, meshes, and going on."""

import functools
import math

import jax
import numpy as np
import pytest

from maxlite.checkpoint.tree import leaf_paths
from maxlite.errors import ConfigError
from maxlite.metrics.flops import train_step_flops
from maxlite.model.build import build_model
from maxlite.nn.lora import with_adapter
from maxlite.parallel.sharding import use_mesh
from maxlite.train.report import start_lines
from maxlite.train.run import run_train
from maxlite.train.setup import build_setup
from maxlite.train.state import device_bytes, host_bytes, init_state
from maxlite.train.step import Scales, build_loss
from maxlite.train.trained import active_adapters
from tests.conftest import load_tiny
from tests.train.conftest import config_in
from tests.train.test_mesh_equality import COMMON, MODELS, PLAIN, degrees, packed_batch, run

LORA = ("lora_rank=4", "lora_alpha=8")
QUICK = ("cpu_devices=1", "eval_interval=0", "log_period=100", "learning_rate=0.01")
DELTA = (
    "attention_pattern=[gated_delta_net,full]",
    "gdn_conv_kernel_dim=4",
    *(f"gdn_{name}=8" for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")),
)


def of_model(name: str) -> tuple[str, ...]:
    """The keys of a model whose routers stay as they are."""
    return tuple(
        text
        for text in {**MODELS, "delta": DELTA, "plain": PLAIN}[name]
        if not text.startswith("routed_bias_update_rate")
    )


def is_adapter(path: str) -> bool:
    return path.rpartition("/")[2] in ("lora_a", "lora_b")


def noisy(params: dict) -> dict:
    """The parameters with adapters that add something."""
    draw = np.random.default_rng(0)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: draw.normal(size=leaf.shape).astype(np.float32) * 0.2 if path[-1].key == "lora_b" else leaf,
        jax.device_get(params),
    )


def merged_tree(model, params: dict) -> dict:
    """The parameters of the model without adapters that computes the same."""
    merged = jax.tree.map(lambda leaf: leaf, params)
    for product in model.products:
        if product.equipment.adapter is not None:
            *steps, name = product.params_path.split("/")
            node = functools.reduce(dict.__getitem__, steps, merged)
            own = dict(node[name])
            adapter = own.pop("lora_a"), own.pop("lora_b"), product.equipment.adapter
            node[name] = own | {"kernel": with_adapter(product.equation, own["kernel"], *adapter)}
    return merged


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dense", "mla", "moe", "delta"))]
)
def test_loss_and_gradients_are_those_of_the_merged_kernels(name, tiny_config):
    sizes = [text for text in COMMON if text.startswith(("emb", "mlp", "num", "head"))]
    given = {text.partition("=")[0] for text in of_model(name)}
    keys = (*(text for text in sizes if text.partition("=")[0] not in given), *of_model(name), "z_loss_multiplier=0")
    adapted, plain = (tiny_config(*keys, *more) for more in (LORA, ()))
    model, base = (build_model(config.model, config.compute) for config in (adapted, plain))
    params, batch = noisy(jax.jit(model.init)(jax.random.key(0))), packed_batch(0)
    scales = Scales(np.float32(1e-2), np.float32(0))

    def total(params):
        return build_loss(model, 1, 0.0)(params, batch, scales).lm_loss

    def merged_total(params):
        return build_loss(base, 1, 0.0)(merged_tree(model, params), batch, scales).lm_loss

    (found, gradient), (expected, wanted) = (jax.jit(jax.value_and_grad(f))(params) for f in (total, merged_total))
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    adapters = [path for path in leaf_paths(params) if is_adapter(path)]
    assert len(adapters) == 2 * sum(product.equipment.adapter is not None for product in model.products)
    found, wanted = leaf_paths(gradient), leaf_paths(wanted)
    for path in adapters:
        assert np.abs(wanted[path]).max() > 0, path
        np.testing.assert_allclose(found[path], wanted[path], atol=1e-3 * np.abs(wanted[path]).max(), err_msg=path)


def test_adapters_begin_beside_the_same_weights(tiny_config):
    plain, adapted = (build_model((config := tiny_config(*more)).model, config.compute) for more in ((), LORA))
    before, after = (leaf_paths(jax.jit(model.init)(jax.random.key(0))) for model in (plain, adapted))
    for path, value in before.items():
        np.testing.assert_array_equal(value, after[path])
    assert all(is_adapter(path) for path in after.keys() - before.keys())


@pytest.fixture(scope="module")
def adapted_run(tmp_path_factory):
    """Eight steps of adapters."""
    return run_train(config_in(tmp_path_factory.mktemp("runs"), *QUICK, *LORA, "steps=8", "run_name=whole"))


def test_adapters_move_and_all_else_stays_bit_for_bit(adapted_run, logged):
    result, setup = adapted_run, adapted_run.setup
    with use_mesh(setup.mesh, setup.rules, execution=setup.execution):
        before = leaf_paths(
            jax.jit(lambda key: init_state(setup.model, setup.optimizer, key))(jax.random.key(0)).params
        )
    for path, value in leaf_paths(result.params).items():
        assert np.array_equal(value, before[path]) != is_adapter(path), path
    losses, norms = logged(result), logged(result, "learning/param_norm")
    assert losses[7] < losses[0]
    adapters = [value for path, value in leaf_paths(result.params).items() if is_adapter(path)]
    assert norms[7] == pytest.approx(np.sqrt(sum(np.sum(np.square(value)) for value in adapters)), rel=1e-5)


def test_only_the_products_named_get_one(tiny_config):
    setup = build_setup(tiny_config(*QUICK, *LORA, *PLAIN, "lora_module_path=.*/attention/(query|value)"))
    with use_mesh(setup.mesh, setup.rules, execution=setup.execution):
        after, _ = jax.eval_shape(setup.train_step, setup.abstract, setup.abstract_batch)
    paths = {path.rpartition("/")[0] for path in leaf_paths(after.params) if is_adapter(path)}
    assert paths == {f"group_0/layers/block_0/attention/{name}" for name in ("query", "value")}


def test_a_resumed_run_equals_the_uninterrupted_one(adapted_run, train, logged):
    train(*QUICK, *LORA, "steps=5", "run_name=parts")
    parts = train(*QUICK, *LORA, "steps=8", "run_name=parts")
    for left, right in zip(jax.tree.leaves(adapted_run.params), jax.tree.leaves(parts.params), strict=True):
        np.testing.assert_array_equal(left, right)
    assert logged(adapted_run)[7] == logged(parts)[7]


def test_moments_and_gradients_are_of_adapters_alone(tiny_config):
    keys = ("cpu_devices=8", "ici_data_parallelism=8", "ici_fsdp_parallelism=1")
    plain, adapted, split, away = (
        build_setup(tiny_config(*keys, *more))
        for more in (
            (),
            LORA,
            (*LORA, "shard_optimizer_over_data=true"),
            (*LORA, "optimizer_memory_host_offload=true"),
        )
    )
    weights, adapters = (setup.model.num_parameters for setup in (plain, adapted))
    adapters -= weights
    assert device_bytes(plain.abstract_gradients) == 4 * weights
    assert device_bytes(adapted.abstract_gradients) == 4 * adapters
    # Beside two moments there is the number of the step.
    assert device_bytes(adapted.abstract.opt_state) == 2 * 4 * adapters + 4 * 2
    assert device_bytes(split.abstract.opt_state) == 2 * 4 * adapters / 8 + 4 * 2
    lines = start_lines(tiny_config(*keys, *LORA), adapted)
    assert any(line.startswith(f"Trained: adapters, {adapters:,} parameters") for line in lines)
    assert any(line.startswith("Adapted: rank 4, alpha 8: group_0/block_0/") for line in lines)
    assert not any(
        line.startswith(("Trained", "Adapted", "As they are")) for line in start_lines(tiny_config(*keys), plain)
    )
    assert host_bytes(away.abstract.opt_state) >= 2 * 4 * adapters > 100 * device_bytes(away.abstract.opt_state)


@functools.cache
def compiled_step(*more: str) -> tuple:
    """The setup of a model whose weights outweigh all else, and the memory and the FLOPs of its step."""
    setup = build_setup(
        load_tiny("emb_dim=128", "mlp_dim=512", "num_decoder_layers=4", "cpu_devices=1", "attention=dot_product", *more)
    )
    with use_mesh(setup.mesh, setup.rules, execution=setup.execution):
        compiled = setup.train_step.lower(setup.abstract, setup.abstract_batch).compile()
    return setup, compiled.memory_analysis(), compiled.cost_analysis()["flops"]


def test_the_compiled_step_holds_no_gradient_of_what_stays_and_copies_none_of_it():
    plain, all_train, all_flops = compiled_step()
    adapted, few_train, few_flops = compiled_step(*LORA)
    weights = device_bytes(plain.abstract.params)
    assert all_train.temp_size_in_bytes > weights
    assert few_train.temp_size_in_bytes < weights / 2
    # The state comes out where it went in, the frozen weights too.
    assert few_train.alias_size_in_bytes >= device_bytes(adapted.abstract)
    assert few_train.argument_size_in_bytes < weights + 4 * device_bytes(adapted.abstract_gradients)
    # A third of a plain step's products are of weight gradients.
    assert few_flops < 0.75 * all_flops


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("plain", "ici_fsdp=4 ici_tensor=2"),
        pytest.param("dense", "ici_data=8 shard_optimizer_over_data=true", marks=pytest.mark.slow),
        pytest.param("dense", "ici_fsdp=8 optimizer_memory_host_offload=true", marks=pytest.mark.slow),
        pytest.param("dense", "ici_data=2 ici_fsdp=2 gradient_accumulation_steps=4", marks=pytest.mark.slow),
        pytest.param("dense", "ici_fsdp=4 ici_tensor=2 weight_quantization=int8", marks=pytest.mark.slow),
        pytest.param("dense", "ici_pipeline=2 ici_fsdp=4 weight_quantization=int4", marks=pytest.mark.slow),
        pytest.param("moe", "ici_expert=2 ici_fsdp=2 ici_tensor=2 weight_quantization=int8", marks=pytest.mark.slow),
        pytest.param("moe", "ici_context=4 ici_tensor=2", marks=pytest.mark.slow),
        pytest.param(
            "mla", "ici_pipeline=2 ici_fsdp=2 ici_tensor=2 num_pipeline_microbatches=4", marks=pytest.mark.slow
        ),
    ],
)
def test_training_is_that_of_one_device(name, mesh):
    stored = tuple(text for text in mesh.split() if text.startswith("weight_quant"))
    # lora_b begins as zeros, and plain gradient descent moves slowly away.
    keys = (*of_model(name), "lora_rank=4", "lora_alpha=16", *stored)
    expected_losses, _, expected_params, _ = run((*keys, "cpu_devices=1"))
    losses, _, params, _ = run((*keys, *degrees(" ".join(text for text in mesh.split() if text not in stored))))
    # Far more than the tolerance below.
    assert all(np.abs(value).max() > 1e-3 for path, value in leaf_paths(params).items() if path.endswith("lora_b"))
    if name == "mla":
        # After some steps a last bit sends a token of nearly equal scores to another expert.
        np.testing.assert_allclose(losses[:6], expected_losses[:6], atol=1e-5)
        return
    np.testing.assert_allclose(losses, expected_losses, atol=1e-5)
    for path, value in leaf_paths(params).items():
        np.testing.assert_allclose(value, leaf_paths(expected_params)[path], atol=5e-5, err_msg=path)


@pytest.mark.parametrize("qtype", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_stored_base_takes_the_bytes_of_its_codes_and_no_more_in_the_step(qtype):
    """QLoRA (arXiv:2305.14314): what a step holds beside its state is what it holds with a float base."""
    plain, floats, _ = compiled_step(*LORA)
    stored, codes, _ = compiled_step(*LORA, f"weight_quantization={qtype}")
    products = [product for product in plain.model.products if product.equipment.adapter is not None]
    elements = sum(product.repeats * math.prod(product.shape) for product in products)
    width = {"nf4": 0.5 + 4 / 64, "int8": 1}[qtype]
    scales = 0 if qtype == "nf4" else sum(4 * product.repeats * product.shape[-1] for product in products)
    saved = floats.argument_size_in_bytes - codes.argument_size_in_bytes
    assert saved == pytest.approx((4 - width) * elements - scales, rel=0.02)
    assert codes.alias_size_in_bytes >= device_bytes(stored.abstract)
    # One layer's kernels may be there as floats, and never those of all.
    assert codes.temp_size_in_bytes - floats.temp_size_in_bytes < 4 * elements / 4


def test_adapters_learn_beside_codes_that_stay(train, logged):
    result = train(*QUICK, *LORA, "steps=6", "weight_quantization=int4")
    leaves = leaf_paths(result.params)
    assert leaves["group_0/layers/block_0/mlp/up/codes"].dtype.itemsize == 1
    losses = logged(result)
    assert losses[5] < losses[0]
    resumed = train(*QUICK, *LORA, "steps=7", "weight_quantization=int4")
    for path, value in leaf_paths(resumed.params).items():
        assert np.array_equal(value, leaves[path]) != is_adapter(path), path


def test_flops_are_four_a_weight_and_six_an_adapters(tiny_config):
    keys = ("cpu_devices=1",)
    for name in ("dense", "moe"):
        plain, adapted = (tiny_config(*keys, *MODELS[name], *more) for more in ((), LORA))
        model = build_model(adapted.model, adapted.compute)
        adapters = model.num_active_parameters - build_model(plain.model, plain.compute).num_active_parameters
        assert active_adapters(model) == adapters > 0
        before = train_step_flops(plain.model, 2, 32)
        after = train_step_flops(adapted.model, 2, 32, adapters)
        assert after.attention_flops == before.attention_flops
        assert after.weight_flops == before.weight_flops * 4 // 6 + 6 * adapters * 64


def test_codes_without_adapters_do_not_train(train):
    with pytest.raises(ConfigError, match="weight_quantization=int8.*lora_rank=8"):
        train(*QUICK, "weight_quantization=int8")
