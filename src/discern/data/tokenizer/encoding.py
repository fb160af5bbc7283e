"""Turns documents into blocks of tokens; runs in the worker processes."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from jaxtyping import Bool, Int, UInt
from tokenizers import Encoding, Tokenizer, normalizers, pre_tokenizers

from discern.data.languages import SegmenterName
from discern.data.sources.documents import Document
from discern.data.tokenizer import SPECIAL_TOKENS, prepared, special_ids, vocab_size
from discern.data.tokenizer.tokens import causes_of_unknown, encode_texts
from discern.data.tokenizer.words import WordFinder
from discern.errors import DataError

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
        characters: (D,) number of characters of each document.
    """

    tokens: UInt[np.ndarray, " T"]
    word_starts: Bool[np.ndarray, " T"]
    sentence_lengths: Int[np.ndarray, " S"]
    document_sentences: Int[np.ndarray, " D"]
    digests: UInt[np.ndarray, "D 16"]
    characters: Int[np.ndarray, " D"]

    @property
    def num_documents(self) -> int:
        """Number of documents in the block."""
        return len(self.document_sentences)

    @property
    def document_lengths(self) -> Int[np.ndarray, " D"]:
        """Number of tokens of each document."""
        lengths: np.ndarray = np.diff(np.cumsum(self.sentence_lengths)[np.cumsum(self.document_sentences) - 1], prepend=0)
        return lengths

    def select(self, chosen: Bool[np.ndarray, " D"]) -> TokenBlock:
        """The documents where `chosen` is True, in order."""
        sentences = np.repeat(chosen, self.document_sentences)
        tokens = np.repeat(sentences, self.sentence_lengths)
        return TokenBlock(
            tokens=self.tokens[tokens],
            word_starts=self.word_starts[tokens],
            sentence_lengths=self.sentence_lengths[sentences],
            document_sentences=self.document_sentences[chosen],
            digests=self.digests[chosen],
            characters=self.characters[chosen],
        )

    def documents(self, start: int, stop: int) -> TokenBlock:
        """Documents `start` to `stop`."""
        places = np.arange(self.num_documents)
        return self.select((start <= places) & (places < stop))


_CAPACITY = 1 << 17
_MISSES_WORTH_IT = 0.5
# Characters that are punctuation for BERT in every version of Unicode: those of ASCII, and frequent European and Chinese ones.
_PUNCTUATION = r"!-/:-@\[-`{-~«»·–—‘’“”…、。〈〉《》「」『』【】！（），：；？"
_IDEOGRAPHS = "\u3400-\u4dbf\u4e00-\u9fff"
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class WordCache:
    """Encodes with BERT's WordPiece, each word once: faster than the library for most languages, with the same ids.

    BERT's normalizer considers one character at a time, with its marks, and words end at ASCII spaces, punctuation and
    ideographs at the latest. The pieces between those can therefore be encoded separately and cached. ASCII control
    characters, which the normalizer removes, are removed before, since that joins the text around them.

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
            isinstance(tokenizer.normalizer, normalizers.BertNormalizer)
            and isinstance(tokenizer.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
            and added <= set(SPECIAL_TOKENS.values())
        )

    def encode(self, sentences: Sequence[str]) -> tuple[list[int], Int[np.ndarray, " S"]] | None:
        """The ids of all sentences and the length of each. None if most pieces are new, as in Thai: the library is faster."""
        pieces = [self._pieces.findall(_CONTROLS.sub("", sentence)) for sentence in sentences]
        new = list(set(chain.from_iterable(pieces)) - self._ids.keys())
        if sum(map(len, new)) > _MISSES_WORTH_IT * sum(map(len, sentences)):
            return None
        if len(self._ids) + len(new) > _CAPACITY:
            self._ids = {}
            new = list(set(chain.from_iterable(pieces)))
        encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        self._ids.update(zip(new, (encoding.ids for encoding in encodings), strict=True))
        find = self._ids.__getitem__
        flat: list[int] = []
        ends = []
        for sentence in pieces:
            flat += chain.from_iterable(map(find, sentence))
            ends.append(len(flat))
        return flat, np.diff(np.array(ends, dtype=np.int64), prepend=0)


BATCH_SENTENCES = 2048
"""Sentences per batch. An encoding of the library takes about 150 bytes per token, so long documents are encoded in batches."""
_EXAMINED = 40  # sentences with unknown tokens, per batch


class DocumentEncoder:
    """Turns documents into ids, word starts and lengths.

    Args:
        tokenizer_json: the serialized tokenizer.
        segmenter: source of word boundaries; ids do not depend on it.
    """

    def __init__(self, tokenizer_json: str, segmenter: SegmenterName) -> None:
        self._tokenizer = prepared(Tokenizer.from_str(tokenizer_json), "the tokenizer")
        self._words = WordFinder(self._tokenizer, segmenter)
        by_word = WordCache.applies(self._tokenizer) and not self._words.needs_encodings
        self._cache = WordCache(self._tokenizer) if by_word else None
        self._special = special_ids(self._tokenizer)
        size = vocab_size(self._tokenizer)
        self._dtype = token_dtype(size)
        # A data set must not hold special tokens, even if a vocabulary builds one where nobody expects it.
        self._written = np.arange(size, dtype=self._dtype)
        self._written[list(self._special.values())] = self._special["unk"]

    def encode(self, documents: Sequence[Document]) -> tuple[TokenBlock, Bool[np.ndarray, " N"], Counter[str]]:
        """The documents in order, without those that have no tokens.

        Args:
            documents: texts, or arrays of token ids; not both.

        Returns:
            The tokens; for each of the N documents, whether it has any; and the number of unknown tokens by cause, in a sample.

        Raises:
            DataError: a token id is not in the vocabulary.
        """
        if documents and isinstance(documents[0], np.ndarray):
            return *self._take([np.asarray(ids) for ids in documents]), Counter()
        unknown = Counter[str]()
        texts = list(chain.from_iterable(documents))
        # The encodings of a batch are freed before the next batch is encoded.
        firsts = range(0, max(1, len(texts)), BATCH_SENTENCES)
        batches = [self._encode_batch(texts[first : first + BATCH_SENTENCES], unknown) for first in firsts]
        tokens, word_starts, lengths = (np.concatenate(column) for column in zip(*batches, strict=True))
        filled = lengths > 0
        owners = np.repeat(np.arange(len(documents)), np.array([len(document) for document in documents], dtype=np.int64))
        document_sentences = np.bincount(owners[filled], minlength=len(documents))
        kept = document_sentences > 0
        characters = np.array([sum(map(len, document)) for document in documents], dtype=np.int64)
        digests = _digests("\n".join(document).encode() for document in documents)
        block = TokenBlock(tokens, word_starts, lengths[filled], document_sentences[kept], digests[kept], characters[kept])
        return block, kept, unknown

    def _encode_batch(self, texts: list[str], unknown: Counter[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, word starts and the length of each sentence. Causes of unknown tokens are counted."""
        encodings: list[Encoding] = []
        if self._cache is not None and (found := self._cache.encode(texts)) is not None:
            ids, lengths = np.array(found[0], dtype=self._dtype), found[1]
        else:
            encodings = encode_texts(self._tokenizer, texts, ids_only=not self._words.needs_encodings)
            lengths = np.fromiter(map(len, encodings), dtype=np.int64, count=len(encodings))
            ids = np.fromiter(chain.from_iterable(e.ids for e in encodings), dtype=self._dtype, count=int(lengths.sum()))
        # The first sentences with unknown tokens are encoded again, with offsets, to tell why.
        rows = np.repeat(np.arange(len(texts)), lengths)[ids == self._special["unk"]]
        examined = [texts[row] for row in np.unique(rows)[:_EXAMINED]]
        unknown += causes_of_unknown(self._tokenizer, examined)
        return self._written[ids], self._words.starts(ids, lengths, texts, encodings), lengths

    def _take(self, documents: Sequence[np.ndarray]) -> tuple[TokenBlock, Bool[np.ndarray, " N"]]:
        """Documents of token ids, each one sentence; and for each of the N arrays, whether it has any.

        They end at [SEP] and at the end-of-document token, too; [CLS] and padding are left out. Where words are found in the
        text only, every token counts as a word.
        """
        ends = [self._special[role] for role in ("sep", "eod") if role in self._special]
        left_out = [*ends, self._special["cls"], self._special["pad"]]
        found: list[np.ndarray] = []
        kept = []
        for ids in documents:
            if len(wrong := ids[(ids < 0) | (ids >= len(self._written))]):
                raise DataError(
                    f"token id {wrong[0]} is beyond the vocabulary, which has {len(self._written):,} entries",
                    hint="give the tokenizer that the ids were made with: --tokenizer PATH",
                )
            parts = np.split(ids, np.flatnonzero(np.isin(ids, ends)))
            filled = [tokens for part in parts if len(tokens := part[~np.isin(part, left_out)])]
            kept.append(len(filled) > 0)
            found += [self._written[tokens] for tokens in filled]
        tokens = np.concatenate([self._written[:0], *found])
        lengths = np.array(list(map(len, found)), dtype=np.int64)
        starts = np.ones(len(tokens), dtype=bool) if self._words.needs_encodings else self._words.starts(tokens, lengths)
        digests, ones = _digests(part.tobytes() for part in found), np.ones_like(lengths)
        return TokenBlock(tokens, starts, lengths, ones, digests, 0 * ones), np.array(kept)


def token_dtype(size: int) -> np.dtype:
    """The type of the ids of a vocabulary of `size` entries: uint16 up to 65,535, otherwise uint32."""
    return np.dtype(np.uint16 if size <= 65535 else np.uint32)


def _digests(contents: Iterable[bytes]) -> np.ndarray:
    raw = b"".join(hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest() for content in contents)
    return np.frombuffer(raw, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
