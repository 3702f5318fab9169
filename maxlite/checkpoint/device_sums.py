"""Sums of an array's bits (bit_sums.py) on the accelerators that hold it."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import ArrayLike

from maxlite.checkpoint.bit_sums import MODULUS, num_bits, weights_of, whole_strides

# Few programs' steps, and little memory beside the array.
_BLOCK_ELEMENTS = 1 << 20
_UNSIGNED = {2: jnp.uint2, 4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint32}


def start_sums(array: jax.Array, parts: Sequence[jax.Array], bases: Sequence[int]) -> jax.Array:
    """Starts the sums of some parts of an array, each on the one device that holds it: uint32 [parts].

    No device waits for another, so nothing comes in the way of a training step. bases: the place of each part's first
    word. The array may be donated to another program after this.
    """
    devices = [device for part in parts for device in part.devices()]
    mesh = Mesh(np.array(devices), ("part",), axis_types=(AxisType.Auto,))
    # Another mesh may be the one of the step.
    with jax.set_mesh(mesh):
        data = [_in_device_memory(part) for part in parts]
        shape = (len(data) * data[0].shape[0], *data[0].shape[1:])
        joined = jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, PartitionSpec("part")), data)
        strides = whole_strides(array.shape, array.dtype)
        return _sum_parts(joined, np.array([base % MODULUS for base in bases], np.uint32), mesh=mesh, strides=strides)


def device_sharding(array: jax.Array) -> jax.sharding.Sharding:
    """Returns the array's sharding in the memory in which programs compute: moments may rest in the host's."""
    (device, *_) = array.sharding.device_set
    return array.sharding.with_memory_kind(device.default_memory().kind)


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
                places = places + number * np.uint32(stride % MODULUS)
            products = words.astype(jnp.uint32) * weights_of(places)
            return total + jnp.sum(jnp.where(numbers[axis] >= begin, products, 0), dtype=jnp.uint32)

        return lax.fori_loop(0, -(-part.shape[axis] // rows), add, jnp.uint32(0))[None]

    return jax.shard_map(one, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)(parts, bases)


def _words(array: jax.Array) -> jax.Array:
    """The bits as unsigned integers of at most 32 bits; an element of 64 has two, on a new last dimension."""
    if array.dtype == jnp.bool:
        return array.astype(jnp.uint8)
    return lax.bitcast_convert_type(array, _UNSIGNED[num_bits(array.dtype)])
