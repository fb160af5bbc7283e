"""Batches by their number: any batch of a run is computed from (seed, example index), nothing is remembered."""

from __future__ import annotations

import numpy as np
import torch

from discern.data.ordering import Integers, derive_key, permute
from discern.data.rows import Packing, Rows
from discern.types import TokenBatch


class ExampleStream:
    """The endless sequence of examples that training reads: epoch after epoch, each in an order of its own.

    Args:
        packing: the rows of an epoch.
        seed: decides the order.
        shuffle: False: rows in their own order, for evaluation.
    """

    def __init__(self, packing: Packing, seed: int, *, shuffle: bool = True) -> None:
        self.packing = packing
        self._seed = seed
        self._shuffle = shuffle

    @property
    def num_rows(self) -> int:
        """Examples an epoch."""
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
    """Rows as a batch of tensors."""
    length = rows.input_ids.shape[1]
    attention = np.arange(length)[None, :] < rows.lengths[:, None]
    return TokenBatch(
        input_ids=torch.from_numpy(rows.input_ids),
        attention_mask=torch.from_numpy(attention),
        special_tokens_mask=torch.from_numpy(rows.is_special),
        token_type_ids=torch.from_numpy(rows.token_types),
        position_ids=torch.from_numpy(np.ascontiguousarray(rows.positions)),
        document_ids=None if rows.pieces is None else torch.from_numpy(rows.pieces),
        word_starts=None if rows.word_starts is None else torch.from_numpy(rows.word_starts),
        example_index=torch.from_numpy(indices.astype(np.int64)),
        slot=torch.from_numpy(slots.astype(np.int64)),
        full=bool(attention.all()),
    )


def join_rows(parts: list[tuple[Integers, Rows]]) -> Rows:
    """Rows of several origins, each with the places where they belong, in order."""
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
