"""Attention over shared-out rows against plain attention on one device: outputs, gradients, work per device."""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

from maxlite.ops.attention import dot_product_attention
from maxlite.ops.attention_types import AttentionOptions, ContextParallel
from maxlite.ops.context_parallel import _Sharing, balanced_order, context_attention
from maxlite.ops.flash_attention import flash_attention

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 32, 4, 2, 4
NOTHING = {"window": None, "chunk": None, "soft_cap": None, "sinks": False, "segments": False, "value_dim": HEAD_DIM}
CASES = {
    "causal": {},
    "segments": {"segments": True},
    "window of one run": {"window": 4, "sinks": True},
    "window of some runs": {"window": 11, "segments": True},
    "chunk and narrow values": {"chunk": 6, "segments": True, "value_dim": 3},
    "soft cap and sinks": {"soft_cap": 0.7, "sinks": True},
    "everything": {"window": 13, "chunk": 9, "soft_cap": 0.7, "sinks": True, "segments": True, "value_dim": 6},
}
BALANCED_RING = ContextParallel("ring", True)
SHARINGS = [
    BALANCED_RING,
    *(ContextParallel(*row) for row in (("all_gather", True), ("ring", False), ("all_gather", False))),
]
# Every way with every case, of which the few that are unlike one another run by default.
QUICK = {
    (BALANCED_RING, "causal"),
    *((way, "everything") for way in SHARINGS),
}
EACH = [
    pytest.param(
        way,
        name,
        id=f"{way.strategy}-{'balanced' if way.load_balance else 'in order'}-{name}",
        marks=[] if (way, name) in QUICK else pytest.mark.slow,
    )
    for way in SHARINGS
    for name in CASES
]


def build_mesh(**degrees: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(list(degrees.values())))])
    return Mesh(devices.reshape(*degrees.values()), tuple(degrees), axis_types=(AxisType.Auto,) * len(degrees))


def arrays(value_dim: int, sinks: bool, length: int = LENGTH, seed: int = 0) -> dict:
    """What gradients are taken of."""
    generator = np.random.default_rng(seed)
    shapes = {"query": (HEADS, HEAD_DIM), "key": (KV_HEADS, HEAD_DIM), "value": (KV_HEADS, value_dim)}
    given = {name: generator.normal(size=(BATCH, length, *shape)) for name, shape in shapes.items()}
    if sinks:
        given["sinks"] = np.array([0.7, -1.3, 2.0, 9.0])
    return {name: array.astype(np.float32) for name, array in given.items()}


def tokens(segments: bool, length: int = LENGTH) -> tuple[np.ndarray, np.ndarray | None]:
    """Positions and segments: row 0 packs three documents and padding, row 1 is one document."""
    positions = np.tile(np.arange(length, dtype=np.int32), (BATCH, 1))
    if not segments:
        return positions, None
    segment_ids = np.ones_like(positions)
    for segment, start in ((2, length // 3), (3, length // 2 + 1), (0, length - length // 5)):
        segment_ids[0, start:] = segment
        positions[0, start:] = np.arange(length - start)
    return positions, segment_ids


def weighted(context: jax.Array) -> jax.Array:
    """A sum in which every output has a weight of its own."""
    return jnp.sum(context * np.sin(np.arange(context.size, dtype=np.float32)).reshape(context.shape))


def options_of(case: dict) -> AttentionOptions:
    return AttentionOptions(HEAD_DIM**-0.5, case["window"], case["chunk"], case["soft_cap"])


def plain(case: dict, given: dict) -> jax.Array:
    positions, segment_ids = tokens(case["segments"], given["query"].shape[1])
    return dot_product_attention(
        **given,
        query_positions=positions,
        key_positions=positions,
        query_segment_ids=segment_ids,
        key_segment_ids=segment_ids,
        **options_of(case)._asdict(),
    )


def shared_out(mesh: Mesh, sharing: ContextParallel, case: dict) -> Callable[..., jax.Array]:
    """A function like `plain`, of arrays in the order of the row, that runs on `mesh`."""
    axes = tuple(axis for axis in ("context", "context2") if axis in mesh.shape)
    heads = "tensor" if "tensor" in mesh.shape else None
    batch = "data" if "data" in mesh.shape else None
    spec, ids = PartitionSpec(batch, axes, heads), PartitionSpec(batch, axes)
    specs = {"query": spec, "key": spec, "value": spec, "sinks": PartitionSpec(heads)}

    def on_device(given: dict, positions: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        query, key = given["query"], given["key"]
        heads = (key.shape[2], query.shape[2] // key.shape[2])
        sinks = given["sinks"].reshape(heads) if "sinks" in given else None
        context = context_attention(
            options_of(case),
            query.reshape(*query.shape[:2], *heads, -1),
            key,
            given["value"],
            positions,
            segment_ids,
            sinks,
            axes=axes,
            context_parallel=sharing,
            kernel=lambda *arguments, shard: flash_attention(*arguments),
        )
        return context.reshape(*query.shape[:3], -1)

    def run(given: dict, first_segment: jax.Array | int = 1) -> jax.Array:
        length = given["query"].shape[1]
        order = np.arange(length)
        if sharing.load_balance:
            order = balanced_order(length, int(np.prod([mesh.shape[axis] for axis in axes])))
        positions, segment_ids = tokens(case["segments"], length)
        if segment_ids is not None:
            segment_ids = jnp.where(segment_ids == 0, 0, segment_ids + first_segment - 1)
        moved = {name: array if name == "sinks" else array[:, order] for name, array in given.items()}
        arguments = (moved, positions[:, order], segment_ids if segment_ids is None else segment_ids[:, order])
        in_specs = ({name: specs[name] for name in given}, ids, None if segment_ids is None else ids)
        per_device = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=False)
        return per_device(*arguments)[:, np.argsort(order)]

    return run


def value_and_gradients(function: Callable[..., jax.Array], given: dict) -> tuple[jax.Array, dict]:
    def loss(given: dict) -> tuple[jax.Array, jax.Array]:
        context = function(given)
        return weighted(context), context

    (_, context), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(given)
    return context, gradients


@functools.cache
def on_one_device(name: str) -> tuple[jax.Array, dict]:
    case = NOTHING | CASES[name]
    return value_and_gradients(functools.partial(plain, case), arrays(case["value_dim"], case["sinks"]))


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected)


def assert_equals_one_device(name: str, way: ContextParallel, mesh: Mesh) -> None:
    case = NOTHING | CASES[name]
    given = arrays(case["value_dim"], case["sinks"])
    assert_close(value_and_gradients(shared_out(mesh, way, case), given), on_one_device(name))


@pytest.mark.parametrize(("way", "name"), EACH)
def test_equals_one_device(way, name):
    num_shards = 4 if name in ("causal", "window of one run", "everything") else 2
    assert_equals_one_device(name, way, build_mesh(context=num_shards))


@pytest.mark.parametrize(
    ("degrees", "way"),
    [
        ({"data": 2, "context": 2, "tensor": 2}, BALANCED_RING),
        pytest.param({"data": 2, "context": 2, "tensor": 2}, SHARINGS[1], marks=pytest.mark.slow),
        ({"context": 2, "context2": 2}, BALANCED_RING),
        ({"context": 2, "context2": 2}, SHARINGS[1]),
    ],
    ids=["ring, data and tensor", "all_gather, data and tensor", "ring, two axes", "all_gather, two axes"],
)
def test_beside_other_axes(degrees, way):
    assert_equals_one_device("everything", way, build_mesh(**degrees))


@pytest.mark.parametrize("way", SHARINGS[:2], ids=["ring", "all_gather"])
def test_inside_vmap_over_stages(way):
    """Stages hold other rows and segments, but whether shards meet must stay a branch, not a choice between results."""
    case = NOTHING | CASES["everything"]
    function = shared_out(build_mesh(stage=2, context=2), way, case)
    stages = jax.vmap(lambda given, first: function(given, first), spmd_axis_name="stage")
    one, other = (arrays(case["value_dim"], True, seed=seed) for seed in range(2))
    both = jax.tree.map(lambda *pair: np.stack(pair), one, other)
    first_segments = np.array([1, 5], np.int32)
    actual = value_and_gradients(lambda given: stages(given, first_segments), both)
    reference = jax.vmap(functools.partial(plain, case))
    assert_close(actual, value_and_gradients(reference, both))
    lowered = jax.jit(stages).lower(both, first_segments).as_text()
    alone = jax.jit(function).lower(one, 1).as_text()
    assert lowered.count("stablehlo.case") == alone.count("stablehlo.case") >= (way == BALANCED_RING)


def ring_of_layers(policy: Callable | None) -> tuple[Callable, Callable]:
    """Three layers that attend with keys and values of their own, scanned and rematerialized; and the reference."""
    case = NOTHING | CASES["segments"]
    function = shared_out(build_mesh(context=2), BALANCED_RING, case)

    def scanned(attend: Callable, given: dict) -> jax.Array:
        def layer(x: jax.Array, arrays: dict) -> tuple[jax.Array, None]:
            return x + attend(arrays | {"query": x * jnp.mean(arrays["query"])}), None

        return jax.lax.scan(
            layer if policy is None else jax.checkpoint(layer, policy=policy), given["query"][0], given
        )[0]

    return functools.partial(scanned, function), functools.partial(scanned, functools.partial(plain, case))


def stacked_layers() -> dict:
    layers = [arrays(HEAD_DIM, False, seed=seed) for seed in range(3)]
    return jax.tree.map(lambda *parts: np.stack(parts), *layers)


def test_inside_scanned_and_rematerialized_layers():
    given = stacked_layers()
    function, reference = ring_of_layers(jax.checkpoint_policies.nothing_saveable)
    assert_close(value_and_gradients(function, given), value_and_gradients(reference, given))


def test_a_saved_context_spares_the_ring():
    """With "context" saved the backward pass goes round once, for gradients; else twice."""

    def permutations(policy: Callable | None) -> int:
        function, _ = ring_of_layers(policy)
        jaxpr = jax.make_jaxpr(jax.grad(lambda given: weighted(function(given))))(stacked_layers())
        return str(jaxpr).count("= ppermute[")

    policies = jax.checkpoint_policies
    everything_saved = permutations(None)
    assert permutations(policies.save_only_these_names("context")) == everything_saved
    assert permutations(policies.nothing_saveable) > everything_saved > 0


def sent(way: ContextParallel, name: str, num_shards: int) -> Counter:
    """How often the program of the output and its gradients names each collective."""
    case = NOTHING | CASES[name]
    function = shared_out(build_mesh(context=num_shards), way, case)
    given = arrays(case["value_dim"], case["sinks"])
    lowered = jax.jit(jax.grad(lambda given: weighted(function(given)))).lower(given).as_text()
    return Counter(re.findall(r"stablehlo\.(collective_permute|all_gather|reduce_scatter)", lowered))


def test_what_is_sent():
    # Once round with keys and values, again with them and with their gradients, and the gradients' way home.
    assert sent(BALANCED_RING, "causal", 2) == {"collective_permute": 2 + 2 + 2 + 2}
    # From 4 shards on a loop sends on both, so that the program does not grow.
    assert sent(BALANCED_RING, "causal", 4) == sent(BALANCED_RING, "causal", 8)
    # The gradient of gathering is a scatter of sums; rows without segments and chunks have no more to send.
    assert sent(SHARINGS[1], "causal", 4) == {"all_gather": 2, "reduce_scatter": 2}


def test_half_precision_keeps_its_dtype():
    case = NOTHING | CASES["causal"]
    half = jax.tree.map(lambda array: array.astype(jnp.bfloat16), arrays(HEAD_DIM, False))
    actual = value_and_gradients(shared_out(build_mesh(context=2), BALANCED_RING, case), half)
    assert {array.dtype for array in jax.tree.leaves(actual)} == {jnp.dtype(jnp.bfloat16)}

    def difference(one, other):
        return np.abs(np.asarray(one, np.float32) - np.asarray(other)).max()

    assert max(jax.tree.leaves(jax.tree.map(difference, actual, on_one_device("causal")))) < 0.06


def sharing_of(num_shards: int, length: int, balance: bool, window: int | None = None) -> _Sharing:
    options = AttentionOptions(1.0, window, None, None)
    return _Sharing(options, ("context",), num_shards, length // num_shards, balance)


def computed(sharing: _Sharing, tile: int) -> np.ndarray:
    """Pairs of tiles in which something is seen, of those that a device computes in a step: [device, step]."""
    order, reach = sharing.order(), sharing.options.reach or LENGTH * 100
    counts = np.zeros((sharing.num_shards, sharing.num_shards), int)
    for steps in sharing.steps():
        for step, device in itertools.product(steps, range(sharing.num_shards)):
            overlaps, table = sharing.overlaps(range(step, step + 1))
            overlap = overlaps[table[device, device - step]]
            if overlap is not None:
                before = order[device][overlap.queries, None] - order[device - step][None, overlap.keys]
                seen = (before >= 0) & (before < reach)
                tiles = seen.reshape(len(seen) // tile, tile, -1, tile)
                counts[device, step] = tiles.any(axis=(1, 3)).sum()
    return counts


def all_tiles(length: int, tile: int, window: int) -> int:
    """Pairs of tiles of the whole row in which something is seen."""
    before = np.subtract.outer(np.arange(length), np.arange(length))
    seen = (before >= 0) & (before < window)
    return seen.reshape(length // tile, tile, -1, tile).any(axis=(1, 3)).sum()


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_balanced_devices_do_equal_work(num_shards):
    length, tile = 128, 2
    counts = computed(sharing_of(num_shards, length, True), tile)
    assert counts.sum() == all_tiles(length, tile, length)
    assert np.ptp(counts, axis=0).max() == 0, "each step takes each device equally long"
    steps_in_order = computed(sharing_of(num_shards, length, False), tile).max(axis=0).sum()
    steps_balanced = counts.max(axis=0).sum()
    # Without balance some device has a full step each time, which is 2 - 1 / num_shards of an equal share.
    share = (num_shards * length // (num_shards * tile)) ** 2 / 2 / num_shards
    assert steps_balanced == pytest.approx(share, rel=0.05)
    assert steps_in_order == pytest.approx(share * (2 - 1 / num_shards), rel=0.05)


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("window", [1, 2, 9, 16, 17, 40, 1000])
def test_a_window_leaves_out_far_shards_only(window, balance):
    length, num_shards = 128, 8
    sharing = sharing_of(num_shards, length, balance, window)
    assert computed(sharing, 1).sum() == all_tiles(length, 1, window)
    shards_seen = -(-(window - 1) // sharing.length)
    num_steps = sum(len(steps) for steps in sharing.steps())
    if not balance:
        assert num_steps == min(num_shards, 1 + shards_seen)
    else:
        runs_seen = -(-(window - 1) // (sharing.length // 2))
        assert num_steps == min(num_shards, 1 + 2 * runs_seen)


def test_balanced_order():
    np.testing.assert_array_equal(balanced_order(12, 3), [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7])
    np.testing.assert_array_equal(balanced_order(6, 1), np.arange(6))
    with pytest.raises(ValueError, match="10 tokens cannot be cut into 8"):
        balanced_order(10, 4)
