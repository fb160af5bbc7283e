"""Two-part rows for permutation language modeling: text that continues from row to row, then two segments."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from discern.data.batching.cyclic_text import BackwardText, CyclicText, ForwardText
from discern.data.batching.stream import Integers, derive_key, hash_uniforms, permute
from discern.types import SpecialTokens, TokenBatch

_FUNCTIONAL = 3  # [SEP], [SEP], [CLS]


@dataclass(frozen=True)
class RowStart:
    """Where a row begins.

    Attributes:
        offset: place in the cyclic text, counted in the direction of reading.
        backwards: the text is read from its end.
    """

    offset: int
    backwards: bool


class RowOrder(abc.ABC):
    """The order of the rows in the sequence of examples."""

    @abc.abstractmethod
    def place(self, index: int, slot: int) -> RowStart:
        """The beginning of the row with this example index, in this slot of the global batch."""


@final
class SlotOrder(RowOrder):
    """Each slot continues from step to step, so that its memory holds the text just before the row.

    The slots start evenly spread over the text and advance by one part per step. A slot that reaches the start of the next
    one continues with other cuts. With reversed rows every second slot reads backwards, so that any even share of the batch
    has as many rows of either direction.

    Args:
        size: number of tokens in the text.
        reuse_length: tokens that a slot advances per step.
        slots: rows of the global batch.
        seed: decides where the first slot starts.
        reversed_rows: whether half of the slots read backwards.
    """

    def __init__(self, size: int, reuse_length: int, slots: int, seed: int, *, reversed_rows: bool) -> None:
        self._size, self._reuse_length, self._slots = size, reuse_length, slots
        self._directions = 2 if reversed_rows else 1
        self._turn = int(hash_uniforms(derive_key(seed, "slots"), 0) * size)

    def place(self, index: int, slot: int) -> RowStart:
        number, backwards = divmod(slot, self._directions)
        start = self._turn + number * self._size // -(-self._slots // self._directions)
        return RowStart((start + index // self._slots * self._reuse_length) % self._size, bool(backwards))


@final
class ShuffledOrder(RowOrder):
    """Rows in a random order. Each epoch has an order and cuts of its own.

    With reversed rows every second slot reads backwards, as in `SlotOrder`.

    Args:
        size: number of tokens in the text.
        reuse_length: tokens from the start of a row to the start of the next.
        seed: decides the order.
        reversed_rows: whether half of the rows read backwards.
    """

    def __init__(self, size: int, reuse_length: int, seed: int, *, reversed_rows: bool) -> None:
        self._size, self._reuse_length, self._seed, self._reversed = size, reuse_length, seed, reversed_rows
        self._rows = max(1, size // reuse_length)

    def place(self, index: int, slot: int) -> RowStart:
        epoch, number = divmod(index, self._rows)
        key = derive_key(self._seed, "two-part order", epoch)
        turn = hash_uniforms(key, 0)
        row = int(permute(np.array([number]), self._rows, key)[0])
        return RowStart((row * self._reuse_length + int(turn * self._size)) % self._size, self._reversed and slot % 2 == 1)


@final
class TextOrder(RowOrder):
    """Rows in the order of the text, all read forwards, for evaluation."""

    def __init__(self, reuse_length: int) -> None:
        self._reuse_length = reuse_length

    def place(self, index: int, slot: int) -> RowStart:
        return RowStart(index * self._reuse_length, False)


@dataclass(frozen=True)
class _Row:
    """One row: its tokens, including the special ones.

    Attributes:
        ids: (L,) token ids.
        word_starts: (L,) True where a word begins.
        first: number of tokens of A.
        continues: whether B follows A in the text.
    """

    ids: Integers
    word_starts: NDArray[np.bool_]
    first: int
    continues: bool


class TwoPartStream:
    """The endless sequence of rows `[text | A [SEP] B [SEP] [CLS]]`.

    Both parts have the same length. The first is running text. The next row of the slot begins where it ends, so the A of this
    row is in the first part of the next row. A ends at the end of a sentence. B follows A in half of the rows and comes from
    elsewhere in the others. It also comes from elsewhere where no sentence ends within the second part, so B seldom follows A
    if a line of the text is a paragraph (`follows_share`). A and B are cut until the row is exactly full: there is no padding.
    Segment ids are 0 for the first part and A [SEP], 1 for B [SEP], and 2 for [CLS].

    Differs: a B from elsewhere does not overlap the rest of the row if the split is long enough; the released code may draw
    the tokens to predict. The order never restarts for all slots because one of them has no text left.
    Reference: zihangdai/xlnet, data_utils.py, `_create_data` and `_split_a_and_b`.

    Args:
        text: text that the rows are cut from.
        special: the special tokens of its vocabulary.
        sequence_length: L, even and at least 10.
        seed: decides the segments.
        order: order of the rows.
    """

    def __init__(self, text: ForwardText, special: SpecialTokens, sequence_length: int, seed: int, order: RowOrder) -> None:
        self._text = text
        self._backward = BackwardText(text)
        self._special = special
        self._length = sequence_length
        self._key = derive_key(seed, "two parts")
        self._order = order

    @property
    def num_rows(self) -> int:
        """Rows per epoch: read in order and forwards, their first parts cover every token of the text once."""
        return max(1, self._text.size // (self._length // 2))

    def follows_share(self, places: int = 200) -> float:
        """Estimated fraction of rows whose B follows A: half of the rows in which a sentence ends early enough.

        Args:
            places: number of rows to look at.
        """
        part, size = self._length // 2, self._text.size
        begins = range(0, size, max(1, size // places))
        return sum(len(self._text.cuts(begin + 1, begin + part - _FUNCTIONAL)) > 0 for begin in begins) / len(begins) / 2

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

    def _row(self, place: RowStart, index: int) -> _Row:
        source = self._backward if place.backwards else self._text
        part = self._length // 2
        room = part - _FUNCTIONAL
        begin = place.offset + part
        draws = hash_uniforms(self._key, index, np.arange(3))
        choice = choose_segments(source, (place.offset, begin, room), draws)
        text, other = source.read(place.offset, begin + choice.first), source.read(choice.start, choice.start + choice.second)
        special = self._special
        ids = [text.ids, np.array([special.sep]), other.ids, np.array([special.sep, special.cls])]
        starts = [text.word_starts, np.ones(1, bool), other.word_starts, np.ones(2, bool)]
        return _Row(np.concatenate(ids), np.concatenate(starts), choice.first, choice.continues)


@dataclass(frozen=True)
class Segments:
    """A and B of a row.

    Attributes:
        first: number of tokens of A.
        start: where B begins in the text.
        second: number of tokens of B.
        continues: whether B follows A.
    """

    first: int
    start: int
    second: int
    continues: bool


def choose_segments(text: CyclicText, frame: tuple[int, int, int], draws: NDArray[np.float64]) -> Segments:
    """Choose where A ends, and the text of B.

    Args:
        text: text that A and B come from.
        frame: where the row begins, where A begins, and the number of tokens of A and B together.
        draws: three numbers in [0, 1): whether B follows A, where A ends, where a B from elsewhere begins.
    """
    row, begin, room = frame
    end = text.next_cut(begin + room)
    cuts = text.cuts(begin + 1, begin + room)
    continues = len(cuts) > 0 and bool(draws[0] >= 0.5)
    first_end = int(cuts[int(draws[1] * len(cuts))]) if len(cuts) else end
    first = first_end - begin
    if continues:
        start, stop = first_end, end
    else:
        wanted = max(1, room - first)
        # From the end of the row's text to where the row begins again. A short text has no such place.
        free = row + text.size - room - end
        drawn = end + int(draws[2] * (free + 1)) if free >= 0 else begin + int(draws[2] * text.size)
        start, stop = text.previous_cut(drawn), text.next_cut(drawn + wanted)
    first, second = _trimmed(first, stop - start, room)
    return Segments(first, start, second, continues)


def _trimmed(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths after the longer one is shortened, token by token, until both fit; if they are equal, the second is shortened."""
    excess = first + second - room
    gap = min(excess, abs(first - second))
    if first > second:
        first -= gap
    else:
        second -= gap
    excess -= gap
    return first - excess // 2, second - (excess + 1) // 2
