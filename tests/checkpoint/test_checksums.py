import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxlite.checkpoint import bit_sums, checksums, device_sums
from maxlite.checkpoint.bit_sums import leaf_checksum, num_bits
from maxlite.checkpoint.checksums import device_checksums

DTYPES = "float32 bfloat16 float16 int32 uint32 int8 uint8 bool int4 uint4 int2 float8_e4m3fn float8_e5m2 float4_e2m1fn"
SHAPES = [(), (8,), (8, 6), (4, 2, 5), (0, 4)]
SPECS = [(), ("x",), ("x", "y"), (("x", "y"),), (None, "y")]
# A dtype is only another way to the words, which programs of these show; two dtypes are given programs of all others.
FEW = [((), ()), ((8, 6), ("x", "y")), ((4, 2, 5), ("x",)), ((0, 4), ())]


def values(shape, dtype, seed=0):
    random = np.random.default_rng(seed).normal(size=shape) * 3
    return np.asarray(random > 0 if dtype == "bool" else random).astype(jnp.dtype(dtype))


def on_devices(value, sharding) -> int:
    """By numpy, as what lies on CPUs is added up, and by programs, as on accelerators."""
    arrays = {"leaf": jax.device_put(value, sharding)}
    by_numpy = device_checksums("test", arrays)["leaf"]
    by_programs = sum_by_programs(arrays["leaf"])
    assert by_numpy == by_programs, (value.shape, value.dtype, sharding)
    return by_numpy


def sum_by_programs(array) -> int:
    with mock.patch.object(checksums, "is_on_cpu", lambda array: False):
        with mock.patch.object(checksums, "_SMALL_BYTES", 0):
            pending = checksums.PendingSums({"leaf": array})
    return pending.combined([pending.own()])["leaf"]


def by_definition(value) -> int:
    """In Python's own integers: the sum of words times weights, and the number of words."""
    width = num_bits(value.dtype)
    text = value.reshape(-1).astype(np.uint8) if value.dtype == bool else value.reshape(-1)
    words = [int.from_bytes(element.tobytes(), "little") & (2**width - 1) for element in text]
    if width == 64:
        words = [half for word in words for half in (word % 2**32, word >> 32)]
    total = len(words)
    for place, word in enumerate(words):
        mixed = place * 0x9E3779B1 % 2**32
        mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77 % 2**32
        total += word * ((mixed ^ (mixed >> 13)) | 1)
    return total % 2**32


@pytest.mark.parametrize("dtype", DTYPES.split())
def test_one_sum_for_the_host_and_for_every_sharding(states, dtype):
    mesh, compared = states.mesh(x=4, y=2), 0
    for shape in SHAPES:
        value = values(shape, dtype)
        expected = by_definition(value)
        assert leaf_checksum(value) == expected
        for spec in SPECS:
            sizes = [{"x": 4, "y": 2, None: 1, ("x", "y"): 8}[entry] for entry in spec]
            if len(spec) > len(shape) or any(size % parts for size, parts in zip(shape, sizes, strict=False)):
                continue
            sharding = NamedSharding(mesh, PartitionSpec(*spec))
            assert device_checksums("test", {"leaf": jax.device_put(value, sharding)}) == {"leaf": expected}
            if dtype in ("float32", "int4") or (shape, spec) in FEW:
                assert on_devices(value, sharding) == expected, (shape, spec)
            compared += 1
    assert compared == 18


def test_elements_of_64_bits():
    value = np.random.default_rng(0).normal(size=(5, 3))
    assert leaf_checksum(value) == by_definition(value)


def test_what_rests_in_the_hosts_memory(states):
    value = values((8, 4), "float32")
    resting = NamedSharding(states.mesh(x=8), PartitionSpec("x"), memory_kind="pinned_host")
    assert on_devices(value, resting) == leaf_checksum(value)


def test_no_device_waits_for_another(states):
    """XLA's collectives on CPUs hang when such a program and a training step are on the devices at once."""
    mesh = states.mesh(x=8)
    parts = jax.device_put(jnp.zeros((16, 4)), NamedSharding(mesh, PartitionSpec("x")))
    local = jax.sharding.Mesh(mesh.devices, ("part",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(local):
        program = device_sums._sum_parts.lower(parts, np.zeros(8, np.uint32), mesh=local, strides=(4, 1)).compile()
    text = program.as_text()
    assert "multiply" in text
    assert not any(name in text for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute"))


def test_each_part_is_summed_by_one_device(states):
    value = values((8, 6), "float32")
    copied = jax.device_put(value, NamedSharding(states.mesh(x=4, y=2), PartitionSpec(None, "y")))
    with mock.patch.object(checksums, "start_sums", wraps=checksums.start_sums) as start:
        assert sum_by_programs(copied) == leaf_checksum(value)
        assert len(start.call_args.args[1]) == 2
    with mock.patch.object(checksums, "sum_of_part", wraps=checksums.sum_of_part) as add:
        pending = checksums.PendingSums({"leaf": copied, "scalar": jnp.float32(3)})
        own = pending.own()
        assert [call.args[0].shape for call in add.call_args_list] == [(8, 3), (8, 3), ()]
    expected = {"leaf": leaf_checksum(value), "scalar": leaf_checksum(np.float32(3))}
    assert pending.combined([own]) == expected
    # As two processes, of which one holds nothing that the other does not.
    assert pending.combined([own, [0, 0]]) == expected
    halves = [[total // 3 for total in own], [total - total // 3 for total in own]]
    assert pending.combined(halves) == expected


def test_in_the_background_it_lets_go_of_the_arrays(states):
    """The next save writes into the same memory, which it can't while another looks at it."""
    put = jax.device_put(values((64, 64), "float32"), NamedSharding(states.mesh(x=8), PartitionSpec("x")))
    # Of a program: what is put there may lie in numpy's own memory, which is never given away.
    array = jax.jit(jnp.copy)(put)
    expected, places = leaf_checksum(np.asarray(array)), [shard.data.unsafe_buffer_pointer() for shard in shards(array)]
    pending = checksums.PendingSums({"leaf": array}, background=True)
    assert pending.combined([pending.own()]) == {"leaf": expected}
    written = jax.jit(lambda array: array + 1, donate_argnums=0)(array)
    assert [shard.data.unsafe_buffer_pointer() for shard in shards(written)] == places


def shards(array):
    return sorted(array.addressable_shards, key=lambda shard: shard.device.id)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float64"])
def test_every_flipped_bit_changes_it(dtype):
    value = values((3, 4), dtype)
    expected, text = leaf_checksum(value), value.tobytes()
    for bit in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        assert leaf_checksum(np.frombuffer(flipped, value.dtype).reshape(value.shape)) != expected, bit


def test_places_and_sizes_count():
    value = values((100,), "float32")
    swapped = value.copy()
    swapped[[3, 70]] = swapped[[70, 3]]
    assert leaf_checksum(swapped) != leaf_checksum(value)
    assert leaf_checksum(np.zeros(5, np.float32)) != leaf_checksum(np.zeros(6, np.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "float64"])
@pytest.mark.parametrize("shape", [(51, 3), (2, 3, 29), (23,)])
def test_blocks_of_a_program_make_no_difference(monkeypatch, shape, dtype):
    """Blocks that do not divide an array overlap, and what two have counts once."""
    monkeypatch.setattr(device_sums, "_BLOCK_ELEMENTS", 16)
    value = values(shape, dtype)
    with jax.enable_x64(dtype == "float64"):
        assert on_devices(value, jax.devices()[0]) == leaf_checksum(value)


@pytest.mark.parametrize("shape", [(50, 3), (6, 4, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("most", [1, 7, 40])
def test_blocks_make_no_difference(monkeypatch, shape, most):
    value = values(shape, "bfloat16")
    expected, parts = leaf_checksum(value), []
    monkeypatch.setattr(bit_sums, "_BLOCK_WORDS", most)
    monkeypatch.setattr(bit_sums, "_BLOCKS_EACH", 3)
    assert leaf_checksum(value) == expected
    assert leaf_checksum(value.T) != expected and leaf_checksum(value.T.copy()) == leaf_checksum(value.T)
    strides = bit_sums.whole_strides(shape, value.dtype)
    for dimension, size in enumerate(shape):
        middle = size // 2
        low, high = np.split(value, [middle], axis=dimension)
        parts.append(
            bit_sums.sum_of_part(low, 0, strides) + bit_sums.sum_of_part(high, middle * strides[dimension], strides)
        )
    assert {(total + math.prod(shape)) % 2**32 for total in parts} == {expected}
