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
    """

    def __init__(self, vocab_size: int, length: int, fill: float, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        distribution = np.cumsum(1 / np.arange(1, vocab_size - _FIRST_WORD + 1))
        draws = rng.random((count, length)) * distribution[-1]
        self._ids = np.minimum(np.searchsorted(distribution, draws, side="right") + _FIRST_WORD, vocab_size - 1)
        spread = min(fill, 1 - fill)
        shares = rng.uniform(fill - spread, fill + spread, count)
        self._lengths = np.clip(np.round(shares * length), min(_SHORTEST, length), length).astype(np.int64)

    def batch(self, indices: Integers, slots: Integers) -> TokenBatch:
        """The examples at these places of an endless sequence."""
        numbers = indices % len(self._lengths)
        ids, lengths = self._ids[numbers], self._lengths[numbers]
        places = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        last = lengths[:, None] - 1
        ids[:, 0] = SPECIAL.cls
        ids[places == last] = SPECIAL.sep
        ids[places > last] = SPECIAL.pad
        special = (places == 0) | (places >= last)
        return to_batch(Rows(ids, lengths, special, np.zeros_like(ids), places, None, np.ones_like(special)), indices, slots)


class SyntheticParts:
    """The same words in two-part rows, `[text | A [SEP] B [SEP] [CLS]]`, with A as long as B and every second row reversed.

    Args:
        rows: source of the words; full rows of an even length.
    """

    def __init__(self, rows: SyntheticRows) -> None:
        self._rows = rows

    def batch(self, indices: Integers, slots: Integers) -> TokenBatch:
        """The examples at these places of an endless sequence."""
        plain = self._rows.batch(indices, slots)
        length = plain.input_ids.shape[1]
        part, place = length // 2, plain.position_ids
        middle = part + (part - 2) // 2
        separates, ends = (place == middle) | (place == length - 2), place == length - 1
        ids = plain.input_ids.masked_fill(place == 0, _FIRST_WORD).masked_fill(separates, SPECIAL.sep)
        return replace(
            plain,
            input_ids=ids.masked_fill(ends, SPECIAL.cls),
            special_tokens_mask=separates | ends,
            token_type_ids=(place > middle).long() + ends.long(),
            is_reversed=plain.slot % 2 == 1,
            continues=torch.ones_like(plain.slot, dtype=torch.bool),
            reuse_length=part,
        )
