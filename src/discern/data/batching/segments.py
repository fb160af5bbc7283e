"""Rows of packing `segments` and `packed`, and the endless stream of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from discern.data.batching.stream import (
    Integers,
    Rows,
    derive_key,
    document_bounds,
    hash_integers,
    hash_uniforms,
    join_batches,
    permute,
    read_offsets,
    to_batch,
)
from discern.data.config import DataConfig
from discern.data.dataset.shards import Shard, TokenSplit
from discern.types import SpecialTokens, TokenBatch

_BLOCK = 1 << 16  # tokens; longer documents are cut into blocks, so that few passes are needed


class SegmentRows:
    """`[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, padded, A and B neighboring sentences of one document.

    Sentences are collected up to the target length, which is that of the row or, rarely, a random shorter one. One example in
    ten consists of a single segment. In the others, A takes sentences up to about half of the target length.

    Differs: with overflow "carry", tokens beyond the end of the row go to the next example, so an epoch sees every token once.
    The released code drops them (overflow "drop").
    Reference: google-research/electra, build_pretraining_dataset.py.
    """

    def __init__(self, split: TokenSplit, special: SpecialTokens, config: DataConfig, seed: int) -> None:
        self._split = split
        self._special = special
        self._config = config
        self._seed = seed
        self._shards = split.shards
        self._shard_starts = np.array([shard.first_token for shard in split.shards])
        # The span of text of each example, in the order of the text: the offset of its first token in the split, and the number
        # of tokens; and the target length of the example, which decides the length of the first segment.
        plans = zip(*(self._plan(shard) for shard in split.shards), strict=True)
        self._span_starts, self._span_lengths, self._targets = (np.concatenate(column) for column in plans)
        self.num_rows = len(self._span_starts)

    def rows(self, numbers: Integers, epoch: int) -> Rows:
        # For all rows at once: row by row, reading is slower than a GPU computes.
        room, count = self._config.sequence_length, len(numbers)
        starts, sizes = self._span_starts[numbers], self._span_lengths[numbers].astype(np.int64)
        before = np.cumsum(sizes) - sizes
        # Where a sentence begins in the text of the spans, one after the other: at the beginning of each, and within it
        begins = np.zeros(int(sizes.sum()), bool)
        begins[before] = True
        owner = np.searchsorted(self._shard_starts, starts, side="right") - 1
        for shard_number in np.unique(owner):
            mine, shard = owner == shard_number, self._shards[shard_number]
            local = starts[mine] - shard.first_token
            low, high = (np.searchsorted(shard.sentence_starts, bound) for bound in (local + 1, local + sizes[mine]))
            inside = high - low
            which = np.arange(inside.sum()) + np.repeat(low - (np.cumsum(inside) - inside), inside)
            begins[shard.sentence_starts[which] + np.repeat(before[mine] - local, inside)] = True
        lengths, sentences = np.diff(np.flatnonzero(begins), append=len(begins)), np.add.reduceat(begins.astype(np.int64), before)
        # Which sentences go to A
        single = hash_uniforms(derive_key(self._seed, "single"), epoch, numbers) < self._config.single_segment_probability
        aims = np.where(single, 100_000, (self._targets[numbers].astype(np.int64) - 3) // 2)
        order = np.arange(len(lengths)) - np.repeat(np.cumsum(sentences) - sentences, sentences)
        coins = hash_uniforms(derive_key(self._seed, "coin"), epoch, np.repeat(numbers, sentences), order)
        in_first = np.repeat(assign_segments(lengths, sentences, aims, coins < 0.5), lengths)
        # Of each token: its row, and its place among those of its segment.
        row = np.repeat(np.arange(count), sizes)
        firsts = np.cumsum(in_first)
        firsts_before = np.concatenate([[0], firsts])[before]
        of_first = firsts - firsts_before[row]
        place = np.where(in_first, of_first - 1, np.arange(len(row)) - before[row] - of_first)
        whole_first = np.bincount(row[in_first], minlength=count)
        first = np.minimum(whole_first, room - 2)
        second = np.minimum(sizes - whole_first, np.maximum(room - first - 3, 0))
        kept = place < np.where(in_first, first[row], second[row])
        column = np.where(in_first, place + 1, place + first[row] + 2)
        where = row[kept], column[kept]

        columns = np.arange(room)
        has_second = second > 0
        counts = first + 2 + np.where(has_second, second + 1, 0)
        input_ids = np.where(columns < counts[:, None], self._special.sep, self._special.pad)
        input_ids[:, 0] = self._special.cls
        is_special = np.ones(input_ids.shape, bool)
        word_starts = np.zeros(input_ids.shape, bool)
        spans = list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))
        input_ids[where] = np.concatenate([self._split.read(*span) for span in spans])[kept]
        word_starts[where] = np.concatenate([self._split.word_starts(*span) for span in spans])[kept]
        is_special[where] = False
        token_types = ((columns >= first[:, None] + 2) & (columns < counts[:, None])).astype(np.int64)
        positions = np.broadcast_to(columns, input_ids.shape)
        return Rows(input_ids, counts, is_special, token_types, positions, None, word_starts)

    def _plan(self, shard: Shard) -> tuple[Integers, NDArray[np.int32], NDArray[np.int32]]:
        """Start, length and target length of the spans of one shard. All documents advance together, one example per pass."""
        sentences = np.asarray(shard.sentence_starts)
        starts = _blocks(np.asarray(shard.document_starts), sentences)
        position, ends = starts[:-1].copy(), starts[1:]
        longest, place = self._config.sequence_length, np.arange(len(position))
        found = [np.zeros((4, 0), np.int64)]
        while len(active := place[position < ends]):
            # The target length of each document's next example
            documents, ordinal = active + shard.first_token, len(found) - 1
            short = hash_uniforms(derive_key(self._seed, "short"), documents, ordinal) < self._config.short_sequence_probability
            drawn = 5 + (hash_uniforms(derive_key(self._seed, "target"), documents, ordinal) * (longest - 4)).astype(np.int64)
            target = np.where(short, drawn, longest)
            goal = np.minimum(position[active] + target, ends[active])
            length = sentences[np.searchsorted(sentences, goal)] - position[active]
            if self._config.overflow == "carry":
                length = np.minimum(length, longest - 3)
            found.append(np.stack([active, position[active] + shard.first_token, length, target]))
            position[active] += length
        owner, start, length, target = np.concatenate(found, axis=1)
        order = np.argsort(owner, kind="stable")
        return start[order], length[order].astype(np.int32), target[order].astype(np.int32)


def assign_segments(lengths: Integers, sentences: Integers, aims: Integers, coins: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which sentences go to the first segment of their example; the others go to the second.

    A sentence goes to A if A is empty, or stays below its target length with it. While B is empty and A is below its target
    length, a sentence that does not fit goes to A or B by the toss of a coin. A short sentence may join A after a longer one
    went to B, as in the released code.

    Args:
        lengths: tokens of each sentence, of one example after the other.
        sentences: number of sentences of each example.
        aims: number of tokens that A should stay below, of each example.
        coins: one per sentence, True with probability 1/2.
    """
    in_first = np.zeros(len(lengths), bool)
    first, second = np.zeros((2, len(sentences)), np.int64)
    begins = np.cumsum(sentences) - sentences
    # Examples with many sentences come first, so that those that have another one are always at the front.
    order = np.argsort(-sentences, kind="stable")
    begins, aims, left = begins[order], aims[order], np.sort(sentences)
    for number in range(int(sentences.max(initial=0))):
        size = len(sentences) - int(np.searchsorted(left, number, side="right"))
        at = begins[:size] + number
        length, so_far, aim = lengths[at], first[:size], aims[:size]
        joins = (so_far == 0) | (so_far + length < aim) | ((second[:size] == 0) & (so_far < aim) & coins[at])
        in_first[at] = joins
        first[:size] += np.where(joins, length, 0)
        second[:size] += np.where(joins, 0, length)
    return in_first


def _blocks(documents: Integers, sentences: Integers) -> Integers:
    """Where documents start, and where documents longer than a block are cut, at a sentence boundary."""
    extra = (np.diff(documents) - 1) // _BLOCK
    number = np.arange(extra.sum()) - np.repeat(np.cumsum(extra) - extra, extra) + 1
    inside = np.repeat(documents[:-1], extra) + _BLOCK * number
    return np.unique(np.concatenate([documents, sentences[np.searchsorted(sentences, inside)]]))


class PackedRows:
    """Documents back to back, without padding, every token once per epoch.

    All documents are written one after the other as `[CLS] tokens [SEP]`, and the end is followed by the beginning. Row r is a
    window of sequence_length - 1 tokens of this cyclic text, so a row is found by arithmetic alone. The remaining position
    holds a [CLS] in front if the window starts within a document, and otherwise a [SEP] behind. Each epoch starts at a random
    place, so that documents are not cut at the same places every time. Only the last row of an epoch is padded.
    """

    def __init__(self, split: TokenSplit, special: SpecialTokens, sequence_length: int, seed: int, *, rotate: bool) -> None:
        self._split = split
        self._special = special
        self._length = sequence_length
        self._seed = seed
        self._rotate = rotate
        self._documents = document_bounds(split)
        # Where each document begins in the cyclic text: two special tokens later for each document before it.
        self._starts = self._documents + 2 * np.arange(len(self._documents))
        self.num_rows = -(-int(self._starts[-1]) // (sequence_length - 1))

    def rows(self, numbers: Integers, epoch: int) -> Rows:
        # For all rows at once: row by row, reading is slower than a GPU computes.
        length, body, total = self._length, self._length - 1, int(self._starts[-1])
        turn = int(hash_integers(derive_key(self._seed, "rotation"), epoch) % np.uint64(body)) if self._rotate else 0
        counts = np.minimum(body, total - numbers * body)[:, None]
        first, columns = (turn + numbers[:, None] * body) % total, np.arange(length)
        # A row that begins with a document has one [SEP] more behind; any other has a [CLS] in front.
        source = columns - (self._starts[np.searchsorted(self._starts, first)] != first)
        is_text = (source >= 0) & (source < counts)
        places = (first + source.clip(0, counts - 1)) % total
        document = np.searchsorted(self._starts, places, side="right") - 1
        within = places - self._starts[document]
        is_cls = (within == 0) & is_text
        is_special = (within == 0) | (places == self._starts[document + 1] - 1) | ~is_text
        input_ids = np.where(is_cls | (columns == 0), self._special.cls, self._special.sep)
        input_ids[columns > counts] = self._special.pad
        word_starts = np.zeros(input_ids.shape, bool)
        offsets, is_word = self._documents[document] + within - 1, ~is_special
        for row, words in enumerate(is_word):
            input_ids[row, words], word_starts[row, words] = read_offsets(self._split, offsets[row, words])
        # If the split is a single document, it meets itself here: its beginning does not continue its end.
        turns = (np.diff(document, prepend=document[:, :1]) != 0) | is_cls | (columns == counts + 1)
        turns[:, 0] = False
        begins = np.maximum.accumulate(np.where(turns, columns, 0), axis=1)
        pieces, types = np.cumsum(turns, axis=1), np.zeros_like(input_ids)
        return Rows(input_ids, counts[:, 0] + 1, is_special, types, columns - begins, pieces, word_starts)


class ExampleStream:
    """The endless sequence of examples that training reads. Each epoch is shuffled in a new order.

    Args:
        packing: the rows of an epoch.
        seed: decides the order.
        shuffle: if False, rows come in their own order, for evaluation.
    """

    def __init__(self, packing: SegmentRows | PackedRows, seed: int, *, shuffle: bool = True) -> None:
        self.packing, self.num_rows = packing, packing.num_rows
        self._seed, self._shuffle = seed, shuffle

    def batch(self, indices: Integers, slots: Integers) -> TokenBatch:
        """The examples at these places of the sequence; index // num_rows is the epoch."""
        epochs, places = np.divmod(indices, self.num_rows)
        parts: list[tuple[Integers, TokenBatch]] = []
        for epoch in np.unique(epochs):
            chosen = np.flatnonzero(epochs == epoch)
            numbers = places[chosen]
            if self._shuffle:
                numbers = permute(numbers, self.num_rows, derive_key(self._seed, "row order", int(epoch)))
            parts.append((chosen, to_batch(self.packing.rows(numbers, int(epoch)), indices[chosen], slots[chosen])))
        return join_batches(parts)
