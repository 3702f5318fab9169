"""Exchanges between devices against plain permutations in numpy; capacity against a loop over tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from maxlite.ops import dispatch as ops
from maxlite.ops.dispatch import capacity, dropless, group_by_capacity, with_capacity

DEVICES, TOKENS, NUM_EXPERTS, CHOICES, DIM = 4, 6, 8, 2, 3


def choose(kind):
    """experts [P, T, k] of each device's tokens; all to one device, or to two experts, leaves others without a row."""
    allowed = {"random": range(NUM_EXPERTS), "few": (0, 3, 6), "all to the last": (6, 7), "two": (0, 7)}[kind]
    generator = np.random.default_rng(0)
    tokens = [generator.permutation(allowed)[:CHOICES] for _ in range(DEVICES * TOKENS)]
    return np.stack(tokens).reshape(DEVICES, TOKENS, CHOICES).astype(np.int32)


def mesh():
    return Mesh(np.array(jax.devices()[:DEVICES]), ("expert",), axis_types=(AxisType.Auto,))


def on_devices(function):
    """`function` of arrays of which each device has a part, along the first dimension."""
    return jax.shard_map(function, mesh=mesh(), in_specs=P("expert"), out_specs=P("expert"), check_vma=False)


def reference_ragged(operand, output, here, rows, there, arriving, *, axis_name):
    """What the documentation of lax.ragged_all_to_all says, slowly, from everything that all devices have."""
    everything = [jax.lax.all_gather(array, axis_name) for array in (operand, here, rows, there)]
    me, slices_each = jax.lax.axis_index(axis_name), here.size // DEVICES
    assert arriving.shape == here.shape
    for sender in range(DEVICES):
        sent, starts, sizes, places = (array[sender] for array in everything)
        for index in range(slices_each):
            of_me = me * slices_each + index
            place = jnp.arange(output.shape[0]) - places[of_me]
            taken = jnp.take(sent, starts[of_me] + place, axis=0, mode="clip")
            output = jnp.where(((place >= 0) & (place < sizes[of_me]))[:, None], taken, output)
    return output


def scaled_sine(scales):
    """What stands for the experts: each row's sine times its expert's scale."""

    def run(rows, groups):
        expert = jnp.searchsorted(jnp.cumsum(groups.sizes), jnp.arange(rows.shape[0]), side="right")
        return jnp.sin(rows) * jnp.append(scales, 0.0)[expert][:, None]

    return run


@functools.cache
def there_and_back(way):
    """A program of one way: slots, experts, scales and a cotangent give the outputs and the slots' gradient."""

    def on_device(slots, experts, scales):
        return dropless(scaled_sine(scales), slots[0], experts[0], NUM_EXPERTS, ("expert",))[None]

    def run(slots, experts, scales, cotangent):
        y, pull_back = jax.vjp(lambda slots: on_devices(on_device)(slots, experts, scales), slots)
        return y, *pull_back(cotangent)

    return jax.jit(run)


@pytest.mark.parametrize("kind", ["random", "few", "all to the last", "two"])
@pytest.mark.parametrize("way", ["padded", "ragged"])
def test_slots_meet_their_experts_and_come_home_and_gradients_too(kind, way, monkeypatch):
    if way == "ragged":
        # CPUs lack this operation; its arguments are what is tested.
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", reference_ragged)
        monkeypatch.setattr(ops, "_padded_all_to_all", lambda axes, _, *rest: ops._ragged_all_to_all(axes, *rest))
    experts = choose(kind)
    generator = np.random.default_rng(1)
    slots = generator.normal(size=(DEVICES, TOKENS * CHOICES, DIM)).astype(np.float32)
    cotangent = generator.normal(size=slots.shape).astype(np.float32)
    scales = generator.normal(size=NUM_EXPERTS).astype(np.float32)
    of_slots = scales[experts.reshape(DEVICES, -1)][..., None]
    y, gradient = there_and_back(way)(slots, experts, scales, cotangent)
    np.testing.assert_allclose(y, np.sin(slots) * of_slots, atol=1e-6)
    np.testing.assert_allclose(gradient, np.cos(slots) * of_slots * cotangent, atol=1e-6)


@pytest.mark.parametrize(("platform", "is_ragged"), [("cpu", False), ("tpu", True), ("cuda", True)])
def test_the_platform_that_is_compiled_for_decides(platform, is_ragged):
    def on_device(slots, experts, scales):
        return dropless(scaled_sine(scales), slots[0], experts[0], NUM_EXPERTS, ("expert",))[None]

    function = jax.jit(jax.grad(lambda *args: jnp.sum(on_devices(on_device)(*args))))
    slots, scales = np.ones((DEVICES, TOKENS * CHOICES, DIM), np.float32), np.ones(NUM_EXPERTS, np.float32)
    arrays = (slots, choose("random"), scales)
    program = function.trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
    assert ("ragged_all_to_all" in program) == is_ragged


@pytest.mark.parametrize(
    ("factor", "length", "k", "num_experts", "expected"),
    [(1.0, 512, 2, 8, 128), (1.25, 512, 2, 8, 160), (1.0, 9, 2, 8, 3), (0.01, 16, 1, 64, 1), (9.0, 16, 2, 4, 16)],
)
def test_capacity_is_a_share_rounded_up_and_no_more_than_a_row(factor, length, k, num_experts, expected):
    assert capacity(factor, length, k, num_experts) == expected


def keep_in_order(experts, real, room):
    """kept [R, T, k]: a loop over tokens in order of position, row by row."""
    kept = np.zeros(experts.shape, bool)
    for row, chosen in enumerate(experts):
        taken = np.zeros(NUM_EXPERTS, int)
        for position, choices in enumerate(chosen):
            for choice, expert in enumerate(choices):
                if real[row, position] and taken[expert] < room:
                    kept[row, position, choice] = True
                    taken[expert] += 1
    return kept


@functools.cache
def in_rooms(room):
    """A program: slots, experts, what is real, scales and a cotangent give the outputs and the slots' gradient."""

    def run(slots, experts, real, scales, cotangent):
        places = group_by_capacity(experts, real, NUM_EXPERTS, room)

        def scaled(slots):
            return with_capacity(lambda rows, _: rows * scales[:, None, None], slots, places, NUM_EXPERTS, ())

        y, pull_back = jax.vjp(scaled, slots)
        return y, *pull_back(cotangent)

    return jax.jit(run)


@pytest.mark.parametrize("kind", ["random", "few", "all to the last"])
@pytest.mark.parametrize("room", [1, 2, TOKENS])
def test_what_does_not_fit_is_dropped_in_order_of_position(kind, room):
    experts = choose(kind)
    real = np.ones((DEVICES, TOKENS), bool)
    real[1, 4:] = real[2] = False
    slots = np.random.default_rng(1).normal(size=(experts.size, DIM)).astype(np.float32)
    scales = np.arange(1, NUM_EXPERTS + 1, dtype=np.float32)
    y, gradient = in_rooms(room)(slots, experts, real, scales, slots[::-1])
    kept = keep_in_order(experts, real, room).reshape(-1, 1)
    factors = np.where(kept, scales[experts.reshape(-1)][:, None], 0)
    np.testing.assert_allclose(y, slots * factors, rtol=1e-6)
    np.testing.assert_allclose(gradient, slots[::-1] * factors, rtol=1e-5, atol=1e-6)


def test_buffers_of_all_devices_meet_at_the_expert():
    experts = choose("random")
    slots = np.random.default_rng(1).normal(size=(DEVICES, TOKENS * CHOICES, DIM)).astype(np.float32)
    scales = np.arange(1.0, NUM_EXPERTS + 1, dtype=np.float32)

    def on_device(slots, experts, scales):
        def run(rows, groups):
            assert groups is None and rows.shape == (NUM_EXPERTS // DEVICES, DEVICES * 2, DIM)
            return rows * scales[:, None, None]

        places = group_by_capacity(experts, jnp.ones(experts.shape[:2], bool), NUM_EXPERTS, 2)
        return with_capacity(run, slots[0], places, NUM_EXPERTS, ("expert",))[None]

    y = jax.jit(on_devices(on_device))(slots, experts, scales)
    kept = keep_in_order(experts, np.ones((DEVICES, TOKENS), bool), 2).reshape(DEVICES, -1, 1)
    np.testing.assert_allclose(y, np.where(kept, slots * scales[experts.reshape(DEVICES, -1)][..., None], 0), rtol=1e-6)
