"""Turns documents into a block of tokens. This is what each worker process runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from discern.data.blocks import DIGEST_BYTES, TokenBlock
from discern.data.tokenizer import naming_panics, prepared, special_ids, vocab_size
from discern.data.word_cache import WordCache
from discern.data.words import SegmenterName, Sentences, word_finder

Document = list[str]
"""The sentences of a document: stripped, none of them empty."""

BATCH_CHARACTERS = 1 << 18
"""The library's encodings take some 150 bytes a token, so they are made for a piece of the text at a time."""


@dataclass(frozen=True)
class EncodedChunk:
    """A block of tokens and what it took to make it."""

    block: TokenBlock
    characters: int
    empty_documents: int


class _Batch(NamedTuple):
    """What is kept of some sentences."""

    tokens: np.ndarray
    word_starts: np.ndarray
    lengths: np.ndarray


class Encoder:
    """A tokenizer with all that turns documents into ids, word starts and lengths.

    Args:
        tokenizer_json: the tokenizer, serialised.
        segmenter: where word boundaries come from; ids don't depend on it.
    """

    def __init__(self, tokenizer_json: str, segmenter: SegmenterName) -> None:
        self._tokenizer = prepared(Tokenizer.from_str(tokenizer_json), "the tokenizer")
        self._words = word_finder(self._tokenizer, segmenter)
        by_word = WordCache.applies(self._tokenizer) and not self._words.needs_encodings
        self._cache = WordCache(self._tokenizer) if by_word else None
        size = vocab_size(self._tokenizer)
        self._dtype = token_dtype(size)
        special = special_ids(self._tokenizer)
        # Unigram models spell a literal "[MASK]" with the piece of that name. No special token comes out of a text.
        self._written = np.arange(size, dtype=self._dtype)
        self._written[list(special.values())] = special["unk"]

    def encode(self, documents: Sequence[Document]) -> EncodedChunk:
        """The documents in order, those without a single token left out."""
        sentences = list(chain.from_iterable(documents))
        # The encodings of one batch are gone before the next is made.
        batches = [self._encode_batch(texts) for texts in _batches(sentences)]
        counts = np.array([len(document) for document in documents], dtype=np.int64)
        sentence_lengths = _joined([batch.lengths for batch in batches], np.dtype(np.int64))
        filled = sentence_lengths > 0
        owners = np.repeat(np.arange(len(documents)), counts)
        document_sentences = np.bincount(owners[filled], minlength=len(documents))
        kept = document_sentences > 0
        block = TokenBlock(
            tokens=_joined([batch.tokens for batch in batches], self._dtype),
            word_starts=_joined([batch.word_starts for batch in batches], np.dtype(bool)),
            sentence_lengths=sentence_lengths[filled],
            document_sentences=document_sentences[kept],
            digests=_digests(documents)[kept],
        )
        characters = sum(map(len, sentences))
        return EncodedChunk(block, characters, empty_documents=len(documents) - block.num_documents)

    def _encode_batch(self, texts: list[str]) -> _Batch:
        sentences = self._sentences(texts)
        return _Batch(self._written[sentences.ids], self._words.starts(sentences), sentences.lengths)

    def _sentences(self, texts: list[str]) -> Sentences:
        if self._cache is not None and (found := self._cache.encode(texts)) is not None:
            return Sentences(texts, np.array(found[0], dtype=self._dtype), found[1], None)
        # The fast variant leaves out offsets and words.
        encode = self._tokenizer.encode_batch if self._words.needs_encodings else self._tokenizer.encode_batch_fast
        with naming_panics("the tokenizer"):
            encodings = encode(texts, add_special_tokens=False)
        lengths = np.fromiter((len(e) for e in encodings), dtype=np.int64, count=len(encodings))
        ids = np.fromiter(chain.from_iterable(e.ids for e in encodings), dtype=self._dtype, count=int(lengths.sum()))
        return Sentences(texts, ids, lengths, encodings)


def encoding_service(tokenizer_json: str, segmenter: SegmenterName) -> Callable[[list[Document]], EncodedChunk]:
    """What a worker process does with each chunk of documents."""
    return Encoder(tokenizer_json, segmenter).encode


def token_dtype(size: int) -> np.dtype:
    """The type that holds the ids of a vocabulary of `size`: uint16 up to 65,535 entries, else uint32."""
    return np.dtype(np.uint16 if size <= 65535 else np.uint32)


def _joined(parts: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _digests(documents: Sequence[Document]) -> np.ndarray:
    raw = b"".join(hashlib.blake2b("\n".join(d).encode(), digest_size=DIGEST_BYTES).digest() for d in documents)
    return np.frombuffer(raw, dtype=np.uint8).reshape(len(documents), DIGEST_BYTES)


def _batches(sentences: Sequence[str]) -> Iterator[list[str]]:
    """Runs of sentences of about `BATCH_CHARACTERS` characters."""
    batch: list[str] = []
    size = 0
    for sentence in sentences:
        batch.append(sentence)
        size += len(sentence)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
