"""Counts over a data set, in memory that does not grow with it, but for 16 bytes a document at the end."""

from __future__ import annotations

import tempfile
from types import TracebackType

import numpy as np
from jaxtyping import Int

from discern.data.blocks import DIGEST_BYTES
from discern.data.encoder import EncodedChunk
from discern.data.manifest import Statistics

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
_EXACT = 4096
_RATIO = 1.01
_BUCKETS = _EXACT + 4096


class LengthHistogram:
    """Lengths counted in buckets: one for each below 4096, then of 1 % width."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BUCKETS, dtype=np.int64)
        self._largest = 0

    def add(self, lengths: Int[np.ndarray, " n"]) -> None:
        """Count some lengths."""
        if not len(lengths):
            return
        logarithmic = _EXACT + np.floor(np.log(np.maximum(lengths, _EXACT) / _EXACT) / np.log(_RATIO)).astype(np.int64)
        buckets = np.where(lengths < _EXACT, lengths, logarithmic)
        self._counts += np.bincount(np.minimum(buckets, _BUCKETS - 1), minlength=_BUCKETS)
        self._largest = max(self._largest, int(lengths.max()))

    def quantiles(self) -> dict[str, int]:
        """The length at each level: the smallest bucket that this share of the lengths does not exceed."""
        total = int(self._counts.sum())
        if not total:
            return {}
        ranks = np.maximum(np.ceil(np.array(QUANTILES) * total), 1)
        buckets = np.searchsorted(np.cumsum(self._counts), ranks)
        lengths = np.where(buckets < _EXACT, buckets, np.round(_EXACT * _RATIO ** (buckets - _EXACT))).astype(np.int64)
        lengths[-1] = self._largest
        return {f"{level:g}": int(length) for level, length in zip(QUANTILES, lengths, strict=True)}


class StatisticsCounter:
    """Adds up chunks as they pass.

    Args:
        unknown_id: id of [UNK].
    """

    def __init__(self, unknown_id: int) -> None:
        self._unknown_id = unknown_id
        self._digests = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self._document_lengths, self._sentence_lengths = LengthHistogram(), LengthHistogram()
        self.documents = self.sentences = self.tokens = self.words = 0
        self.unknown = self.empty = self.characters = 0

    def __enter__(self) -> StatisticsCounter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._digests.close()

    def add(self, chunk: EncodedChunk) -> None:
        """Count one chunk."""
        block = chunk.block
        self.documents += block.num_documents
        self.sentences += len(block.sentence_lengths)
        self.tokens += len(block.tokens)
        self.words += int(block.word_starts.sum())
        self.unknown += int((block.tokens == self._unknown_id).sum())
        self.empty += chunk.empty_documents
        self.characters += chunk.characters
        self._document_lengths.add(block.document_lengths)
        self._sentence_lengths.add(block.sentence_lengths)
        self._digests.write(block.digests.tobytes())

    def finish(self, bytes_read: int) -> Statistics:
        """The sums."""
        return Statistics(
            documents=self.documents,
            sentences=self.sentences,
            tokens=self.tokens,
            words=self.words,
            unknown_tokens=self.unknown,
            unknown_fraction=self.unknown / max(self.tokens, 1),
            tokens_per_word=self.tokens / max(self.words, 1),
            duplicates=self._duplicates(),
            empty_documents=self.empty,
            characters=self.characters,
            bytes_read=bytes_read,
            document_lengths=self._document_lengths.quantiles(),
            sentence_lengths=self._sentence_lengths.quantiles(),
        )

    def _duplicates(self) -> int:
        """Documents whose digest occurred before: 16 bytes of memory a document, sorted in place."""
        self._digests.seek(0)
        digests = np.fromfile(self._digests, dtype=f"S{DIGEST_BYTES}")
        digests.sort()
        return int((digests[1:] == digests[:-1]).sum())
