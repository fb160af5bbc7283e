"""Turns documents into blocks of tokens; runs in the worker processes."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int, UInt
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from discern.data.curation.filters import Rules
from discern.data.sources.documents import Document
from discern.data.tokenizer import SPECIAL_TOKENS, naming_panics, prepared, special_ids, vocab_size
from discern.data.tokenizer.tokens import causes_of_unknown, encode_texts
from discern.data.tokenizer.words import SegmenterName, Sentences, word_finder

DIGEST_BYTES = 16
"""Length of the digest of a document's content. With 128 bits, collisions do not occur in practice."""


@dataclass(frozen=True)
class TokenBlock:
    """Tokenized documents: T tokens, S sentences, D documents. No sentence and no document is empty.

    Attributes:
        tokens: (T,) ids without special tokens, in the type of the shards.
        word_starts: (T,) True where a word begins.
        sentence_lengths: (S,) number of tokens of each sentence.
        document_sentences: (D,) number of sentences of each document.
        digests: (D, 16) hash of each document's text.
    """

    tokens: UInt[np.ndarray, " T"]
    word_starts: Bool[np.ndarray, " T"]
    sentence_lengths: Int[np.ndarray, " S"]
    document_sentences: Int[np.ndarray, " D"]
    digests: UInt[np.ndarray, "D 16"]

    @property
    def num_documents(self) -> int:
        """Number of documents in the block."""
        return len(self.document_sentences)

    @property
    def document_lengths(self) -> Int[np.ndarray, " D"]:
        """Number of tokens of each document."""
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


_CAPACITY = 1 << 17
_MISSES_WORTH_IT = 0.5
# Characters that are punctuation for BERT in every version of Unicode: those of ASCII, and frequent European and Chinese ones.
_PUNCTUATION = r"!-/:-@\[-`{-~«»·–—‘’“”…、。〈〉《》「」『』【】！（），：；？"
_IDEOGRAPHS = "\u3400-\u4dbf\u4e00-\u9fff"
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class WordCache:
    """Encodes with BERT's WordPiece, each word once: faster than the library for most languages, with the same ids.

    BERT's normalizer considers one character at a time, with its marks, and words end at ASCII spaces, punctuation and
    ideographs at the latest. The pieces between those can therefore be encoded separately and cached. (ASCII control
    characters are removed, which joins the text around them: a sentence that contains any is encoded as a whole.)

    Args:
        tokenizer: a tokenizer for which `applies` is true.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}
        apart = _PUNCTUATION + (_IDEOGRAPHS if tokenizer.normalizer.handle_chinese_chars else "")
        self._pieces = re.compile(rf"[^ \t\r\n{apart}]+|[{apart}]")

    @staticmethod
    def applies(tokenizer: Tokenizer) -> bool:
        """Whether this is BERT's tokenizer, with no added tokens except for the special ones."""
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        return (
            isinstance(tokenizer.model, models.WordPiece)
            and isinstance(tokenizer.normalizer, normalizers.BertNormalizer)
            and isinstance(tokenizer.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
            and added <= set(SPECIAL_TOKENS.values())
            and tokenizer.encode_special_tokens
        )

    def encode(self, sentences: Sequence[str]) -> tuple[list[int], Int[np.ndarray, " S"]] | None:
        """The ids of all sentences and the length of each. None if most pieces are new, as in Thai: the library is faster."""
        whole = {sentence for sentence in sentences if _CONTROLS.search(sentence)}
        pieces = [[sentence] if sentence in whole else self._pieces.findall(sentence) for sentence in sentences]
        new = list(set(chain.from_iterable(pieces)) - self._ids.keys())
        if sum(map(len, new)) > _MISSES_WORTH_IT * sum(map(len, sentences)):
            return None
        if len(self._ids) + len(new) > _CAPACITY:
            self._ids = {}
            new = list(set(chain.from_iterable(pieces)))
        with naming_panics("the tokenizer"):
            encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        self._ids.update(zip(new, (encoding.ids for encoding in encodings), strict=True))
        find = self._ids.__getitem__
        flat: list[int] = []
        ends = []
        for sentence in pieces:
            flat += chain.from_iterable(map(find, sentence))
            ends.append(len(flat))
        for text in whole:  # not worth remembering
            del self._ids[text]
        return flat, np.diff(np.array(ends, dtype=np.int64), prepend=0)


BATCH_CHARACTERS = 1 << 18
"""Characters per batch. An encoding of the library takes about 150 bytes per token, so text is encoded in batches."""
_EXAMINED = 20  # sentences with unknown tokens, per batch


@dataclass(frozen=True)
class EncodedChunk:
    """A block of tokens, and what is known of the documents that it was made from.

    Attributes:
        block: the documents that have tokens.
        characters: number of characters of all documents.
        kept: for each document, whether it has tokens.
        unknown: number of unknown tokens by cause, in a sample of the sentences.
        filtered: number of documents that filters left out before, by filter and reason.
    """

    block: TokenBlock
    characters: int
    kept: Bool[np.ndarray, " N"]
    unknown: Counter[str]
    filtered: Counter[str] = field(default_factory=Counter)


class _Batch(NamedTuple):
    """Arrays of the tokens of some sentences."""

    tokens: np.ndarray
    word_starts: np.ndarray
    lengths: np.ndarray
    unknown: Counter[str]


class DocumentEncoder:
    """Turns documents into ids, word starts and lengths.

    Args:
        tokenizer_json: the serialized tokenizer.
        segmenter: source of word boundaries; ids do not depend on it.
    """

    def __init__(self, tokenizer_json: str, segmenter: SegmenterName) -> None:
        self._tokenizer = prepared(Tokenizer.from_str(tokenizer_json), "the tokenizer")
        self._words = word_finder(self._tokenizer, segmenter)
        by_word = WordCache.applies(self._tokenizer) and not self._words.needs_encodings
        self._cache = WordCache(self._tokenizer) if by_word else None
        size = vocab_size(self._tokenizer)
        self._dtype = token_dtype(size)
        # A data set must not hold special tokens, even if a vocabulary builds one where nobody expects it.
        special = special_ids(self._tokenizer)
        self._written = np.arange(size, dtype=self._dtype)
        self._written[list(special.values())] = self._unknown = special["unk"]

    def encode(self, documents: Sequence[Document]) -> EncodedChunk:
        """The documents in order, without those that have no tokens."""
        sentences = list(chain.from_iterable(documents))
        # The encodings of a batch are freed before the next batch is encoded.
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
        unknown = sum((batch.unknown for batch in batches), Counter[str]())
        return EncodedChunk(block, characters, kept, unknown)

    def _encode_batch(self, texts: list[str]) -> _Batch:
        sentences = self._sentences(texts)
        # The first sentences with unknown tokens are encoded again, with offsets, to tell why.
        rows = np.repeat(np.arange(len(texts)), sentences.lengths)[sentences.ids == self._unknown]
        examined = [texts[row] for row in np.unique(rows)[:_EXAMINED]]
        causes = causes_of_unknown(self._tokenizer, examined, encode_texts(self._tokenizer, examined))
        return _Batch(self._written[sentences.ids], self._words.starts(sentences), sentences.lengths, causes)

    def _sentences(self, texts: list[str]) -> Sentences:
        if self._cache is not None and (found := self._cache.encode(texts)) is not None:
            return Sentences(texts, np.array(found[0], dtype=self._dtype), found[1], None)
        encodings = encode_texts(self._tokenizer, texts, ids_only=not self._words.needs_encodings)
        lengths = np.fromiter((len(e) for e in encodings), dtype=np.int64, count=len(encodings))
        ids = np.fromiter(chain.from_iterable(e.ids for e in encodings), dtype=self._dtype, count=int(lengths.sum()))
        return Sentences(texts, ids, lengths, encodings)


def encoding_service(
    tokenizer_json: str, segmenter: SegmenterName, filters: Sequence[str] = ()
) -> Callable[[list[Document]], EncodedChunk]:
    """The service of a worker process that encodes chunks of documents, without those that filters leave out."""
    encoder, rules = DocumentEncoder(tokenizer_json, segmenter), Rules(filters)

    def encode(documents: list[Document]) -> EncodedChunk:
        left, dropped = rules.apply(documents)
        return replace(encoder.encode(left), filtered=dropped)

    return encode


def token_dtype(size: int) -> np.dtype:
    """The type of the ids of a vocabulary of `size` entries: uint16 up to 65,535, otherwise uint32."""
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
