"""Permutations and random numbers that are functions of a key and an index, and what all streams of rows share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from discern.data.dataset.shards import TokenSplit
from discern.data.hashing import mix, splitmix64
from discern.types import TokenBatch

Integers = NDArray[np.int64]


def derive_key(*parts: int | str) -> int:
    """A 64-bit key from the parts that identify its use, such as (seed, "row order", epoch)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def hash_integers(key: int, *counters: Integers | int) -> NDArray[np.uint64]:
    """64 random bits for each combination of counters (broadcast): SplitMix64, chained."""
    with np.errstate(over="ignore"):
        value: NDArray[np.uint64] = mix(np.asarray(np.uint64(key)))
        for counter in counters:
            value = mix(value ^ splitmix64(np.asarray(counter).astype(np.uint64) + 1))
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
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    result = indices.astype(np.uint64)
    outside = np.ones(len(result), bool)
    while outside.any():
        left, right = result[outside] >> half, result[outside] & mask
        for number in range(6):
            left, right = right, left ^ (hash_integers(key, number, right.astype(np.int64)) & mask)
        result[outside] = (left << half) | right
        outside = result >= np.uint64(size)
    return result.astype(np.int64)


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


@runtime_checkable
class RowStream(Protocol):
    """An endless sequence of rows with random access."""

    @property
    def num_rows(self) -> int:
        """Rows per epoch."""

    def batch(self, indices: Integers, slots: Integers) -> TokenBatch:
        """The rows at these places of the sequence.

        Args:
            indices: (B,) from 0.
            slots: (B,) place of each row in the global batch.
        """


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


def join_batches(parts: list[tuple[Integers, TokenBatch]]) -> TokenBatch:
    """Rows of several origins in one batch.

    Args:
        parts: the places of the rows of each origin in the result, and the rows.
    """
    if len(parts) == 1:
        return parts[0][1]
    order = torch.from_numpy(np.argsort(np.concatenate([places for places, _ in parts])))

    def joined(name: str) -> Any:
        values = [getattr(batch, name) for _, batch in parts]
        return torch.cat(values)[order] if isinstance(values[0], Tensor) else all(values) if name == "full" else values[0]

    return TokenBatch(**{field.name: joined(field.name) for field in fields(TokenBatch)})


def read_offsets(split: TokenSplit, offsets: Integers) -> tuple[Integers, NDArray[np.bool_]]:
    """Tokens of a split, and which of them begin a word.

    Args:
        offsets: their places; consecutive, except where the end of the text is followed by its beginning.
    """
    if not len(offsets):
        return offsets, np.zeros(0, bool)
    if offsets[-1] - offsets[0] == len(offsets) - 1:
        first, last = int(offsets[0]), int(offsets[-1])
        return split.read(first, last + 1), split.word_starts(first, last + 1)
    parts = [read_offsets(split, part) for part in np.split(offsets, np.flatnonzero(np.diff(offsets) != 1) + 1)]
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([starts for _, starts in parts])


def document_bounds(split: TokenSplit) -> Integers:
    """(D+1,) the offset of the first token of each document, then the number of tokens."""
    starts = [shard.document_starts[:-1] + shard.first_token for shard in split.shards]
    return np.concatenate([*starts, np.array([split.num_tokens])]).astype(np.int64)
