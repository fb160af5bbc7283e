"""Documents packed back to back into rows without padding."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from discern.data.batching.ordering import Integers, derive_key, hash_integers
from discern.data.batching.stream import Packing, Rows
from discern.data.dataset.shards import TokenSplit
from discern.types import SpecialTokens

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
        shape = (len(numbers), self._length)
        input_ids = np.full(shape, self._special.pad, np.int64)
        lengths = np.zeros(shape[0], np.int64)
        is_special = np.ones(shape, bool)
        positions = np.zeros(shape, np.int64)
        pieces = np.zeros(shape, np.int64)
        word_starts = np.zeros(shape, bool)
        for at, number in enumerate(numbers):
            ids, begins, special, piece = self._row(int(number), epoch)
            count = lengths[at] = len(ids)
            input_ids[at, :count] = ids
            word_starts[at, :count] = begins
            is_special[at, :count] = special
            pieces[at, :count] = piece
            pieces[at, count:] = piece[-1] + 1
            starts = np.flatnonzero(np.diff(pieces[at], prepend=-1))
            positions[at] = np.arange(self._length) - starts[pieces[at]]
        return Rows(input_ids, lengths, is_special, np.zeros(shape, np.int64), positions, pieces, word_starts)

    def _row(self, number: int, epoch: int) -> tuple[Integers, _Flags, _Flags, Integers]:
        """Ids of a row, which of them begin a word, which are special, and the piece that each belongs to, numbered from 0."""
        total, body = int(self._starts[-1]), self._length - 1
        turn = int(hash_integers(derive_key(self._seed, "rotation"), epoch) % np.uint64(body)) if self._rotate else 0
        count = min(body, total - number * body)
        places = (turn + number * body + np.arange(count)) % total
        document = np.searchsorted(self._starts, places, side="right") - 1
        within = places - self._starts[document]
        is_cls = within == 0
        special = is_cls | (places == self._starts[document + 1] - 1)
        ids, starts = np.where(is_cls, self._special.cls, self._special.sep), np.zeros(count, bool)
        ids[~special], starts[~special] = self._tokens((self._documents[document] + within - 1)[~special])
        place, extra, owner = (count, self._special.sep, document[-1]) if is_cls[0] else (0, self._special.cls, document[0])
        order = np.insert(document, place, owner)
        # If the split is a single document, it meets itself here: its beginning does not continue its end.
        turns = (np.diff(order, prepend=order[0]) != 0) | np.insert(is_cls, place, False)
        turns[0] = False
        ids, starts = np.insert(ids, place, extra), np.insert(starts, place, False)
        return ids, starts, np.insert(special, place, True), np.cumsum(turns)

    def _tokens(self, offsets: Integers) -> tuple[Integers, _Flags]:
        """Tokens at offsets that rise, except for at most one jump back to the beginning; and which of them begin a word."""
        if not len(offsets):
            return offsets, np.zeros(0, bool)
        parts = np.split(offsets, np.flatnonzero(np.diff(offsets) < 0) + 1)
        spans = [(int(part[0]), int(part[-1]) + 1) for part in parts]
        tokens = np.concatenate([self._split.read(*span) for span in spans])
        return tokens, np.concatenate([self._split.word_starts(*span) for span in spans])
