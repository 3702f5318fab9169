"""A checksum of an array's values: the same however it is sharded, on devices and on the host.

It is the sum of the array's bits with weights (bit_sums.py) plus the number of its words. A sum can be taken in any
order: each device's part is added up by itself.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from maxlite.checkpoint.arrays import is_on_cpu
from maxlite.checkpoint.bit_sums import MODULUS, sum_of_part, whole_strides, words_each
from maxlite.checkpoint.device_sums import start_sums
from maxlite.checkpoint.priority import lower_own_priority
from maxlite.processes.group import exchange

# What is no larger is fetched and added up by numpy: it takes less time than compiling a program.
_SMALL_BYTES = 1 << 18


@dataclasses.dataclass(frozen=True)
class _OnHost:
    """Parts that numpy is to add up. bases, strides: as sum_of_part has them."""

    parts: list[jax.Array]
    bases: list[int]
    strides: tuple[int, ...]


class PendingSums:
    """The sums of arrays, of which the devices are still at some and others are not begun.

    Each process adds up the parts that lie on its own devices. What is on accelerators is begun at once, so that the
    arrays may be donated after that; what is on CPUs must stay as it is until own() has returned.
    """

    def __init__(self, arrays: Mapping[str, jax.Array], *, background: bool = False):
        """Returns at once. background: CPUs begin at once too, in a thread that gives way to others."""
        self._words = {path: array.size * words_each(array.dtype) for path, array in arrays.items()}
        begun = [_begun(array) for array in arrays.values()]
        self._own: Callable[[], list[int]] = lambda: [_finished(sums) for sums in begun]
        if background:
            pool = ThreadPoolExecutor(1, "checkpoint_sums", lower_own_priority)
            self._own = pool.submit(lambda: [_finished(sums, most_threads=1) for sums in begun]).result
            pool.shutdown(wait=False)

    def own(self) -> list[int]:
        """Returns this process's part of each sum, in the order of the arrays, and lets go of them: once."""
        own, self._own = self._own, list
        return own()

    def combined(self, parts: Sequence[Sequence[int]]) -> dict[str, int]:
        """Returns path -> checksum. parts: what own() returned on each process."""
        sums = [sum(part) for part in zip(*parts, strict=True)]
        return {
            path: (total + num_words) % MODULUS
            for (path, num_words), total in zip(self._words.items(), sums, strict=True)
        }


def device_checksums(name: str, arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """Returns path -> checksum of arrays on devices, the same on all processes, which all call this.

    name: of the exchange between them.
    """
    sums = PendingSums(arrays)
    return sums.combined([json.loads(text) for text in exchange(name, json.dumps(sums.own()))])


def _begun(array: jax.Array) -> jax.Array | _OnHost:
    """Begins with the parts that this process answers for."""
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    strides = whole_strides(array.shape, array.dtype)
    bases = [
        sum((places.start or 0) * stride for places, stride in zip(shard.index, strides, strict=True))
        for shard in shards
    ]
    parts: list[jax.Array] = [shard.data for shard in shards]
    if is_on_cpu(array) or sum(part.nbytes for part in parts) <= _SMALL_BYTES:
        return _OnHost(parts, bases, strides)
    return start_sums(array, parts, bases)


def _finished(sums: jax.Array | _OnHost, **threads: int) -> int:
    if isinstance(sums, jax.Array):
        return int(np.asarray(sums).astype(np.uint64).sum() % MODULUS)
    parts = zip(sums.parts, sums.bases, strict=True)
    return sum(sum_of_part(np.asarray(part), base, sums.strides, **threads) for part, base in parts) % MODULUS
