"""A checksum of an array's values: the same however it is sharded, on devices and on the host.

It is the sum, modulo 2^32, of each element's bits times an odd weight that depends on where the element stands,
plus the number of elements. One flipped bit changes one summand by an odd number times a power of two, so it always
changes the sum; an element in another place has another weight. A sum can be taken in any order: each device
adds up what it holds.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import ArrayLike

from maxlite.processes.group import exchange

_MODULUS = 1 << 32
# On the host: what stays in a core's cache, and what a thread takes at a time.
_BLOCK_WORDS, _SPAN_WORDS, _MOST_THREADS = 1 << 16, 1 << 22, 4
# Of a sum on a device: few programs' steps, and little memory beside the array.
_BLOCK_ELEMENTS = 1 << 20
# What is no larger is added up by numpy: it takes less time than compiling a program.
_SMALL_BYTES = 1 << 18
_UNSIGNED = {2: jnp.uint2, 4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint32}


class PendingSums:
    """The sums of arrays while the devices are still at them.

    Each process adds up the parts of its own devices, each part on one device only: no device waits for another, so
    nothing comes in the way of a training step.
    """

    def __init__(self, arrays: Mapping[str, jax.Array], *, lean: bool = False):
        """Starts the sums and returns at once; the arrays may be donated to another program after this.

        lean: what lies on one CPU is added up by numpy, without a program and its memory, before this returns.
        """
        self._words = {path: array.size * _words_each(array.dtype) for path, array in arrays.items()}
        self._started = {
            path: _sum_of_host(array) if lean and _is_on_one_cpu(array) else _start(array)
            for path, array in arrays.items()
        }

    def own(self) -> list[int]:
        """Returns this process's part of each sum, in the order of the arrays; waits for the devices."""
        return [
            0 if parts is None else int(np.asarray(parts).astype(np.uint64).sum() % _MODULUS)
            for parts in self._started.values()
        ]

    def combined(self, parts: Sequence[Sequence[int]]) -> dict[str, int]:
        """Returns path -> checksum. parts: what own() returned on each process."""
        sums = [sum(part) for part in zip(*parts, strict=True)]
        return {
            path: (total + num_words) % _MODULUS
            for (path, num_words), total in zip(self._words.items(), sums, strict=True)
        }


def device_checksums(name: str, arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """Returns path -> checksum of arrays on devices, the same on all processes, which all call this.

    name: of the exchange between them.
    """
    sums = PendingSums(arrays, lean=True)
    return sums.combined([json.loads(text) for text in exchange(name, json.dumps(sums.own()))])


def device_sharding(array: jax.Array) -> jax.sharding.Sharding:
    """Returns the array's sharding in the memory in which programs compute: moments may rest in the host's."""
    (device, *_) = array.sharding.device_set
    return array.sharding.with_memory_kind(device.default_memory().kind)


def leaf_checksum(array: np.ndarray) -> int:
    """Returns the checksum of an array in the host's memory; needs little memory beside it."""
    words, mask = _host_words(array), _mask(array.dtype)
    counted = np.arange(min(_BLOCK_WORDS, words.size), dtype=np.uint32)

    def add(first: int) -> int:
        total = 0
        for start in range(first, min(first + _SPAN_WORDS, words.size), _BLOCK_WORDS):
            block = words[start : start + _BLOCK_WORDS].astype(np.uint32) & mask
            places = counted[: block.size] + np.uint32(start % _MODULUS)
            total += int((block * _weights(places)).sum(dtype=np.uint32))
        return total

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        return (words.size + sum(pool.map(add, range(0, words.size, _SPAN_WORDS)))) % _MODULUS


def num_bits(dtype: Any) -> int:
    """Returns the width of an element, in bits."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return 8 if dtype == jnp.bool else jnp.iinfo(dtype).bits


def _is_on_one_cpu(array: jax.Array) -> bool:
    return len(array.sharding.device_set) == 1 and all(device.platform == "cpu" for device in array.sharding.device_set)


def _sum_of_host(array: jax.Array) -> np.ndarray:
    num_words = array.size * _words_each(array.dtype)
    return np.array([(leaf_checksum(np.asarray(array)) - num_words) % _MODULUS], np.uint32)


def _start(array: jax.Array) -> jax.Array | np.ndarray | None:
    """Starts the sums of the parts that this process answers for: uint32 [parts]; None if there are none."""
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    if not shards or array.size == 0:
        return None
    each = _words_each(array.dtype)
    strides = [each * math.prod(array.shape[dimension + 1 :]) for dimension in range(array.ndim)]
    bases = [
        sum((places.start or 0) * stride for places, stride in zip(shard.index, strides, strict=True)) % _MODULUS
        for shard in shards
    ]
    if sum(shard.data.nbytes for shard in shards) <= _SMALL_BYTES:
        pairs = zip(shards, bases, strict=True)
        return np.array([_sum_of_part(np.asarray(shard.data), base, strides) for shard, base in pairs], np.uint32)
    mesh = Mesh(np.array([shard.device for shard in shards]), ("part",), axis_types=(AxisType.Auto,))
    # Another mesh may be the one of the step.
    with jax.set_mesh(mesh):
        data = [_in_device_memory(shard.data) for shard in shards]
        shape = (len(shards) * data[0].shape[0], *data[0].shape[1:])
        parts = jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, PartitionSpec("part")), data)
        return _sum_parts(parts, np.array(bases, np.uint32), mesh=mesh, strides=tuple(strides))


def _sum_of_part(part: np.ndarray, base: int, strides: Sequence[int]) -> int:
    """Of a part in the host's memory, whose first word is number `base` of the whole array."""
    each = _words_each(part.dtype)
    words = _host_words(part).reshape(*part.shape, each).astype(np.uint32) & _mask(part.dtype)
    places = np.full(words.shape, base, np.uint32)
    for dimension, stride in enumerate((*strides, 1)):
        numbers = np.arange(words.shape[dimension], dtype=np.uint32) * np.uint32(stride % _MODULUS)
        places += numbers.reshape(-1, *[1] * (words.ndim - dimension - 1))
    return int((words * _weights(places)).sum(dtype=np.uint32))


def _host_words(array: np.ndarray) -> np.ndarray:
    """The bits of an array as unsigned integers, in one dimension."""
    width = num_bits(array.dtype)
    kind = np.uint32 if width == 64 else np.dtype(f"uint{max(width, 8)}")
    return np.ascontiguousarray(array).reshape(-1).view(kind)


def _mask(dtype: Any) -> np.uint32:
    """Of the bits that a value has: one of four bits lies in a byte."""
    return np.uint32((1 << min(num_bits(dtype), 32)) - 1)


def _in_device_memory(part: jax.Array) -> jax.Array:
    """One device's part, with a dimension at least."""
    (device,) = part.devices()
    kind = device.default_memory().kind
    if part.sharding.memory_kind != kind:
        part = jax.device_put(part, SingleDeviceSharding(device, memory_kind=kind))
    return part if part.ndim > 0 else part.reshape(1)


@partial(jax.jit, static_argnames=("mesh", "strides"))
def _sum_parts(parts: jax.Array, bases: ArrayLike, *, mesh: Mesh, strides: tuple[int, ...]) -> jax.Array:
    """parts: [devices x rows, ...]; bases: [devices], the place of each part's first word. strides: of the whole."""
    spec = PartitionSpec("part")

    def one(part: jax.Array, base: ArrayLike) -> jax.Array:
        # Bits first: XLA's CPU programs slice a bfloat16 by way of float32, which changes a signalling NaN.
        bits = _words(part)
        # Block by block: they hold all products of a sum at once.
        axis = int(np.argmax(part.shape))
        num_blocks = min(part.shape[axis], -(-part.size // _BLOCK_ELEMENTS))
        rows = -(-part.shape[axis] // num_blocks)

        def add(block: jax.Array, total: jax.Array) -> jax.Array:
            begin = (block * rows).astype(jnp.uint32)
            # The last block begins earlier, and leaves out what the one before it had.
            start = jnp.minimum(begin, np.uint32(part.shape[axis] - rows))
            words = lax.dynamic_slice_in_dim(bits, start, rows, axis)
            numbers = [lax.broadcasted_iota(jnp.uint32, words.shape, dimension) for dimension in range(words.ndim)]
            numbers[axis] = numbers[axis] + start
            places = jnp.broadcast_to(base, words.shape)
            # A scalar has a dimension here and none of its own; a word of a larger element has one more.
            for number, stride in zip(numbers, (*strides, 1), strict=False):
                places = places + number * np.uint32(stride % _MODULUS)
            products = words.astype(jnp.uint32) * _weights(places)
            return total + jnp.sum(jnp.where(numbers[axis] >= begin, products, 0), dtype=jnp.uint32)

        return lax.fori_loop(0, -(-part.shape[axis] // rows), add, jnp.uint32(0))[None]

    return jax.shard_map(one, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)(parts, bases)


def _words_each(dtype: Any) -> int:
    return 2 if num_bits(dtype) == 64 else 1


def _words(array: jax.Array) -> jax.Array:
    """The bits as unsigned integers of at most 32 bits; an element of 64 has two, on a new last dimension."""
    if array.dtype == jnp.bool:
        return array.astype(jnp.uint8)
    return lax.bitcast_convert_type(array, _UNSIGNED[num_bits(array.dtype)])


def _weights(places: Any) -> Any:
    """Odd numbers that look random, for indices in uint32; for numpy and jax alike."""
    mixed = places * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0x85EBCA77)
    return (mixed ^ (mixed >> np.uint32(13))) | np.uint32(1)
