"""Rows in two parts for permutation language modelling: text that goes on from row to row, and a look ahead."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from discern.data.ordering import Integers, derive_key, hash_uniforms, permute
from discern.data.ring import BackwardRing, ForwardRing, Ring
from discern.types import SpecialTokens, TokenBatch

_FUNCTIONAL = 3  # [SEP], [SEP], [CLS]


@dataclass(frozen=True)
class Place:
    """Where a row begins.

    Attributes:
        offset: on the ring, counted in the direction of reading.
        backwards: the text is read from its end.
    """

    offset: int
    backwards: bool


class RowOrder(abc.ABC):
    """Which row stands at which place of the sequence of examples."""

    @abc.abstractmethod
    def place(self, index: int, slot: int) -> Place:
        """Of the example with this index, in this slot of the global batch."""


@final
class SlotOrder(RowOrder):
    """Each slot reads on from step to step, so that its memory is of the text before.

    The slots start evenly spread over the ring and walk round it, one part at a step; where one arrives at the start of the
    next, it goes on with other cuts. With reversed rows every second slot reads backwards, so that any even share of the
    batch has as many rows of either direction.

    Args:
        size: of the ring.
        reuse_length: tokens that a slot moves on a step.
        slots: rows of the global batch.
        seed: decides where on the ring the first slot starts.
        reversed_rows: whether half of them read backwards.
    """

    def __init__(self, size: int, reuse_length: int, slots: int, seed: int, *, reversed_rows: bool) -> None:
        self._size, self._reuse_length, self._slots = size, reuse_length, slots
        self._directions = 2 if reversed_rows else 1
        self._turn = int(hash_uniforms(derive_key(seed, "slots"), 0) * size)

    def place(self, index: int, slot: int) -> Place:
        number, backwards = divmod(slot, self._directions)
        start = self._turn + number * self._size // -(-self._slots // self._directions)
        return Place((start + index // self._slots * self._reuse_length) % self._size, bool(backwards))


@final
class ShuffledOrder(RowOrder):
    """Rows in a random order, drawn anew each epoch, and cut at other places. With reversed rows every second slot reads
    backwards, as in `SlotOrder`.

    Args:
        size: of the ring.
        reuse_length: tokens from the start of a row to that of the next.
        seed: of the order.
        reversed_rows: whether half of the rows read backwards.
    """

    def __init__(self, size: int, reuse_length: int, seed: int, *, reversed_rows: bool) -> None:
        self._size, self._reuse_length, self._seed, self._reversed = size, reuse_length, seed, reversed_rows
        self._rows = max(1, size // reuse_length)

    def place(self, index: int, slot: int) -> Place:
        epoch, number = divmod(index, self._rows)
        key = derive_key(self._seed, "two-part order", epoch)
        turn = hash_uniforms(key, 0)
        row = int(permute(np.array([number]), self._rows, key)[0])
        return Place((row * self._reuse_length + int(turn * self._size)) % self._size, self._reversed and slot % 2 == 1)


@final
class TextOrder(RowOrder):
    """Rows in the order of the text, all forwards, for evaluation."""

    def __init__(self, reuse_length: int) -> None:
        self._reuse_length = reuse_length

    def place(self, index: int, slot: int) -> Place:
        return Place(index * self._reuse_length, False)


@dataclass(frozen=True)
class _Row:
    """One row: its text with special tokens.

    Attributes:
        ids: (L,) token ids.
        word_starts: (L,) True where a word begins.
        first: tokens of A.
        continues: B follows A in the text.
    """

    ids: Integers
    word_starts: NDArray[np.bool_]
    first: int
    continues: bool


class TwoPartStream:
    """The endless sequence of rows `[text | A [SEP] B [SEP] [CLS]]`.

    The first part is plain text, as many tokens as the second part is long; the next row of the slot begins where it ends,
    so what this row shows as A is the next row's first part. A ends at a sentence; B is what follows A, or, for half of the
    rows, text from elsewhere, as it is wherever no sentence ends within the second part: where a line of the text is a
    paragraph, B seldom follows A (`follows_share`). Both are cut until the row is full, so there is no padding. Segments: 0 for
    the first part and A [SEP], 1 for B [SEP], 2 for [CLS].

    Differs: B from elsewhere never overlaps the rest of the row, where the split is long enough; the released code may draw
    the answers. The order never starts afresh: there is no pass that ends for all slots when one has no text left.
    Reference: zihangdai/xlnet, data_utils.py, `_create_data` and `_split_a_and_b`.

    Args:
        ring: the text.
        special: the special tokens of its vocabulary.
        sequence_length: L, even, at least 10.
        seed: of the draws.
        order: of the rows.
    """

    def __init__(self, ring: ForwardRing, special: SpecialTokens, sequence_length: int, seed: int, order: RowOrder) -> None:
        self._ring = ring
        self._backward = BackwardRing(ring)
        self._special = special
        self._length = sequence_length
        self._key = derive_key(seed, "two parts")
        self._order = order

    @property
    def num_rows(self) -> int:
        """Rows whose first parts are as long as the text: read in order and all forwards, every token stands in one of them."""
        return max(1, self._ring.size // (self._length // 2))

    def follows_share(self, places: int = 200) -> float:
        """Of the rows, those whose B follows A: half of those in which a sentence ends early enough, told from some of them."""
        part, size = self._length // 2, self._ring.size
        begins = range(0, size, max(1, size // places))
        return sum(len(self._ring.cuts(begin + 1, begin + part - _FUNCTIONAL)) > 0 for begin in begins) / len(begins) / 2

    def batch(self, indices: Integers, slots: Integers) -> TokenBatch:
        """The rows at these places of the sequence.

        Args:
            indices: (B,) from 0.
            slots: (B,) place of each row in the global batch.
        """
        places = [self._order.place(int(index), int(slot)) for index, slot in zip(indices, slots, strict=True)]
        rows = [self._row(place, int(index)) for place, index in zip(places, indices, strict=True)]
        shape = (len(rows), self._length)
        first = np.array([row.first for row in rows], np.int64)[:, None] + self._length // 2
        position = np.broadcast_to(np.arange(self._length), shape)
        last = self._length - 1
        is_special = (position == first) | (position >= last - 1)
        token_types = (position > first).astype(np.int64) + (position == last)
        return TokenBatch(
            input_ids=torch.from_numpy(np.stack([row.ids for row in rows])),
            attention_mask=torch.ones(shape, dtype=torch.bool),
            special_tokens_mask=torch.from_numpy(is_special),
            token_type_ids=torch.from_numpy(token_types),
            position_ids=torch.from_numpy(position.copy()),
            document_ids=None,
            word_starts=torch.from_numpy(np.stack([row.word_starts for row in rows])),
            example_index=torch.from_numpy(indices.astype(np.int64)),
            slot=torch.from_numpy(slots.astype(np.int64)),
            full=True,
            is_reversed=torch.tensor([place.backwards for place in places]),
            continues=torch.tensor([row.continues for row in rows]),
            reuse_length=self._length // 2,
        )

    def _row(self, place: Place, index: int) -> _Row:
        ring = self._backward if place.backwards else self._ring
        part = self._length // 2
        room = part - _FUNCTIONAL
        begin = place.offset + part
        draws = hash_uniforms(self._key, index, np.arange(3))
        choice = choose_segments(ring, (place.offset, begin, room), draws)
        text, other = ring.read(place.offset, begin + choice.first), ring.read(choice.start, choice.start + choice.second)
        special = self._special
        ids = [text.ids, np.array([special.sep]), other.ids, np.array([special.sep, special.cls])]
        starts = [text.word_starts, np.ones(1, bool), other.word_starts, np.ones(2, bool)]
        return _Row(np.concatenate(ids), np.concatenate(starts), choice.first, choice.continues)


@dataclass(frozen=True)
class Segments:
    """A and B of a row.

    Attributes:
        first: tokens of A.
        start: where B begins on the ring.
        second: tokens of B.
        continues: B follows A.
    """

    first: int
    start: int
    second: int
    continues: bool


def choose_segments(ring: Ring, frame: tuple[int, int, int], draws: NDArray[np.float64]) -> Segments:
    """Where A ends, and what B is.

    Args:
        ring: what to read.
        frame: where the row begins, where A begins, and how many tokens A and B have together.
        draws: three numbers in [0, 1): whether B follows A, where A ends, where another B stands.
    """
    row, begin, room = frame
    end = ring.next_cut(begin + room)
    cuts = ring.cuts(begin + 1, begin + room)
    continues = len(cuts) > 0 and bool(draws[0] >= 0.5)
    first_end = int(cuts[int(draws[1] * len(cuts))]) if len(cuts) else end
    first = first_end - begin
    if continues:
        start, stop = first_end, end
    else:
        wanted = max(1, room - first)
        # From the end of what the row may show to where it begins again. On a small ring there is no such place.
        free = row + ring.size - room - end
        drawn = end + int(draws[2] * (free + 1)) if free >= 0 else begin + int(draws[2] * ring.size)
        start, stop = ring.previous_cut(drawn), ring.next_cut(drawn + wanted)
    first, second = _trimmed(first, stop - start, room)
    return Segments(first, start, second, continues)


def _trimmed(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths after the longer was shortened, token by token, until both fill the room; of equal ones, the second is."""
    excess = first + second - room
    gap = min(excess, abs(first - second))
    if first > second:
        first -= gap
    else:
        second -= gap
    excess -= gap
    return first - excess // 2, second - (excess + 1) // 2
