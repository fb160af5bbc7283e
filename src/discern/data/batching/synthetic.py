"""Rows of random ids, for measuring speed without a data set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from discern.data.batching.stream import Integers, Rows, to_batch
from discern.types import SpecialTokens, TokenBatch

SPECIAL = SpecialTokens(pad=0, unk=1, cls=2, sep=3, mask=4)
_FIRST_WORD = 5
_SHORTEST = 3  # [CLS], a token, [SEP]


class SyntheticRows:
    """`[CLS] tokens [SEP]` with ids that have the frequencies of words.

    The frequency of the r-th most frequent id is proportional to 1/r (Zipf's law). Ids therefore repeat as they do in text,
    which affects the time of the gradient of the embedding. Their order is random, and each of them is a word.

    Args:
        vocab_size: V, at least 6.
        length: positions per row.
        fill: mean fraction of real tokens per row; 1 for full rows, otherwise lengths are spread evenly around it.
        count: number of distinct rows, which repeat.
        seed: decides the ids.
        two_parts: full rows `[text | A [SEP] B [SEP] [CLS]]` instead, with A as long as B and every second row reversed.
    """

    def __init__(self, vocab_size: int, length: int, fill: float, count: int, seed: int, *, two_parts: bool = False) -> None:
        rng = np.random.default_rng(seed)
        distribution = np.cumsum(1 / np.arange(1, vocab_size - _FIRST_WORD + 1))
        draws = rng.random((count, length)) * distribution[-1]
        self._ids = np.minimum(np.searchsorted(distribution, draws, side="right") + _FIRST_WORD, vocab_size - 1)
        spread = min(fill, 1 - fill)
        shares = rng.uniform(fill - spread, fill + spread, count)
        self._lengths = np.clip(np.round(shares * length), min(_SHORTEST, length), length).astype(np.int64)
        self._two_parts = two_parts

    def batch(self, indices: Integers, slots: Integers) -> TokenBatch:
        """The examples at these places of an endless sequence."""
        numbers = indices % len(self._lengths)
        ids, lengths = self._ids[numbers], self._lengths[numbers]
        places, size = np.broadcast_to(np.arange(ids.shape[1]), ids.shape), ids.shape[1]
        ends, is_padding, types = places == lengths[:, None] - 1, places >= lengths[:, None], np.zeros_like(ids)
        first, last = places == 0, ends
        if self._two_parts:
            middle = size // 2 + (size // 2 - 2) // 2
            first, last = ends, (places == middle) | (places == size - 2)
            types = (places > middle).astype(np.int64) + ends
        ids[first], ids[last], ids[is_padding] = SPECIAL.cls, SPECIAL.sep, SPECIAL.pad
        special = first | last | is_padding
        batch = to_batch(Rows(ids, lengths, special, types, places, None, np.ones_like(special)), indices, slots)
        if not self._two_parts:
            return batch
        reverses, follows = torch.from_numpy(slots % 2 == 1), torch.ones(len(slots), dtype=torch.bool)
        return replace(batch, is_reversed=reverses, continues=follows, reuse_length=size // 2)
