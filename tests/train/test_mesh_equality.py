"""The same training on any mesh: losses, gradients and parameters of one device, for every axis and many mixes."""

import functools
import itertools
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from maxlite.data.batch import Batch
from maxlite.parallel.sharding import use_mesh
from maxlite.train.setup import build_setup
from maxlite.train.state import init_state
from tests.conftest import LATENT, load_tiny

ROWS, LENGTH, VOCAB, STEPS = 16, 32, 64, 10
# Plain gradient descent, so that the first step's change of the parameters is its gradient.
RATE = 0.1
COMMON = (
    "emb_dim=32",
    "mlp_dim=48",
    "num_decoder_layers=4",
    "num_query_heads=4",
    "num_kv_heads=2",
    "head_dim=8",
    "per_device_batch_size=" + str(ROWS),
    "opt_type=sgd",
    f"learning_rate={RATE}",
    "warmup_steps_fraction=0",
    "learning_rate_final_fraction=1",
    "adam_weight_decay=0",
    "gradient_clipping_threshold=0",
    f"steps={STEPS}",
    "z_loss_multiplier=0.001",
)
MODELS = {
    # Windows, soft caps, sinks and grouped heads in one.
    "dense": (
        "attention_pattern=[local,full]",
        "sliding_window_size=10",
        "attn_logits_soft_cap=20",
        "attention_sink=true",
        "use_qk_norm=true",
    ),
    "moe": (
        "mlp_pattern=[moe]",
        "num_experts=8",
        "num_experts_per_tok=2",
        "moe_mlp_dim=24",
        "shared_expert_mlp_dim=16",
        "load_balance_loss_weight=0.01",
    ),
    # Latent attention; two dense layers, then two with sigmoid routers whose biases move.
    "mla": (
        *LATENT,
        "mlp_pattern=[moe]",
        "num_dense_layers=2",
        "num_experts=8",
        "num_experts_per_tok=3",
        "moe_mlp_dim=24",
        "routed_score_func=sigmoid",
        "routed_bias=true",
        "n_routing_groups=4",
        "topk_routing_group=2",
        "router_group_score=top2_sum",
        "routed_scaling_factor=1.5",
        "routed_bias_update_rate=0.001",
        "load_balance_loss_weight=0.001",
    ),
}
# The smallest programs, for what the kind of layer has nothing to do with.
PLAIN = ("attention=dot_product", "remat_policy=none", "num_decoder_layers=2")
IN_ORDER = "context_parallel_load_balance=false"
MESHES = {
    "data": "ici_data=8",
    "fsdp": "ici_fsdp=8",
    "tensor": "ici_tensor=2",
    "context": "ici_context=8",
    "context ring": "ici_context=8 context_parallel_strategy=ring",
    "expert": "ici_expert=8",
    "stage": "ici_pipeline=2",
    "zero-1": "ici_data=8 shard_optimizer_over_data=true",
    "fsdp x tensor": "ici_fsdp=4 ici_tensor=2",
    "data x fsdp x tensor": "ici_data=2 ici_fsdp=2 ici_tensor=2",
    "expert x fsdp": "ici_expert=4 ici_fsdp=2",
    "expert x tensor": "ici_expert=4 ici_tensor=2",
    "expert x fsdp x tensor": "ici_expert=2 ici_fsdp=2 ici_tensor=2",
    "context x tensor": "ici_context=4 ici_tensor=2",
    "ring x tensor": "ici_context=4 ici_tensor=2 context_parallel_strategy=ring",
    "context x fsdp, in order": f"ici_context=4 ici_fsdp=2 {IN_ORDER}",
    "ring x data, in order": f"ici_context=4 ici_data=2 context_parallel_strategy=ring {IN_ORDER}",
    "context x expert x data": "ici_context=2 ici_expert=2 ici_data=2",
    "stage x data": "ici_pipeline=2 ici_data=4",
    "stage x fsdp x tensor": "ici_pipeline=2 ici_fsdp=2 ici_tensor=2 num_pipeline_microbatches=4",
    "stage x expert": "ici_pipeline=2 ici_expert=4 num_layers_per_pipeline_stage=null",
    "stage x context": "ici_pipeline=2 ici_context=4",
    "two slices, data x fsdp": "dcn_data=2 ici_fsdp=4",
    "two slices, fsdp x tensor": "dcn_data=1 dcn_fsdp=2 ici_fsdp=2 ici_tensor=2",
    "two slices, stage x fsdp": "dcn_data=1 dcn_pipeline=2 ici_fsdp=4",
    "zero-1, fsdp": "ici_data=2 ici_fsdp=4 shard_optimizer_over_data=true",
    "moments on the host, fsdp": "ici_fsdp=8 optimizer_memory_host_offload=true",
    "accumulated, data x fsdp": "ici_data=2 ici_fsdp=2 gradient_accumulation_steps=4",
    "one device, unrolled": "scan_layers=false",
    "unrolled, fsdp x tensor": "ici_fsdp=4 ici_tensor=2 scan_layers=false",
    "unrolled, context x expert": "ici_context=2 ici_expert=4 scan_layers=false",
    "unrolled, stage x tensor": "ici_pipeline=2 ici_tensor=2 scan_layers=false",
}
# What the default suite runs; the whole table is run by CI.
QUICK = {("mla", "stage x fsdp x tensor")}
# What these do has little to do with the kind of layer: each is run with one model, in turn.
ANY_MODEL = ("two slices", "zero-1", "moments", "accumulated", "one device", "unrolled")
# Parts of other meshes in the table, which have every model: these are there with one, in turn.
PARTS = ("data", "fsdp", "tensor", "context", "context ring", "stage", "fsdp x tensor")


def pairs() -> Iterator[tuple[str, str]]:
    """Model and mesh of every case; latent attention has every second mesh, having the parts of the other two."""
    turns, turns_of_parts = itertools.cycle(MODELS), itertools.cycle(("dense", "moe"))
    for number, mesh in enumerate(MESHES):
        if mesh.startswith(ANY_MODEL):
            yield next(turns), mesh
        elif mesh in PARTS:
            yield next(turns_of_parts), mesh
        else:
            # Without experts their axis is one more of rows, as in the largest of its meshes.
            dense = "expert" not in mesh or mesh == "expert x fsdp x tensor"
            yield from ((m, mesh) for m in MODELS if (m != "mla" or number % 2) and (m != "dense" or dense))


CASES = [
    pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow, id=": ".join(pair))
    for pair in sorted(pairs(), key=lambda pair: tuple(MODELS).index(pair[0]))
]


def packed_batch(seed: int) -> Batch:
    """Rows of one to four documents and some padding at the end."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    segments = np.zeros((ROWS, LENGTH), np.int32)
    positions = np.zeros((ROWS, LENGTH), np.int32)
    for row in range(ROWS):
        start, number = 0, 0
        while start < LENGTH - 4 and number < 4:
            size = min(int(random.integers(5, 24)), LENGTH - start - int(random.integers(0, 4)))
            number += 1
            segments[row, start : start + size] = number
            positions[row, start : start + size] = np.arange(size)
            start += size
    real = segments != 0
    targets = np.where(real, tokens[:, 1:], 0)
    return Batch(np.where(real, tokens[:, :-1], 0), targets, real.astype(np.float32), positions, segments)


def run(overrides: tuple[str, ...]) -> tuple[list[float], dict, dict, dict]:
    """Returns the losses, the gradient of the first step, the last parameters and the last metrics."""
    given = {text.partition("=")[0] for text in overrides}
    config = load_tiny(*[text for text in COMMON if text.partition("=")[0] not in given], *overrides)
    setup = build_setup(config)
    with use_mesh(setup.mesh, setup.rules, execution=setup.execution):
        shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract)
        start = jax.jit(lambda key: init_state(setup.model, setup.optimizer, key), out_shardings=shardings)
        state = start(jax.random.key(0))
        before = jax.device_get(state.params)
        losses, gradient, metrics = [], None, {}
        for step in range(STEPS):
            state, metrics = setup.train_step(state, setup.place(packed_batch(step)))
            losses.append(float(metrics["loss"]))
            if gradient is None:
                after = jax.device_get(state.params)
                gradient = jax.tree.map(lambda old, new: (old - new) / RATE, before, after)
    assert setup.train_step._cache_size() == 1
    return losses, gradient, jax.device_get(state.params), jax.device_get(metrics)


@functools.cache
def on_one_device(model: str) -> tuple:
    return run((*MODELS[model], "cpu_devices=1"))


def degrees(mesh: str) -> tuple[str, ...]:
    """ici_data=8 -> ici_data_parallelism=8, and as many devices as they multiply to."""
    texts, devices = ["ici_fsdp_parallelism=1", "dcn_data_parallelism=1"], 1
    for text in mesh.split():
        name, value = text.split("=")
        if name.startswith(("ici_", "dcn_")):
            texts = [other for other in texts if not other.startswith(name)]
            texts.append(f"{name}_parallelism={value}")
            devices *= int(value)
        else:
            texts.append(text)
    return (*texts, f"cpu_devices={devices}", f"per_device_batch_size={ROWS / devices}")


@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_training_is_that_of_one_device(model, mesh):
    expected_losses, expected_gradient, expected_params, expected_metrics = on_one_device(model)
    losses, gradient, params, metrics = run((*MODELS[model], *degrees(MESHES[mesh])))
    np.testing.assert_allclose(losses, expected_losses, atol=1e-5)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(gradient)]
    for path, got, expected in zip(paths, jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5, err_msg=path)
    for path, got, expected in zip(paths, jax.tree.leaves(params), jax.tree.leaves(expected_params), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5, err_msg=path)
    for name, expected in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], expected, atol=1e-4, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "model", [name if name == "mla" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_the_reference_learns_and_every_part_gets_a_gradient(model):
    """Equality of nothing with nothing would prove nothing."""
    losses, gradient, _, metrics = on_one_device(model)
    assert losses[-1] < losses[0]
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.abs(leaf).max() > 1e-5, jax.tree_util.keystr(path)
    assert ("moe_lb_loss" in metrics) == (model != "dense")
