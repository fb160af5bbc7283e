"""Two-segment examples, as the released ELECTRA code builds them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from discern.data.batching.stream import Integers, Packing, Rows, derive_key, hash_integers, hash_uniforms
from discern.data.config import DataConfig
from discern.data.dataset.shards import Shard, TokenSplit
from discern.types import SpecialTokens

_BLOCK = 1 << 16  # tokens; longer documents are cut into blocks, so that few passes are needed


@dataclass(frozen=True)
class _Spans:
    """Spans of text that become examples, in the order of the text.

    Attributes:
        start: offset of the first token in the split.
        length: number of tokens.
        target: target length of the example, which decides the length of the first segment.
    """

    start: Integers
    length: NDArray[np.int32]
    target: NDArray[np.int32]


class SegmentRows(Packing):
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
        self._keys = {use: derive_key(seed, use) for use in ("target", "short", "single", "coin")}
        self._shards = split.shards
        self._shard_starts = np.array([shard.first_token for shard in split.shards])
        plans = [self._plan(shard) for shard in split.shards]
        self._spans = _Spans(*(np.concatenate([getattr(p, n) for p in plans]) for n in ("start", "length", "target")))
        self.num_rows = len(self._spans.start)

    def rows(self, numbers: Integers, epoch: int) -> Rows:
        # For all rows at once: row by row, reading is slower than a GPU computes.
        room, count = self._config.sequence_length, len(numbers)
        starts, sizes = self._spans.start[numbers], self._spans.length[numbers].astype(np.int64)
        lengths, sentences = self._sentences(starts, sizes)
        in_first = np.repeat(self._assigned(numbers, epoch, lengths, sentences), lengths)
        # Of each token: its row, and its place among those of its segment.
        row = np.repeat(np.arange(count), sizes)
        before = np.cumsum(sizes) - sizes
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
        if spans:
            input_ids[where] = np.concatenate([self._split.read(*span) for span in spans])[kept]
            word_starts[where] = np.concatenate([self._split.word_starts(*span) for span in spans])[kept]
        is_special[where] = False
        token_types = ((columns >= first[:, None] + 2) & (columns < counts[:, None])).astype(np.int64)
        positions = np.broadcast_to(columns, input_ids.shape)
        return Rows(input_ids, counts, is_special, token_types, positions, None, word_starts)

    def _assigned(self, numbers: Integers, epoch: int, lengths: Integers, sentences: Integers) -> NDArray[np.bool_]:
        """Which sentences go to A: of each example in turn."""
        single = hash_uniforms(self._keys["single"], epoch, numbers) < self._config.single_segment_probability
        aims = np.where(single, 100_000, (self._spans.target[numbers].astype(np.int64) - 3) // 2)
        order = np.arange(len(lengths)) - np.repeat(np.cumsum(sentences) - sentences, sentences)
        coins = hash_uniforms(self._keys["coin"], epoch, np.repeat(numbers, sentences), order)
        return assign_segments(lengths, sentences, aims, coins < 0.5)

    def _sentences(self, starts: Integers, sizes: Integers) -> tuple[Integers, Integers]:
        """Tokens of each sentence of the spans, one span after the other; and the number of sentences of each."""
        owner = np.searchsorted(self._shard_starts, starts, side="right") - 1
        low, inside = np.zeros((2, len(starts)), np.int64)
        for number in np.unique(owner):
            mine, shard = owner == number, self._shards[number]
            begin = starts[mine] - shard.first_token
            low[mine] = np.searchsorted(shard.sentence_starts, begin + 1)
            inside[mine] = np.searchsorted(shard.sentence_starts, begin + sizes[mine]) - low[mine]
        # Where a sentence ends: where another begins within the span, and at its end.
        ends = np.empty(int(inside.sum()) + len(starts), np.int64)
        last = np.cumsum(inside + 1) - 1
        ends[last] = np.cumsum(sizes)
        span = np.repeat(np.arange(len(starts)), inside)
        at = np.arange(len(span)) + span
        which = np.arange(len(span)) - (np.cumsum(inside) - inside)[span] + low[span]
        offset = np.cumsum(sizes) - sizes - starts
        for number in np.unique(owner):
            mine, shard = owner[span] == number, self._shards[number]
            ends[at[mine]] = shard.sentence_starts[which[mine]] + shard.first_token + offset[span[mine]]
        return np.diff(ends, prepend=0), inside + 1

    def _plan(self, shard: Shard) -> _Spans:
        """Spans of one shard. All documents advance together, one example per pass."""
        sentences = np.asarray(shard.sentence_starts)
        starts = _blocks(np.asarray(shard.document_starts), sentences)
        position, ends = starts[:-1].copy(), starts[1:]
        place = np.arange(len(position))
        active = place[position < ends]
        found: list[tuple[Integers, ...]] = []
        ordinal = 0
        while len(active):
            target = self._targets(active + shard.first_token, ordinal)
            goal = np.minimum(position[active] + target, ends[active])
            stop = sentences[np.searchsorted(sentences, goal)]
            length = stop - position[active]
            if self._config.overflow == "carry":
                length = np.minimum(length, self._config.sequence_length - 3)
            found.append((active, position[active] + shard.first_token, length, target))
            position[active] += length
            active = active[position[active] < ends[active]]
            ordinal += 1
        if not found:
            return _Spans(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int32))
        owner, start, length, target = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort(owner, kind="stable")
        return _Spans(start[order], length[order].astype(np.int32), target[order].astype(np.int32))

    def _targets(self, documents: Integers, ordinal: int) -> Integers:
        """Target length of each document's example number `ordinal`."""
        longest = self._config.sequence_length
        short = hash_uniforms(self._keys["short"], documents, ordinal) < self._config.short_sequence_probability
        drawn = 5 + (hash_uniforms(self._keys["target"], documents, ordinal) * (longest - 4)).astype(np.int64)
        return np.where(short, drawn, longest)


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
    long = np.flatnonzero(extra > 0)
    if not len(long):
        return documents
    inside = np.concatenate([documents[at] + _BLOCK * np.arange(1, extra[at] + 1) for at in long])
    cuts = sentences[np.searchsorted(sentences, inside)]
    return np.unique(np.concatenate([documents, cuts]))


_Flags = NDArray[np.bool_]


class PackedRows(Packing):
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
        self._documents = np.concatenate(
            [shard.document_starts[:-1] + shard.first_token for shard in split.shards] + [np.array([split.num_tokens])]
        ).astype(np.int64)
        # Where each document begins in the cyclic text: two special tokens later for each document before it.
        self._starts = self._documents + 2 * np.arange(len(self._documents))
        self.num_rows = -(-int(self._starts[-1]) // (sequence_length - 1))

    def rows(self, numbers: Integers, epoch: int) -> Rows:
        # For all rows at once: row by row, reading is slower than a GPU computes.
        length, body, total = self._length, self._length - 1, int(self._starts[-1])
        turn = int(hash_integers(derive_key(self._seed, "rotation"), epoch) % np.uint64(body)) if self._rotate else 0
        counts = np.minimum(body, total - numbers * body)
        places = (turn + numbers[:, None] * body + np.arange(body)) % total
        document = np.searchsorted(self._starts, places, side="right") - 1
        within = places - self._starts[document]
        is_cls = within == 0
        special = is_cls | (places == self._starts[document + 1] - 1)
        offsets = self._documents[document] + within - 1
        columns = np.arange(length)
        # A row that begins with a document has one [SEP] more behind; any other has a [CLS] in front.
        in_front = ~is_cls[:, 0]
        source = columns - in_front[:, None]
        lengths = counts + 1
        is_text = (source >= 0) & (source < counts[:, None])
        nearest = source.clip(0, counts[:, None] - 1)
        document, is_cls = np.take_along_axis(document, nearest, 1), np.take_along_axis(is_cls, nearest, 1) & is_text
        is_special = np.take_along_axis(special, nearest, 1) | ~is_text
        input_ids = np.where(is_cls | (columns == 0), self._special.cls, self._special.sep)
        is_padding = columns >= lengths[:, None]
        input_ids[is_padding] = self._special.pad
        word_starts = np.zeros(input_ids.shape, bool)
        self._fill_tokens(np.take_along_axis(offsets, nearest, 1), ~is_special, input_ids, word_starts)
        # If the split is a single document, it meets itself here: its beginning does not continue its end.
        turns = (np.diff(document, prepend=document[:, :1]) != 0) | is_cls | (columns == lengths[:, None])
        turns[:, 0] = False
        begins = np.maximum.accumulate(np.where(turns, columns, 0), axis=1)
        return Rows(
            input_ids, lengths, is_special, np.zeros_like(input_ids), columns - begins, np.cumsum(turns, axis=1), word_starts
        )

    def _fill_tokens(self, offsets: Integers, is_word: _Flags, input_ids: Integers, word_starts: _Flags) -> None:
        """Put the tokens at these offsets into each row, and mark which of them begin a word."""
        for row, words in enumerate(is_word):
            chosen = offsets[row, words]
            if not len(chosen):
                continue
            if chosen[-1] - chosen[0] == len(chosen) - 1:  # it does not run over the end of the text
                span = int(chosen[0]), int(chosen[-1]) + 1
                input_ids[row, words], word_starts[row, words] = self._split.read(*span), self._split.word_starts(*span)
            else:
                input_ids[row, words], word_starts[row, words] = self._tokens(chosen)

    def _tokens(self, offsets: Integers) -> tuple[Integers, _Flags]:
        """Tokens at offsets that rise, except for at most one jump back to the beginning; and which of them begin a word."""
        parts = np.split(offsets, np.flatnonzero(np.diff(offsets) < 0) + 1)
        spans = [(int(part[0]), int(part[-1]) + 1) for part in parts]
        tokens = np.concatenate([self._split.read(*span) for span in spans])
        return tokens, np.concatenate([self._split.word_starts(*span) for span in spans])
