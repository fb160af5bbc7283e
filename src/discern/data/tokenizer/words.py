"""Finds the tokens that begin a word, for any kind of tokenizer. The ids do not depend on it."""

from __future__ import annotations

import abc
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from typing import Any, Literal, final

import numpy as np
from jaxtyping import Bool, Int, UInt
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers

from discern.errors import ConfigError

SegmenterName = Literal["none", "jieba"]
_TWO_WORDS = "a b"
UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]")
"""Chinese and Japanese characters, and those of scripts of Southeast Asia: text without spaces between words."""


@dataclass(frozen=True)
class Sentences:
    """Some sentences and their tokens.

    Attributes:
        texts: the sentences.
        ids: (T,) ids of all sentences, one after the other.
        lengths: (S,) number of tokens of each sentence.
        encodings: encoding of each sentence by the library; None if it was not used.
    """

    texts: Sequence[str]
    ids: UInt[np.ndarray, " T"]
    lengths: Int[np.ndarray, " S"]
    encodings: Sequence[Encoding] | None

    @property
    def first_tokens(self) -> Int[np.ndarray, " n"]:
        """Index of the first token of each non-empty sentence."""
        first: np.ndarray = (np.cumsum(self.lengths) - self.lengths)[self.lengths > 0]
        return first


class WordFinder(abc.ABC):
    """Finds the tokens that begin a word.

    Attributes:
        needs_encodings: whether it needs the encodings of the library, with offsets and words, besides the ids.
    """

    needs_encodings: bool = False

    @abc.abstractmethod
    def starts(self, sentences: Sentences) -> Bool[np.ndarray, " T"]:
        """True where a word begins."""


@final
class TokenTable(WordFinder):
    """For tokenizers whose tokens show whether they begin a word: a table by id. The first token of a sentence always does."""

    def __init__(self, begins: Bool[np.ndarray, " V"]) -> None:
        self._begins = begins

    def starts(self, sentences: Sentences) -> Bool[np.ndarray, " T"]:
        starts: np.ndarray = self._begins[sentences.ids]
        starts[sentences.first_tokens] = True
        return starts


@final
class CharacterClasses(WordFinder):
    """For byte-level tokenizers: a word begins at a space, and where letters, digits and other characters meet.

    Words are split as in GPT-2, except that contractions are split at the apostrophe and combining marks stay with their
    letters. Only ids are needed. Bytes that are part of a character count as letters.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._first, self._last = np.zeros((2, max(vocabulary.values()) + 1), dtype=np.uint8)
        decoder = decoders.ByteLevel()
        for token, number in vocabulary.items():
            text = decoder.decode([token])
            self._first[number], self._last[number] = ord(_character_class(text[:1])), ord(_character_class(text[-1:]))

    def starts(self, sentences: Sentences) -> Bool[np.ndarray, " T"]:
        first, last = self._first[sentences.ids], self._last[sentences.ids]
        begins: np.ndarray = first == ord("Z")
        begins[1:] |= (first[1:] != last[:-1]) & (last[:-1] != ord("Z"))  # a single space belongs to the word that follows
        begins[sentences.first_tokens] = True
        return begins


@final
class PreTokenizedWords(WordFinder):
    """For any tokenizer that first splits text into words: a token begins a word if the previous token belongs to another one."""

    needs_encodings = True

    def starts(self, sentences: Sentences) -> Bool[np.ndarray, " T"]:
        assert sentences.encodings is not None
        words = np.fromiter(chain.from_iterable(e.word_ids for e in sentences.encodings), np.int64, count=len(sentences.ids))
        begins = np.ones(len(words), dtype=bool)
        begins[1:] = words[1:] != words[:-1]
        begins[sentences.first_tokens] = True
        return begins


@final
class TextBoundaries(WordFinder):
    """Word boundaries in the text: a token begins a word if its first visible character is at a boundary.

    A boundary inside a token is ignored, because ids do not depend on words.
    """

    needs_encodings = True

    def __init__(self, segmenter: SegmenterName) -> None:
        self._jieba = load_jieba() if segmenter == "jieba" else None

    def starts(self, sentences: Sentences) -> Bool[np.ndarray, " T"]:
        assert sentences.encodings is not None
        parts = [self._one(text, encoding) for text, encoding in zip(sentences.texts, sentences.encodings, strict=True)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=bool)

    def _one(self, text: str, encoding: Encoding) -> Bool[np.ndarray, " n"]:
        spaces = np.fromiter((letter.isspace() for letter in text), dtype=bool, count=len(text))
        end = len(text)
        visible = np.append(np.where(spaces, end, np.arange(end)), end)
        next_visible = np.minimum.accumulate(visible[::-1])[::-1]
        boundary = np.zeros(end + 1, dtype=bool)
        boundary[self._boundaries(text)] = True
        # A token of spaces belongs to the next word. Of several tokens of one character (bytes), the first one counts.
        first = next_visible[[start for start, _ in encoding.offsets]]
        begins: np.ndarray = boundary[first]
        begins[1:] &= first[1:] != first[:-1]
        begins[:1] = True
        return begins

    def _boundaries(self, text: str) -> list[int]:
        """Character offsets where words begin, without spaces."""
        if self._jieba is None:
            return [match.start() for match in re.finditer(r"\S+", text)]
        starts, position = [], 0
        for word in self._jieba.cut(text):
            if not word.isspace():
                starts.append(position)
            position += len(word)
        return starts


def check_segmenter(segmenter: SegmenterName) -> None:
    """Check that a segmenter is installed, without loading it.

    Raises:
        ConfigError: the extra `zh` is not installed.
    """
    if segmenter == "jieba" and find_spec("jieba") is None:
        raise ConfigError(
            "--segmenter jieba needs the package jieba, which is not installed", hint="pip install 'discern-nlp[zh]'"
        )


def load_jieba() -> Any:
    """The segmenter for Chinese, with its dictionary loaded.

    Raises:
        ConfigError: the extra `zh` is not installed.
    """
    check_segmenter("jieba")
    import jieba

    jieba.setLogLevel("ERROR")
    jieba.initialize()
    return jieba


def word_finder(tokenizer: Tokenizer, segmenter: SegmenterName = "none") -> WordFinder:
    """The word finder for a tokenizer.

    Raises:
        ConfigError: the segmenter is not installed.
    """
    if segmenter != "none":
        return TextBoundaries(segmenter)
    model, splitter = tokenizer.model, tokenizer.pre_tokenizer
    if isinstance(model, models.WordPiece):
        prefix = model.continuing_subword_prefix
        return TokenTable(~_matching(tokenizer, lambda token: token.startswith(prefix) and token != prefix))
    if isinstance(splitter, pre_tokenizers.Metaspace) and splitter.split:
        mark = splitter.replacement
        return TokenTable(_matching(tokenizer, lambda token: token.startswith(mark)))
    if isinstance(splitter, pre_tokenizers.ByteLevel):
        return CharacterClasses(tokenizer)
    return PreTokenizedWords() if _separates_words(tokenizer) else TextBoundaries("none")


def _separates_words(tokenizer: Tokenizer) -> bool:
    """Whether the pre-tokenizer separates words. Gemma's does not: its normalizer leaves no space to separate them at."""
    text = tokenizer.normalizer.normalize_str(_TWO_WORDS) if tokenizer.normalizer else _TWO_WORDS
    splitter = tokenizer.pre_tokenizer
    return splitter is not None and len(splitter.pre_tokenize_str(text)) > 1


def keeps_spaces(tokenizer: Tokenizer) -> bool:
    """Whether the tokens of a word within a text include the space before it, unlike those of the same word alone."""
    alone, within = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("a", " a"))
    return bool(alone != within)


def _matching(tokenizer: Tokenizer, matches: Callable[[str], bool]) -> Bool[np.ndarray, " V"]:
    """(V,) True for ids of matching tokens."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    found = np.zeros(max(vocabulary.values()) + 1, dtype=bool)
    found[[number for token, number in vocabulary.items() if matches(token)]] = True
    return found


def _character_class(character: str) -> str:
    """Class of a character: L letter (including marks and parts of characters), N number, Z space, P anything else."""
    if character.isspace():
        return "Z"
    category = unicodedata.category(character)[0] if character else "P"
    return "L" if category == "M" or character == "\ufffd" else category if category in "LN" else "P"
