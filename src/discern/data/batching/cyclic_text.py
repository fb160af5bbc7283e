"""A split as one endless text, readable from any place in either direction."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from discern.data.batching.stream import Integers
from discern.data.dataset.shards import Shard, TokenSplit


@dataclass(frozen=True)
class TextSpan:
    """Consecutive tokens.

    Attributes:
        ids: (n,) token ids.
        word_starts: (n,) True where a word begins in the direction of reading; backwards, that is the last token of a word.
    """

    ids: Integers
    word_starts: NDArray[np.bool_]


class CyclicText(abc.ABC):
    """Text whose end is followed by its beginning. Any integer is a place: `place` and `place + size` are the same token.

    A *cut* is a place at which a sentence begins.

    Attributes:
        size: number of tokens, including those that end documents.
    """

    size: int

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> TextSpan:
        """The tokens from `start` to before `stop`."""

    @abc.abstractmethod
    def next_cut(self, place: int) -> int:
        """The first cut at or after `place`."""

    @abc.abstractmethod
    def previous_cut(self, place: int) -> int:
        """The last cut at or before `place`."""

    @abc.abstractmethod
    def cuts(self, start: int, stop: int) -> Integers:
        """The cuts from `start` to before `stop`, in order."""


@final
class ForwardText(CyclicText):
    """The documents of a split in order. Each ends with a token of its own, which belongs to its last sentence.

    Args:
        end_of_document: id of that token.
    """

    def __init__(self, split: TokenSplit, end_of_document: int) -> None:
        self._split = split
        self._end = end_of_document
        self._shards = split.shards
        self._shard_starts = np.array([shard.first_token for shard in split.shards])
        starts = [shard.document_starts[:-1] + shard.first_token for shard in split.shards]
        self._documents = np.concatenate([*starts, np.array([split.num_tokens])]).astype(np.int64)
        # Where each document begins in the text: one token later for each document before it.
        self._starts = self._documents + np.arange(len(self._documents))
        self.size = int(self._starts[-1])

    def read(self, start: int, stop: int) -> TextSpan:
        places = np.arange(start, stop) % self.size
        document = np.searchsorted(self._starts, places, side="right") - 1
        is_end = places == self._starts[document + 1] - 1
        ids, word_starts = np.full(len(places), self._end), np.ones(len(places), bool)
        offsets = (places - document)[~is_end]
        if len(offsets):
            # The offsets rise, except where the end meets the beginning.
            parts = np.split(offsets, np.flatnonzero(np.diff(offsets) < 0) + 1)
            spans = [(int(part[0]), int(part[-1]) + 1) for part in parts]
            ids[~is_end] = np.concatenate([self._split.read(*span) for span in spans])
            word_starts[~is_end] = np.concatenate([self._split.word_starts(*span) for span in spans])
        return TextSpan(ids, word_starts)

    def next_cut(self, place: int) -> int:
        lap, within = divmod(place, self.size)
        document = int(np.searchsorted(self._starts, within, side="right")) - 1
        # The token that ends a document has the same offset in the split as the beginning of the next document.
        token = within - document
        if token < self._split.num_tokens:
            shard = self._shard_of(token)
            starts = shard.sentence_starts
            token = shard.first_token + int(starts[np.searchsorted(starts, token - shard.first_token)])
        return lap * self.size + int(self._to_places(np.array([token]))[0])

    def previous_cut(self, place: int) -> int:
        lap, within = divmod(place, self.size)
        document = int(np.searchsorted(self._starts, within, side="right")) - 1
        token = min(within - document, int(self._documents[document + 1]) - 1)
        shard = self._shard_of(token)
        starts = shard.sentence_starts
        at = int(np.searchsorted(starts, token - shard.first_token, side="right")) - 1
        return lap * self.size + int(self._to_places(np.array([shard.first_token + int(starts[at])]))[0])

    def cuts(self, start: int, stop: int) -> Integers:
        found = []
        place = self.next_cut(start)
        while place < stop:
            lap, within = divmod(place, self.size)
            token = within - (int(np.searchsorted(self._starts, within, side="right")) - 1)
            shard = self._shard_of(token)
            starts = shard.sentence_starts
            first = int(np.searchsorted(starts, token - shard.first_token))
            # No more sentences than tokens can begin before `stop`.
            last = int(np.searchsorted(starts, token - shard.first_token + stop - place))
            tokens = np.asarray(starts[first : min(last, len(starts) - 1)], np.int64) + shard.first_token
            places = lap * self.size + self._to_places(tokens)
            found.append(places[places < stop])
            place = self.next_cut(int(places[-1]) + 1)
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _shard_of(self, token: int) -> Shard:
        return self._shards[int(np.searchsorted(self._shard_starts, token, side="right")) - 1]

    def _to_places(self, tokens: Integers) -> Integers:
        """Places of token offsets in the split."""
        return tokens + np.searchsorted(self._documents, tokens, side="right") - 1


@final
class BackwardText(CyclicText):
    """A text read from its end: place p is place `size - 1 - p` of the original."""

    def __init__(self, text: CyclicText) -> None:
        self._forward = text
        self.size = text.size

    def read(self, start: int, stop: int) -> TextSpan:
        text = self._forward.read(self.size - stop, self.size - start)
        return TextSpan(text.ids[::-1], text.word_starts[::-1])

    def next_cut(self, place: int) -> int:
        return self.size - self._forward.previous_cut(self.size - place)

    def previous_cut(self, place: int) -> int:
        return self.size - self._forward.next_cut(self.size - place)

    def cuts(self, start: int, stop: int) -> Integers:
        return self.size - self._forward.cuts(self.size - stop + 1, self.size - start + 1)[::-1]
