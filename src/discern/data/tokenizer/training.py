"""Trains tokenizers on a bounded sample of the text. The same text gives the same tokenizer, byte for byte."""

from __future__ import annotations

import heapq
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from discern.data.tokenizer import END_OF_DOCUMENT, SPECIAL_TOKENS, bert_wordpiece, frame, prepared, vocab_size
from discern.errors import ConfigError, DataError

TokenizerKind = Literal["wordpiece", "bpe", "unigram"]

# Memory that the sample may take. Unigram's trainer takes some two minutes over 10 MB of English on two cores.
SAMPLE_BYTES: dict[TokenizerKind, int] = {"wordpiece": 128 << 20, "bpe": 128 << 20, "unigram": 16 << 20}
_ENTRY_BYTES = 150  # per sentence of the sample, besides its text
_SPECIALS = list(SPECIAL_TOKENS.values())
_PREFIX = "##"


class SentenceSample:
    """A uniform sample of the sentences of a stream, bounded in memory.

    Args:
        seed: seed of the sample; the same seed and stream give the same sample.
        limit: bytes of memory that the sentences may take.
    """

    def __init__(self, seed: int, limit: int) -> None:
        self._random = random.Random(seed)
        self._limit = limit
        self._heap: list[tuple[float, int, str]] = []  # largest draw first, as its negative
        self._bytes = 0
        self._bound = 1.0
        self._seen = 0

    def add(self, sentences: Iterable[str]) -> None:
        """Offer sentences to the sample. Each draws a random number, and those with the smallest are kept."""
        for sentence in sentences:
            draw = self._random.random()
            self._seen += 1
            if draw >= self._bound:
                continue
            heapq.heappush(self._heap, (-draw, self._seen, sentence))
            self._bytes += _size(sentence)
            while self._bytes > self._limit and len(self._heap) > 1:
                dropped, _, text = heapq.heappop(self._heap)
                self._bytes -= _size(text)
                self._bound = -dropped

    def sentences(self) -> list[str]:
        """The sample, in the order of the stream."""
        return [sentence for _, _, sentence in sorted(self._heap, key=lambda entry: entry[1])]


def train_tokenizer(kind: TokenizerKind, size: int, lowercase: bool, texts: Sequence[str]) -> Tokenizer:
    """A tokenizer with `size` entries, or fewer if the text does not yield as many.

    Args:
        kind: WordPiece as in BERT, byte-level BPE, or Unigram as in SentencePiece.
        size: number of entries, including the special tokens.
        lowercase: whether to lower-case text (and, for WordPiece, to remove accents, as in BERT).
        texts: sentences to train on.

    Raises:
        ConfigError: `size` is too small for this kind.
        DataError: there is no text.
    """
    check_vocab_size(kind, size)
    if not texts:
        raise DataError("there is no text to train a tokenizer on", hint="check the input with: discern prepare INPUT --check")
    train = {"wordpiece": _wordpiece, "bpe": _bpe, "unigram": _unigram}[kind]
    tokenizer = prepared(train(size, lowercase, texts), f"the trained {kind} tokenizer")
    assert vocab_size(tokenizer) <= size
    return tokenizer


def training_service(kind: TokenizerKind, size: int, lowercase: bool) -> Callable[[Sequence[str]], str]:
    """The service of a worker process that trains a tokenizer: unlike the library, a process can be interrupted."""
    return lambda texts: train_tokenizer(kind, size, lowercase, texts).to_str()


def check_vocab_size(kind: TokenizerKind, size: int) -> None:
    """Check that a vocabulary can hold the special tokens and the smallest alphabet.

    Raises:
        ConfigError: the vocabulary is too small.
    """
    least = len(_SPECIALS) + {"wordpiece": 27, "bpe": 256, "unigram": 28}[kind]
    if size < least:
        raise ConfigError(
            f"a {kind} vocabulary needs at least {least} entries, not {size}",
            hint="8000 is usual for a small corpus: --vocab-size 8000",
        )


def _wordpiece(size: int, lowercase: bool, texts: Sequence[str]) -> Tokenizer:
    """BERT's WordPiece.

    The library numbers the continuations of the alphabet ("##a") in the order of a hash table and breaks ties between merges
    by those numbers. To be reproducible, a first pass finds the continuations, and the second gets them sorted, as special
    tokens.
    """
    tokenizer = bert_wordpiece({"[UNK]": 0}, lowercase)
    alphabet = _alphabet(tokenizer, texts, limit=(size - len(_SPECIALS)) // 2).characters

    def learn(entries: int, specials: list[str]) -> dict[str, int]:
        trainer = trainers.WordPieceTrainer(
            vocab_size=entries,
            special_tokens=specials,
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            continuing_subword_prefix=_PREFIX,
            show_progress=False,
        )
        learner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        learner.normalizer, learner.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
        learner.train_from_iterator(texts, trainer)
        return learner.get_vocab()

    continuations = sorted(token for token in learn(0, _SPECIALS) if token.startswith(_PREFIX))
    return bert_wordpiece(learn(size, _SPECIALS + continuations), lowercase)


def _bpe(size: int, lowercase: bool, texts: Sequence[str]) -> Tokenizer:
    """Byte-level BPE: any text can be encoded, and decoding restores it. The ids of a word do not depend on its position."""
    tokenizer = Tokenizer(models.BPE())
    if lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    # Remove the space that was added before the first word.
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=_SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), frame(tokenizer)])
    return tokenizer


def _unigram(size: int, lowercase: bool, texts: Sequence[str]) -> Tokenizer:
    """Unigram with spaces as in SentencePiece and the end-of-document token of XLNet.

    Differs: the special tokens are [CLS], [SEP], ..., as in every tokenizer trained here, not <cls>, <sep>, ... as in XLNet.
    """
    specials = [*_SPECIALS, END_OF_DOCUMENT]
    tokenizer = Tokenizer(models.Unigram())
    normalizer = [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")]
    tokenizer.normalizer = normalizers.Sequence([*normalizer, normalizers.Lowercase()] if lowercase else normalizer)
    # Without spaces between words, the sample need not contain the piece that begins every text.
    trainer = trainers.UnigramTrainer(
        vocab_size=size, special_tokens=specials, unk_token="[UNK]", initial_alphabet=["▁"], show_progress=False
    )
    alphabet = _alphabet(tokenizer, texts, limit=(size - len(specials)) // 2)
    # As in SentencePiece, no piece mixes scripts, or letters with punctuation. Shorter words also train faster.
    scripts, spaces = pre_tokenizers.UnicodeScripts(), pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([scripts, spaces])
    tokenizer.train_from_iterator((f" {text.translate(alphabet.others)}" for text in texts), trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    pieces: list[list[Any]] = json.loads(tokenizer.to_str())["model"]["vocab"]
    scores = _reproducible({piece: score for piece, score in pieces if piece not in specials})
    tokenizer.model = models.Unigram([(token, 0.0) for token in specials] + scores, unk_id=1, byte_fallback=False)
    return tokenizer


def _reproducible(scores: dict[str, float]) -> list[tuple[str, float]]:
    """The pieces of a Unigram model, best first, without what differs between runs of the library.

    The library adds floating-point numbers in the order of a hash table, so scores are rounded. Characters too rare to be
    pieces of their own get the lowest score, raised by 0.0001 each in that order, so these scores are assigned again.
    """
    characters = sorted(piece for piece in scores if len(piece) == 1)
    highest = min(scores.values()) + 0.0001 * (len(characters) + 1)
    rare = [piece for piece in characters if scores[piece] < highest]
    dealt = zip(rare, sorted(scores[piece] for piece in rare), strict=True)
    rounded = {piece: round(score, 4) for piece, score in (scores | dict(dealt)).items()}
    return sorted(rounded.items(), key=lambda entry: (-entry[1], entry[0]))


@dataclass(frozen=True)
class _Alphabet:
    """The most frequent characters after normalization, sorted, and a translation table from all others to a space."""

    characters: list[str]
    others: dict[int, str]


def _alphabet(tokenizer: Tokenizer, texts: Iterable[str], limit: int) -> _Alphabet:
    """The `limit` most frequent characters; of equally frequent ones, the first in Unicode order."""
    raw: Counter[str] = Counter()
    for text in texts:
        raw.update(text)
    normal = {character: set(tokenizer.normalizer.normalize_str(character)) for character in raw}
    counts: Counter[str] = Counter()
    for character, count in raw.items():
        counts.update({letter: count for letter in normal[character] if not letter.isspace()})
    kept = set(sorted(counts, key=lambda letter: (-counts[letter], letter))[:limit])
    others = {ord(character): " " for character in raw if not normal[character] <= kept}
    return _Alphabet(sorted(kept), others)


def _size(sentence: str) -> int:
    return sys.getsizeof(sentence) + _ENTRY_BYTES
