"""Permutations and random numbers that are functions of a key and an index: each is available without the previous ones."""

from __future__ import annotations

import abc
import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from discern.types import TokenBatch

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


@dataclass(frozen=True)
class Rows:
    """Rows as arrays, all (B, L).

    Attributes:
        input_ids: token ids; the pad id at padding.
        lengths: (B,) number of real tokens; padding is on the right.
        is_special: True for [CLS], [SEP] and padding.
        token_types: segment ids.
        positions: position of each token within its piece.
        pieces: index of the piece of a document that a token belongs to; None if every row is one piece.
        word_starts: True where a word begins; None if unknown.
    """

    input_ids: Integers
    lengths: Integers
    is_special: NDArray[np.bool_]
    token_types: Integers
    positions: Integers
    pieces: Integers | None
    word_starts: NDArray[np.bool_] | None = None


class Packing(abc.ABC):
    """The rows of one epoch over a split, by number.

    Attributes:
        num_rows: rows per epoch.
    """

    num_rows: int

    @abc.abstractmethod
    def rows(self, numbers: Integers, epoch: int) -> Rows:
        """The rows with these numbers, each in [0, num_rows), in this epoch."""


class ExampleStream:
    """The endless sequence of examples that training reads. Each epoch is shuffled in a new order.

    Args:
        packing: the rows of an epoch.
        seed: decides the order.
        shuffle: if False, rows come in their own order, for evaluation.
    """

    def __init__(self, packing: Packing, seed: int, *, shuffle: bool = True) -> None:
        self.packing = packing
        self._seed = seed
        self._shuffle = shuffle

    @property
    def num_rows(self) -> int:
        """Examples per epoch."""
        return self.packing.num_rows

    def batch(self, indices: Integers, slots: Integers) -> TokenBatch:
        """The examples at these places of the sequence.

        Args:
            indices: (B,) from 0; index // num_rows is the epoch.
            slots: (B,) place of each row in the global batch.
        """
        return to_batch(self.rows(indices), indices, slots)

    def rows(self, indices: Integers) -> Rows:
        """The examples at these places of the sequence, as arrays."""
        epochs, places = np.divmod(indices, self.num_rows)
        parts: list[tuple[Integers, Rows]] = []
        for epoch in np.unique(epochs):
            chosen = np.flatnonzero(epochs == epoch)
            numbers = places[chosen]
            if self._shuffle:
                numbers = permute(numbers, self.num_rows, derive_key(self._seed, "row order", int(epoch)))
            parts.append((chosen, self.packing.rows(numbers, int(epoch))))
        return join_rows(parts)


def to_batch(rows: Rows, indices: Integers, slots: Integers) -> TokenBatch:
    """A batch of tensors from rows."""
    length = rows.input_ids.shape[1]
    attention = np.arange(length)[None, :] < rows.lengths[:, None]
    return TokenBatch(
        input_ids=torch.from_numpy(rows.input_ids),
        attention_mask=torch.from_numpy(attention),
        special_tokens_mask=torch.from_numpy(rows.is_special),
        token_type_ids=torch.from_numpy(rows.token_types),
        position_ids=torch.from_numpy(rows.positions.copy()),
        document_ids=None if rows.pieces is None else torch.from_numpy(rows.pieces),
        word_starts=None if rows.word_starts is None else torch.from_numpy(rows.word_starts),
        example_index=torch.from_numpy(indices.astype(np.int64)),
        slot=torch.from_numpy(slots.astype(np.int64)),
        full=bool(attention.all()),
    )


def join_rows(parts: list[tuple[Integers, Rows]]) -> Rows:
    """Rows of several origins in one.

    Args:
        parts: the rows of each origin, with their places in the result.
    """
    if len(parts) == 1:
        return parts[0][1]
    order = np.argsort(np.concatenate([chosen for chosen, _ in parts]))
    rows = [row for _, row in parts]
    pieces = [row.pieces for row in rows if row.pieces is not None]
    word_starts = [row.word_starts for row in rows if row.word_starts is not None]
    return Rows(
        input_ids=np.concatenate([row.input_ids for row in rows])[order],
        lengths=np.concatenate([row.lengths for row in rows])[order],
        is_special=np.concatenate([row.is_special for row in rows])[order],
        token_types=np.concatenate([row.token_types for row in rows])[order],
        positions=np.concatenate([row.positions for row in rows])[order],
        pieces=np.concatenate(pieces)[order] if pieces else None,
        word_starts=np.concatenate(word_starts)[order] if word_starts else None,
    )
