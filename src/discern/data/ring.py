"""A split as one endless text, readable from any place in either direction."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from discern.data.ordering import Integers
from discern.data.shards import Shard, TokenSplit


@dataclass(frozen=True)
class Text:
    """A stretch of tokens.

    Attributes:
        ids: (n,) token ids.
        word_starts: (n,) True where a word begins, as one reads: backwards, that is the last token of a word.
    """

    ids: Integers
    word_starts: NDArray[np.bool_]


class Ring(abc.ABC):
    """Tokens closed to a ring. Places are any integers: `place` and `place + size` are the same token.

    A *cut* is a place at which a sentence begins.

    Attributes:
        size: tokens, those that end documents included.
    """

    size: int

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> Text:
        """The tokens from `start` to before `stop`."""

    @abc.abstractmethod
    def next_cut(self, place: int) -> int:
        """The first cut at `place` or behind it."""

    @abc.abstractmethod
    def previous_cut(self, place: int) -> int:
        """The last cut at `place` or before it."""

    @abc.abstractmethod
    def cuts(self, start: int, stop: int) -> Integers:
        """The cuts from `start` to before `stop`, in order."""


@final
class ForwardRing(Ring):
    """The documents of a split one after the other, a token at the end of each, which belongs to its last sentence.

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
        # Where each document begins on the ring: one token more for each document before it.
        self._ring = self._documents + np.arange(len(self._documents))
        self.size = int(self._ring[-1])

    def read(self, start: int, stop: int) -> Text:
        places = np.arange(start, stop) % self.size
        document = np.searchsorted(self._ring, places, side="right") - 1
        is_end = places == self._ring[document + 1] - 1
        ids, word_starts = np.full(len(places), self._end), np.ones(len(places), bool)
        offsets = (places - document)[~is_end]
        if len(offsets):
            # The offsets rise, but where the ring closes.
            parts = np.split(offsets, np.flatnonzero(np.diff(offsets) < 0) + 1)
            spans = [(int(part[0]), int(part[-1]) + 1) for part in parts]
            ids[~is_end] = np.concatenate([self._split.read(*span) for span in spans])
            word_starts[~is_end] = np.concatenate([self._split.word_starts(*span) for span in spans])
        return Text(ids, word_starts)

    def next_cut(self, place: int) -> int:
        lap, within = divmod(place, self.size)
        document = int(np.searchsorted(self._ring, within, side="right")) - 1
        # Behind the end of a document stands the beginning of the next, which is the same token offset.
        token = within - document
        if token < self._split.num_tokens:
            shard = self._shard_of(token)
            starts = shard.sentence_starts
            token = shard.first_token + int(starts[np.searchsorted(starts, token - shard.first_token)])
        return lap * self.size + int(self._to_ring(np.array([token]))[0])

    def previous_cut(self, place: int) -> int:
        lap, within = divmod(place, self.size)
        document = int(np.searchsorted(self._ring, within, side="right")) - 1
        token = min(within - document, int(self._documents[document + 1]) - 1)
        shard = self._shard_of(token)
        starts = shard.sentence_starts
        at = int(np.searchsorted(starts, token - shard.first_token, side="right")) - 1
        return lap * self.size + int(self._to_ring(np.array([shard.first_token + int(starts[at])]))[0])

    def cuts(self, start: int, stop: int) -> Integers:
        found = []
        place = self.next_cut(start)
        while place < stop:
            lap, within = divmod(place, self.size)
            token = within - (int(np.searchsorted(self._ring, within, side="right")) - 1)
            shard = self._shard_of(token)
            starts = shard.sentence_starts
            first = int(np.searchsorted(starts, token - shard.first_token))
            # No more sentences than tokens can begin before `stop`.
            last = int(np.searchsorted(starts, token - shard.first_token + stop - place))
            tokens = np.asarray(starts[first : min(last, len(starts) - 1)], np.int64) + shard.first_token
            places = lap * self.size + self._to_ring(tokens)
            found.append(places[places < stop])
            place = self.next_cut(int(places[-1]) + 1)
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def _shard_of(self, token: int) -> Shard:
        return self._shards[int(np.searchsorted(self._shard_starts, token, side="right")) - 1]

    def _to_ring(self, tokens: Integers) -> Integers:
        """Places of token offsets; the number of tokens is the place where the ring closes."""
        return tokens + np.searchsorted(self._documents, tokens, side="right") - 1


@final
class BackwardRing(Ring):
    """A ring read from its end: place p is its place `size - 1 - p`."""

    def __init__(self, ring: Ring) -> None:
        self._forward = ring
        self.size = ring.size

    def read(self, start: int, stop: int) -> Text:
        text = self._forward.read(self.size - stop, self.size - start)
        return Text(text.ids[::-1], text.word_starts[::-1])

    def next_cut(self, place: int) -> int:
        return self.size - self._forward.previous_cut(self.size - place)

    def previous_cut(self, place: int) -> int:
        return self.size - self._forward.next_cut(self.size - place)

    def cuts(self, start: int, stop: int) -> Integers:
        return self.size - self._forward.cuts(self.size - stop + 1, self.size - start + 1)[::-1]
