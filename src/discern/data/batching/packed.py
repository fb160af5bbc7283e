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
