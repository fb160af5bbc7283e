"""Two-part rows for permutation language modeling: text that continues from row to row, then two segments."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from discern.data.batching.stream import Integers, derive_key, document_bounds, hash_uniforms, permute, read_offsets
from discern.data.dataset.shards import Shard, TokenSplit
from discern.types import SpecialTokens, TokenBatch

_FUNCTIONAL = 3  # [SEP], [SEP], [CLS]


class ForwardText:
    """The documents of a split in order, without an end: `place` and `place + size` are the same token for any integer.

    Each document ends with a token of its own, which belongs to its last sentence. A *cut* is a place at which a sentence begins.

    Attributes:
        size: number of tokens, including those that end documents.

    Args:
        end_of_document: id of the token that ends a document.
    """

    def __init__(self, split: TokenSplit, end_of_document: int) -> None:
        self._split = split
        self._end = end_of_document
        self._shard_starts = np.array([shard.first_token for shard in split.shards])
        self._documents = document_bounds(split)
        # Where each document begins in the text: one token later for each document before it.
        self._starts = self._documents + np.arange(len(self._documents))
        self.size = int(self._starts[-1])

    def read(self, start: int, stop: int) -> tuple[Integers, NDArray[np.bool_]]:
        """The tokens from `start` to before `stop`, and which of them begin a word."""
        places = np.arange(start, stop) % self.size
        document = np.searchsorted(self._starts, places, side="right") - 1
        is_text = places != self._starts[document + 1] - 1
        ids, word_starts = np.full(len(places), self._end), np.ones(len(places), bool)
        ids[is_text], word_starts[is_text] = read_offsets(self._split, (places - document)[is_text])
        return ids, word_starts

    def next_cut(self, place: int) -> int:
        """The first cut at or after `place`."""
        return int(self._cuts_from(place, 1)[0])

    def previous_cut(self, place: int) -> int:
        """The last cut at or before `place`."""
        distance = 64
        while not len(cuts := self.cuts(place - distance, place + 1)):
            distance *= 2
        return int(cuts[-1])

    def cuts(self, start: int, stop: int) -> Integers:
        """The cuts from `start` to before `stop`, in order."""
        found = [np.zeros(0, np.int64)]
        while start < stop:
            places = self._cuts_from(start, stop - start)
            found.append(places[places < stop])
            start = int(places[-1]) + 1
        return np.concatenate(found)

    def _cuts_from(self, place: int, count: int) -> Integers:
        """The cuts of one shard among the next `count` tokens, but at least one cut."""
        lap, within = divmod(place, self.size)
        # The token that ends a document has the same offset in the split as the beginning of the next document.
        token = within - (int(np.searchsorted(self._starts, within, side="right")) - 1)
        if token == self._split.num_tokens:
            return np.array([(lap + 1) * self.size])
        shard = self._shard_of(token)
        starts, local = shard.sentence_starts, token - shard.first_token
        first, last = (int(np.searchsorted(starts, bound)) for bound in (local, local + count))
        tokens = np.asarray(starts[first : max(last, first + 1)], np.int64) + shard.first_token
        return lap * self.size + tokens + np.searchsorted(self._documents, tokens, side="right") - 1

    def _shard_of(self, token: int) -> Shard:
        return self._split.shards[int(np.searchsorted(self._shard_starts, token, side="right")) - 1]


class BackwardText:
    """A text read from its end: place p is place `size - 1 - p` of the original. Its words begin with their last token."""

    def __init__(self, text: ForwardText) -> None:
        self._forward = text
        self.size = text.size

    def read(self, start: int, stop: int) -> tuple[Integers, NDArray[np.bool_]]:
        ids, word_starts = self._forward.read(self.size - stop, self.size - start)
        return ids[::-1], word_starts[::-1]

    def next_cut(self, place: int) -> int:
        return self.size - self._forward.previous_cut(self.size - place)

    def previous_cut(self, place: int) -> int:
        return self.size - self._forward.next_cut(self.size - place)

    def cuts(self, start: int, stop: int) -> Integers:
        return self.size - self._forward.cuts(self.size - stop + 1, self.size - start + 1)[::-1]


class TwoPartStream:
    """The endless sequence of rows `[text | A [SEP] B [SEP] [CLS]]`.

    Both parts have the same length. The first is running text. The next row of the slot begins where it ends, so the A of this
    row is in the first part of the next row. A ends at the end of a sentence. B follows A in half of the rows and comes from
    elsewhere in the others. It also comes from elsewhere where no sentence ends within the second part, so B seldom follows A
    if a line of the text is a paragraph. A and B are cut until the row is exactly full: there is no padding.
    Segment ids are 0 for the first part and A [SEP], 1 for B [SEP], and 2 for [CLS].

    Differs: a B from elsewhere does not overlap the rest of the row if the split is long enough; the released code may draw
    the tokens to predict. The order never restarts for all slots because one of them has no text left.
    Reference: zihangdai/xlnet, data_utils.py, `_create_data` and `_split_a_and_b`.

    Args:
        text: text that the rows are cut from.
        special: the special tokens of its vocabulary.
        sequence_length: L, even and at least 10.
        seed: decides the segments and the order.
        slots: rows of the global batch. Each slot continues from step to step, so that its memory holds the text just before the
            row. The slots start evenly spread over the text; a slot that reaches the start of the next one continues with other
            cuts. None: rows come in a random order, and each epoch has an order and cuts of its own.
        reversed_rows: whether every second slot reads backwards, so that any even share of the batch has as many rows of either
            direction.
        shuffle: if False, a single slot reads from the beginning of the text, for evaluation.
    """

    def __init__(
        self,
        text: ForwardText,
        special: SpecialTokens,
        sequence_length: int,
        seed: int,
        *,
        slots: int | None = None,
        reversed_rows: bool = False,
        shuffle: bool = True,
    ) -> None:
        self._text, self._backward = text, BackwardText(text)
        self._special, self._length, self._part = special, sequence_length, sequence_length // 2
        self._seed, self._key = seed, derive_key(seed, "two parts")
        self._slots, self._directions = slots if shuffle else 1, 2 if reversed_rows else 1
        self._turn = int(hash_uniforms(derive_key(seed, "slots"), 0) * text.size) if shuffle else 0

    @property
    def num_rows(self) -> int:
        """Rows per epoch: read in order and forwards, their first parts cover every token of the text once."""
        return max(1, self._text.size // self._part)

    def batch(self, indices: Integers, slots: Integers) -> TokenBatch:
        """The rows at these places of the sequence."""
        part, special = self._part, self._special
        ids, word_starts, firsts, continues = [], [], [], []
        backwards = slots % self._directions == 1
        draws = hash_uniforms(self._key, indices[:, None], np.arange(3))
        for start, is_backward, draw in zip(self._starts(indices, slots).tolist(), backwards, draws, strict=True):
            source = self._backward if is_backward else self._text
            chosen = choose_segments(source, (start, start + part, part - _FUNCTIONAL), draw)
            text, text_starts = source.read(start, start + part + chosen.first)
            other, other_starts = source.read(chosen.start, chosen.start + chosen.second)
            ids.append(np.concatenate([text, [special.sep], other, [special.sep, special.cls]]))
            word_starts.append(np.concatenate([text_starts, [True], other_starts, [True, True]]))
            firsts.append(chosen.first)
            continues.append(chosen.continues)

        shape, last = (len(ids), self._length), self._length - 1
        position = np.broadcast_to(np.arange(self._length), shape)
        middle = np.array(firsts, np.int64)[:, None] + part
        return TokenBatch(
            input_ids=torch.from_numpy(np.stack(ids)),
            attention_mask=torch.ones(shape, dtype=torch.bool),
            special_tokens_mask=torch.from_numpy((position == middle) | (position >= last - 1)),
            token_type_ids=torch.from_numpy((position > middle).astype(np.int64) + (position == last)),
            position_ids=torch.from_numpy(position.copy()),
            document_ids=None,
            word_starts=torch.from_numpy(np.stack(word_starts)),
            example_index=torch.from_numpy(indices.astype(np.int64)),
            slot=torch.from_numpy(slots.astype(np.int64)),
            full=True,
            is_reversed=torch.from_numpy(backwards),
            continues=torch.tensor(continues),
            reuse_length=part,
        )

    def _starts(self, indices: Integers, slots: Integers) -> Integers:
        """Where each row begins in the text, counted in the direction of reading."""
        size = self._text.size
        if self._slots is not None:
            spread = slots // self._directions * size // -(-self._slots // self._directions)
            return (self._turn + spread + indices // self._slots * self._part) % size
        epochs, numbers = np.divmod(indices, self.num_rows)
        starts = np.zeros(len(indices), np.int64)
        for epoch in np.unique(epochs):
            chosen, key = epochs == epoch, derive_key(self._seed, "two-part order", int(epoch))
            rows = permute(numbers[chosen], self.num_rows, key)
            starts[chosen] = (rows * self._part + int(hash_uniforms(key, 0) * size)) % size
        return starts


class Segments(NamedTuple):
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


def choose_segments(text: ForwardText | BackwardText, frame: tuple[int, int, int], draws: NDArray[np.float64]) -> Segments:
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
    second = stop - start
    # The longer one is shortened, token by token, until both fit; if they are equal, the second is shortened.
    excess = first + second - room
    gap = min(excess, abs(first - second))
    first, second = (first - gap, second) if first > second else (first, second - gap)
    excess -= gap
    return Segments(first - excess // 2, start, second - (excess + 1) // 2, continues)
