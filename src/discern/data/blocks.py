"""Tokenised documents on their way from the worker processes to the shards, as flat arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, UInt

DIGEST_BYTES = 16
"""Length of a document's content digest: 128 bits, so that two different documents never share one in practice."""


@dataclass(frozen=True)
class TokenBlock:
    """Some documents after tokenisation. T tokens, S sentences, D documents; no sentence and no document is empty.

    Attributes:
        tokens: (T,) ids without special tokens, in the type that the shards store.
        word_starts: (T,) True where a word begins.
        sentence_lengths: (S,) tokens of each sentence.
        document_sentences: (D,) sentences of each document.
        digests: (D, 16) hash of each document's text.
    """

    tokens: UInt[np.ndarray, " T"]
    word_starts: Bool[np.ndarray, " T"]
    sentence_lengths: Int[np.ndarray, " S"]
    document_sentences: Int[np.ndarray, " D"]
    digests: UInt[np.ndarray, "D 16"]

    @property
    def num_documents(self) -> int:
        """Documents in the block."""
        return len(self.document_sentences)

    @property
    def document_lengths(self) -> Int[np.ndarray, " D"]:
        """Tokens of each document."""
        if not self.num_documents:
            return np.zeros(0, dtype=np.int64)
        firsts = np.cumsum(self.document_sentences) - self.document_sentences
        lengths: np.ndarray = np.add.reduceat(self.sentence_lengths, firsts)
        return lengths

    def select(self, chosen: Bool[np.ndarray, " D"]) -> TokenBlock:
        """The documents where `chosen` is True, in order."""
        if chosen.all():
            return self
        sentences = np.repeat(chosen, self.document_sentences)
        tokens = np.repeat(sentences, self.sentence_lengths)
        return TokenBlock(
            tokens=self.tokens[tokens],
            word_starts=self.word_starts[tokens],
            sentence_lengths=self.sentence_lengths[sentences],
            document_sentences=self.document_sentences[chosen],
            digests=self.digests[chosen],
        )

    def documents(self, start: int, stop: int) -> TokenBlock:
        """Documents `start` to `stop`."""
        chosen = np.zeros(self.num_documents, dtype=bool)
        chosen[start:stop] = True
        return self.select(chosen)
