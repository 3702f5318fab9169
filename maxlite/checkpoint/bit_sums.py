"""Sums of an array's bits, each word times an odd weight of its place: a checksum that ignores the order of adding.

The sum is modulo 2^32. One flipped bit changes one summand by an odd number times a power of two, so it always changes
the sum; an element in another place has another weight. This file adds up what lies in the host's memory.
"""

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np

MODULUS = 1 << 32
# A block stays in a core's cache; a thread takes so many of them at a time.
_BLOCK_WORDS, _BLOCKS_EACH, _MOST_THREADS = 1 << 16, 64, 4


def leaf_checksum(array: np.ndarray) -> int:
    """Returns the checksum of a whole array: the sum of its words, and their number. Needs little memory beside it."""
    num_words = array.size * words_each(array.dtype)
    return (num_words + sum_of_part(array, 0, whole_strides(array.shape, array.dtype))) % MODULUS


def sum_of_part(part: np.ndarray, base: int, strides: Sequence[int], *, most_threads: int = _MOST_THREADS) -> int:
    """Returns the sum of a part of an array, whose first word is number `base` of the whole.

    strides: words of the whole from one index of each dimension to the next.
    """
    each = words_each(part.dtype)
    if part.size == 0:
        return 0
    words, steps = _merged(_host_words(part).reshape(*part.shape, each), (*strides, 1))
    blocks = list(_blocks(words, base, steps))
    mask, places = _mask(part.dtype), _relative_places(blocks[0][0].shape, steps)

    def add(first: int) -> int:
        total = 0
        for block, start in blocks[first : first + _BLOCKS_EACH]:
            weights = weights_of(places[: len(block)] + np.uint32(start % MODULUS))
            total += int(((block.astype(np.uint32) & mask) * weights).sum(dtype=np.uint32))
        return total

    starts = range(0, len(blocks), _BLOCKS_EACH)
    threads = min(most_threads, os.cpu_count() or 1, len(starts))
    if threads == 1:
        return sum(map(add, starts)) % MODULUS
    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(add, starts)) % MODULUS


def weights_of(places: Any) -> Any:
    """Odd numbers that look random, for indices in uint32; for numpy and jax alike."""
    mixed = places * np.uint32(0x9E3779B1)
    mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0x85EBCA77)
    return (mixed ^ (mixed >> np.uint32(13))) | np.uint32(1)


def whole_strides(shape: Sequence[int], dtype: Any) -> tuple[int, ...]:
    """Returns the words from one index to the next, of each dimension of a whole array."""
    return tuple(words_each(dtype) * math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def words_each(dtype: Any) -> int:
    """Returns how many words of at most 32 bits an element has."""
    return 2 if num_bits(dtype) == 64 else 1


def num_bits(dtype: Any) -> int:
    """Returns the width of an element, in bits."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return 8 if dtype == jnp.bool else jnp.iinfo(dtype).bits


def _host_words(array: np.ndarray) -> np.ndarray:
    """The bits of an array as unsigned integers, in one dimension."""
    width = num_bits(array.dtype)
    kind = np.uint32 if width == 64 else np.dtype(f"uint{max(width, 8)}")
    return np.ascontiguousarray(array).reshape(-1).view(kind)


def _mask(dtype: Any) -> np.uint32:
    """Of the bits that a value has: one of four bits lies in a byte."""
    return np.uint32((1 << min(num_bits(dtype), 32)) - 1)


def _merged(words: np.ndarray, strides: Sequence[int]) -> tuple[np.ndarray, tuple[int, ...]]:
    """The same words with as few dimensions as can be: those that lie in the whole as they do in the part are one."""
    sizes, steps = [words.shape[-1]], [strides[-1]]
    for size, stride in zip(reversed(words.shape[:-1]), reversed(strides[:-1]), strict=True):
        if stride == sizes[0] * steps[0]:
            sizes[0] *= size
        else:
            sizes.insert(0, size)
            steps.insert(0, stride)
    return words.reshape(sizes), tuple(steps)


def _blocks(words: np.ndarray, base: int, strides: Sequence[int]) -> Iterator[tuple[np.ndarray, int]]:
    """Cuts words into blocks of the same shape but the last, each with the place of its first word."""
    rest = math.prod(words.shape[1:])
    if rest > _BLOCK_WORDS:
        for number, row in enumerate(words):
            yield from _blocks(row, base + number * strides[0], strides[1:])
        return
    rows = max(1, _BLOCK_WORDS // rest)
    for start in range(0, len(words), rows):
        yield words[start : start + rows], base + start * strides[0]


def _relative_places(shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """Of the words of a block, from its first one."""
    places = np.zeros(shape, np.uint32)
    # A block of rows that were cut one by one has the last dimensions only.
    for dimension, stride in enumerate(strides[len(strides) - len(shape) :]):
        numbers = np.arange(shape[dimension], dtype=np.uint32) * np.uint32(stride % MODULUS)
        places += numbers.reshape(-1, *[1] * (len(shape) - dimension - 1))
    return places
