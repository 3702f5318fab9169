import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from maxlite.config.schema import MESH_AXES
from maxlite.model.build import build_model
from maxlite.model.pipeline import PipelineSchedule, build_pipeline_schedule, run_pipeline
from maxlite.nn.attention import AttentionContext
from maxlite.nn.rotary import rotary_tables, rotations
from maxlite.parallel.sharding import constrain, per_device, use_mesh

ROWS, LENGTH, DIM, HIDDEN = 8, 8, 16, 24
remat = functools.partial(jax.checkpoint, prevent_cse=False)


@pytest.fixture(scope="module")
def rules(tiny_config):
    return tiny_config().parallel.logical_axis_rules


def mesh_of(**degrees):
    shape = [degrees.get(axis, 1) for axis in MESH_AXES]
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def pattern(x, weights, context):
    """A layer that sees which row and which layer it works on; what it does to a zero row has no gradient."""
    hidden = constrain(jnp.einsum("btd,df->btf", x, weights["up"]), "batch", "length", "mlp")
    hidden = jnp.tanh(hidden + context["positions"][..., None])
    x = x + jnp.einsum("btf,fd->btd", hidden, weights["down"])
    x = x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True))
    return constrain(x, "batch", "norm_length", None), {"load": jnp.sum(jnp.abs(x), (0, 1)), "rows": jnp.sum(x[:, 0])}


def inputs(repeats, rows=ROWS):
    random = np.random.default_rng(0)

    def draw(*shape, scale=1.0):
        return np.asarray(random.normal(size=shape) * scale, np.float32)

    params = {"up": draw(repeats, DIM, HIDDEN, scale=0.2), "down": draw(repeats, HIDDEN, DIM, scale=0.2)}
    return params, draw(rows, LENGTH, DIM), {"positions": draw(rows, LENGTH), "segment_ids": None}


def sequential(run, params, x, context):
    return jax.lax.scan(lambda x, weights: run(x, weights, context), x, params)


def results(run):
    """-> (x, stats), gradients of params and x, through a loss in which each row and statistic counts differently."""

    def loss(params, x, context):
        x, stats = run(params, x, context)
        total = jnp.sum(jnp.sin(3 * x) * np.arange(1, 1 + x.shape[0])[:, None, None])
        for leaf in jax.tree.leaves(stats):
            total += 0.1 * jnp.sum(jnp.square(leaf) * np.arange(1, 1 + leaf.size).reshape(leaf.shape) / leaf.size)
        return total, (x, stats)

    def step(params, x, context):
        (_, made), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x, context)
        return made, gradients

    return step


def assert_equal(actual, expected):
    """Within 1e-5 of each array's largest value."""
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        largest = max(1.0, np.max(np.abs(other)))
        np.testing.assert_allclose(one / largest, other / largest, rtol=0, atol=1e-5, err_msg=str(path))


@functools.cache
def sequential_results(repeats, run=pattern):
    return jax.jit(results(functools.partial(sequential, run)))(*inputs(repeats))


def pipelined(schedule, run=pattern, wrap=remat):
    return lambda params, x, context: run_pipeline(run, params, x, context, schedule, wrap)


def compiled(rules, mesh, schedule, repeats, run=pattern):
    """The compiled step on a mesh, and its arguments where they belong."""
    params, x, context = inputs(repeats)
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp", "expert")))
    shardings = (
        {
            "up": NamedSharding(mesh, PartitionSpec("stage", "fsdp", "tensor")),
            "down": NamedSharding(mesh, PartitionSpec("stage", "tensor", "fsdp")),
        },
        rows,
        {"positions": rows, "segment_ids": None},
    )
    arguments = jax.device_put((params, x, context), shardings)
    with use_mesh(mesh, rules):
        step = jax.jit(results(pipelined(schedule, run)), out_shardings=(None, shardings[:2]))
        return step.lower(*arguments).compile(), arguments


def test_schedule_counts_rounds_ticks_and_bubble():
    schedule = PipelineSchedule(stages=4, microbatches=8, layers_per_stage=2)
    assert (schedule.rounds(32), schedule.ticks(32)) == (4, 35)
    assert schedule.bubble(32) == pytest.approx((4 - 1) / (4 - 1 + 8 * 4))
    assert build_pipeline_schedule(4, 32, None, None) == PipelineSchedule(4, 4, 8)
    assert build_pipeline_schedule(4, 32, 8, 1) == PipelineSchedule(4, 8, 1)


SCHEDULES = [
    (PipelineSchedule(1, 2, 1), 4),
    (PipelineSchedule(2, 1, 2), 4),
    (PipelineSchedule(2, 4, 2), 12),
    (PipelineSchedule(4, 2, 1), 4),
    (PipelineSchedule(3, 8, 2), 12),
    # More of what a smaller one above or a mesh below covers.
    pytest.param(PipelineSchedule(4, 4, 1), 8, marks=pytest.mark.slow),
    pytest.param(PipelineSchedule(4, 8, 2), 8, marks=pytest.mark.slow),
    pytest.param(PipelineSchedule(3, 4, 1), 6, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("schedule", "repeats"), SCHEDULES)
def test_any_schedule_equals_one_layer_after_the_other(schedule, repeats):
    actual = jax.jit(results(pipelined(schedule)))(*inputs(repeats))
    assert_equal(actual, sequential_results(repeats))


# Of two stages beside two parts of the rows, the test of what stages exchange below.
MESHES = [
    pytest.param({"stage": 4}, PipelineSchedule(4, 4, 1), 8, marks=pytest.mark.slow),
    ({"stage": 4, "data": 2}, PipelineSchedule(4, 2, 2), 8),
    ({"stage": 2, "fsdp": 2, "tensor": 2}, PipelineSchedule(2, 2, 2), 8),
    ({"stage": 2, "expert": 2, "context": 2}, PipelineSchedule(2, 4, 4), 8),
]


@pytest.mark.parametrize(("degrees", "schedule", "repeats"), MESHES)
def test_stages_on_devices_give_the_same(rules, degrees, schedule, repeats):
    step, arguments = compiled(rules, mesh_of(**degrees), schedule, repeats)
    assert_equal(step(*arguments), sequential_results(repeats))


@pytest.mark.parametrize(("stages", "rounds"), [(2, 2), (4, 3), (4, 4), (8, 6)])
def test_layers_are_dealt_in_their_order(rules, stages, rounds):
    """Each layer adds its number to twice what it gets; so the result spells the order."""

    def spell(x, weights, context):
        return x * 2 + weights, None

    repeats = stages * rounds
    numbers = np.arange(repeats, dtype=np.float32) % 7
    mesh = mesh_of(stage=stages)
    with use_mesh(mesh, rules):
        numbers_there = jax.device_put(numbers, NamedSharding(mesh, PartitionSpec("stage")))
        run = jax.jit(lambda params, x: pipelined(PipelineSchedule(stages, stages, 1), spell)(params, x, None)[0])
        x = run(numbers_there, np.zeros((stages, 1, 1), np.float32))
    expected = sum(number * 2.0 ** (repeats - 1 - layer) for layer, number in enumerate(numbers))
    np.testing.assert_allclose(x, expected, rtol=1e-6)


def collectives(text):
    """(kind, shapes of the result, source and target pairs) of each collective in a compiled program."""
    found = re.findall(
        r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\((.*)", text
    )
    for result, kind, rest in found:
        pairs = re.search(r"source_target_pairs=\{(.*?)\}[,\s]", rest + " ")
        numbers = re.findall(r"\{(\d+),(\d+)", "{" + pairs[1] if pairs else "")
        yield kind, re.findall(r"\[([\d,]*)\]", result), [(int(a), int(b)) for a, b in numbers]


def without_stats(x, weights, context):
    return pattern(x, weights, context)[0], None


@pytest.mark.parametrize("layers_per_stage", [1, 4])
def test_stages_exchange_rows_and_no_weights(rules, layers_per_stage):
    mesh = mesh_of(data=2, stage=2)
    schedule = PipelineSchedule(2, 4, layers_per_stage)
    step, arguments = compiled(rules, mesh, schedule, 8, without_stats)
    assert_equal(step(*arguments), sequential_results(8, without_stats))
    rows = f"1,1,{LENGTH},{DIM}"
    weights = {f"{layers_per_stage},{DIM},{HIDDEN}", f"{layers_per_stage},{HIDDEN},{DIM}"}
    exchanged = set()
    for kind, shapes, pairs in collectives(step.as_text()):
        assert kind in ("collective-permute", "all-reduce"), (kind, shapes)
        if kind == "collective-permute":
            # Devices 0, 1 are the stages of the first half of the rows, 2, 3 those of the second.
            assert all(source // 2 == target // 2 for source, target in pairs), pairs
            exchanged |= set(shapes)
    # With several rounds a step begins with every layer going where it is needed, once.
    assert exchanged == ({rows} if layers_per_stage == 4 else {rows, *weights})


def test_program_does_not_grow_with_ticks():
    def size(microbatches):
        params, x, context = inputs(4, rows=2 * microbatches)
        step = jax.jit(results(pipelined(PipelineSchedule(2, microbatches, 1))))
        return len(step.lower(params, x, context).as_text().splitlines())

    assert size(4) == size(16)


@pytest.mark.parametrize(("schedule", "repeats"), [(PipelineSchedule(2, 4, 2), 4), (PipelineSchedule(2, 4, 2), 8)])
def test_backward_pass_keeps_one_input_a_layer_and_no_weights(schedule, repeats):
    params, x, context = inputs(repeats)
    run = pipelined(schedule, without_stats)
    kept = jax.eval_shape(lambda params, x: jax.vjp(lambda *given: run(*given, context)[0], params, x)[1], params, x)
    shapes = [leaf.shape for leaf in jax.tree.leaves(kept) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    ticks, stages, each = schedule.ticks(repeats), schedule.stages, schedule.layers_per_stage
    of_rows = (ticks, each, stages, ROWS // schedule.microbatches, LENGTH, DIM)
    assert [shape for shape in shapes if shape[0] == ticks] == [of_rows]
    # All else is the rows' positions and the weights, once each.
    once = sum(leaf.size for leaf in jax.tree.leaves((params, context)))
    assert sum(int(np.prod(shape)) for shape in shapes) <= int(np.prod(of_rows)) + once


@pytest.mark.parametrize("layers_per_stage", [1, 2])
def test_gradients_of_microbatches_sum_up_in_float32(layers_per_stage):
    """512 times one; in bfloat16, 256 + 1 is 256."""

    def total(params, x):
        run = pipelined(PipelineSchedule(2, 512, layers_per_stage), lambda x, weight, _: (x + weight, None))
        return jnp.sum(run(params, x, None)[0])

    gradient = jax.jit(jax.grad(total))(np.zeros(4, jnp.bfloat16), np.zeros((512, 1, 1), np.float32))
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient, np.full(4, 512, jnp.bfloat16))


def ring_sum(x, y):
    """Sum over the tensor axis, by what attention over a cut length does: shards that go round."""
    total, size = y, jax.lax.axis_size("tensor")
    for _ in range(size - 1):
        y = jax.lax.ppermute(y, "tensor", [(i, (i + 1) % size) for i in range(size)])
        total = total + y
    return x + total


def test_layers_may_be_per_device_programs_with_collectives(rules):
    def mlp(x, up, down, positions):
        up = jax.lax.all_gather(up, "fsdp", axis=0, tiled=True)
        hidden = jnp.tanh(jnp.einsum("btd,df->btf", x, up) + positions[..., None])
        return ring_sum(x, jnp.einsum("btf,fd->btd", hidden, down))

    def run(x, weights, context):
        axes = (("batch", "length", None), ("embed", "mlp"), ("mlp", None), ("batch", "length"))
        x = per_device(mlp, axes, ("batch", "length", None))(x, weights["up"], weights["down"], context["positions"])
        # The norm and the statistics as they are.
        x = x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True))
        return x, {"load": jnp.sum(jnp.abs(x), (0, 1)), "rows": jnp.sum(x[:, 0])}

    step, arguments = compiled(rules, mesh_of(stage=2, fsdp=2, tensor=2), PipelineSchedule(2, 4, 1), 8, run)
    assert_equal(step(*arguments), sequential_results(8))


MODELS = [
    (("num_decoder_layers=4",), {"stage": 2, "fsdp": 2, "tensor": 2}, (2, 1)),
    (("num_decoder_layers=4",), {"stage": 4, "data": 2}, (2, None)),
    (
        ("num_decoder_layers=8", "attention_pattern=local,full", "sliding_window_size=3", "use_qk_norm=true"),
        {"stage": 2, "data": 2},
        (4, 2),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("overrides", "degrees", "keys"), MODELS)
def test_real_layers_give_the_same(tiny_config, noisy_params, rules, overrides, degrees, keys):
    config = tiny_config("emb_dim=32", "mlp_dim=48", "head_dim=8", *overrides)
    model = build_model(config.model, config.compute)
    random = np.random.default_rng(1)
    x = np.asarray(random.normal(size=(ROWS, LENGTH, 32)), np.float32)
    # Packed rows, each packed differently.
    segment_ids = np.sort(random.integers(1, 4, (ROWS, LENGTH)), axis=1).astype(np.int32)
    positions = np.stack([np.arange(LENGTH) - np.searchsorted(row, row) for row in segment_ids]).astype(np.int32)
    turns = rotations(rotary_tables(config.model), positions)
    context = AttentionContext(positions, segment_ids, positions, segment_ids, turns, None)
    params = noisy_params(model)
    graphdef, _ = nnx.split(nnx.merge(model.graphdef, params).group_0.layers)
    params = params["group_0"]["layers"]

    def run(x, weights, context):
        return nnx.merge(graphdef, weights)(x, context, None)[0], None

    expected = jax.jit(results(functools.partial(sequential, run)))(params, x, context)
    mesh = mesh_of(**degrees)
    repeats = jax.tree.leaves(params)[0].shape[0]
    schedule = build_pipeline_schedule(mesh.shape["stage"], repeats, *keys)
    with use_mesh(mesh, rules):
        rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp", "expert")))
        shardings = (model.shardings(mesh, rules)["group_0"]["layers"], rows, jax.tree.map(lambda _: rows, context))
        arguments = jax.device_put((params, x, context), shardings)
        step = jax.jit(results(pipelined(schedule, run)), out_shardings=(None, shardings[:2]))
        assert_equal(step(*arguments), expected)
