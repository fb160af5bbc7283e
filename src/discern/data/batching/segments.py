"""Two-segment examples, as the released ELECTRA code builds them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from discern.data.batching.ordering import Integers, derive_key, hash_uniforms
from discern.data.batching.stream import Packing, Rows
from discern.data.config import DataConfig
from discern.data.dataset.shards import Shard, TokenSplit
from discern.types import SpecialTokens

_Segment = tuple[Integers, NDArray[np.bool_]]
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
        shape = (len(numbers), self._config.sequence_length)
        input_ids = np.full(shape, self._special.pad, np.int64)
        lengths = np.zeros(shape[0], np.int64)
        is_special = np.ones(shape, bool)
        token_types = np.zeros(shape, np.int64)
        word_starts = np.zeros(shape, bool)
        for at, number in enumerate(numbers):
            (first, first_starts), (second, second_starts) = self._segments(int(number), epoch)
            count = len(first) + 2
            input_ids[at, 0] = self._special.cls
            input_ids[at, 1 : count - 1] = first
            word_starts[at, 1 : count - 1] = first_starts
            input_ids[at, count - 1] = self._special.sep
            is_special[at, 1 : count - 1] = False
            if len(second):
                stop = count + len(second)
                input_ids[at, count:stop] = second
                word_starts[at, count:stop] = second_starts
                input_ids[at, stop] = self._special.sep
                is_special[at, count:stop] = False
                token_types[at, count : stop + 1] = 1
                count = stop + 1
            lengths[at] = count
        positions = np.broadcast_to(np.arange(shape[1]), shape)
        return Rows(input_ids, lengths, is_special, token_types, positions, None, word_starts)

    def _segments(self, number: int, epoch: int) -> tuple[_Segment, _Segment]:
        """A and B of an example, cut to fit the row: the tokens of each, and where words begin."""
        start, length = int(self._spans.start[number]), int(self._spans.length[number])
        tokens, starts = self._split.read(start, start + length), self._split.word_starts(start, start + length)
        bounds = self._sentence_bounds(start, start + length) - start
        single = hash_uniforms(self._keys["single"], epoch, number) < self._config.single_segment_probability
        aim = 100_000 if single else (int(self._spans.target[number]) - 3) // 2
        coins = hash_uniforms(self._keys["coin"], epoch, number, np.arange(len(bounds)))
        in_first = assign_segments(np.diff(bounds), aim, coins < 0.5)
        of_first = np.repeat(in_first, np.diff(bounds))
        room = self._config.sequence_length
        first = tokens[of_first][: room - 2]
        left = max(0, room - len(first) - 3)
        return (first, starts[of_first][: room - 2]), (tokens[~of_first][:left], starts[~of_first][:left])

    def _sentence_bounds(self, start: int, stop: int) -> Integers:
        """Offsets at which sentences of the span begin, and its end."""
        shard = self._shards[int(np.searchsorted(self._shard_starts, start, side="right")) - 1]
        starts, base = shard.sentence_starts, shard.first_token
        low, high = np.searchsorted(starts, [start - base + 1, stop - base])
        return np.concatenate([[start], starts[low:high] + base, [stop]]).astype(np.int64)

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


def assign_segments(lengths: Integers, aim: int, coins: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which sentences go to the first segment; the others go to the second.

    A sentence goes to A if A is empty, or stays below its target length with it. While B is empty and A is below its target
    length, a sentence that does not fit goes to A or B by the toss of a coin. A short sentence may join A after a longer one
    went to B, as in the released code.

    Args:
        lengths: tokens of each sentence.
        aim: number of tokens that A should stay below.
        coins: one per sentence, True with probability 1/2.
    """
    in_first = np.zeros(len(lengths), bool)
    first = second = 0
    for at, length in enumerate(lengths.tolist()):
        if first == 0 or first + length < aim or (second == 0 and first < aim and coins[at]):
            in_first[at] = True
            first += length
        else:
            second += length
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
