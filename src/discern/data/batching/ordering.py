"""Permutations and random numbers that are functions of a key and an index: each is available without the previous ones."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def derive_key(*parts: int | str) -> int:
    """A 64-bit key from the parts that identify its use, such as (seed, "row order", epoch)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def hash_integers(key: int, *counters: Integers | int) -> NDArray[np.uint64]:
    """64 random bits for each combination of counters (broadcast): SplitMix64's finalizer, chained.

    Reference: Steele et al. 2014.
    """
    with np.errstate(over="ignore"):
        value = _mix(np.asarray(np.uint64(key)))
        for counter in counters:
            step = (np.asarray(counter).astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
            value = _mix(np.asarray(value ^ _mix(np.asarray(step))))
        return value


def hash_uniforms(key: int, *counters: Integers | int) -> NDArray[np.float64]:
    """Numbers in [0, 1), as `hash_integers` draws them."""
    return np.asarray((hash_integers(key, *counters) >> np.uint64(11)) * 2.0**-53)


def permute(indices: Integers, size: int, key: int) -> Integers:
    """The position of each index in a random permutation of `size` items, in constant memory.

    A Feistel network over the next power of four, applied until the result is below `size`.

    Args:
        indices: in [0, size).

    Reference: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", cycle walking.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    result = indices.astype(np.uint64)
    outside = np.ones(len(result), bool)
    while outside.any():
        result[outside] = _feistel(result[outside], np.uint64(half), mask, key)
        outside = result >= np.uint64(size)
    return result.astype(np.int64)


def _feistel(value: NDArray[np.uint64], half: np.uint64, mask: np.uint64, key: int) -> NDArray[np.uint64]:
    left, right = value >> half, value & mask
    for number in range(6):
        left, right = right, left ^ (hash_integers(key, number, right.astype(np.int64)) & mask)
    return (left << half) | right


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    first = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    second = (first ^ (first >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(second ^ (second >> np.uint64(31)))
