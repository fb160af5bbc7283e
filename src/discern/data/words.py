"""Where words begin, one bit a token, for any kind of tokenizer. The ids never change."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Literal, final

import numpy as np
from jaxtyping import Bool, Int, UInt
from tokenizers import Encoding, Tokenizer, models, pre_tokenizers

from discern.errors import ConfigError

SegmenterName = Literal["none", "jieba"]


class WordFinder(abc.ABC):
    """Finds the tokens that begin a word.

    Attributes:
        needs_offsets: whether the encodings must carry character offsets (`encode_batch`, not `encode_batch_fast`).
    """

    needs_offsets: bool = False

    @abc.abstractmethod
    def starts(self, texts: Sequence[str], encodings: Sequence[Encoding], ids: UInt[np.ndarray, " T"]) -> Bool[np.ndarray, " T"]:
        """True where a word begins; `ids` are those of all encodings in a row."""


@final
class TokenTable(WordFinder):
    """Tokenizers whose tokens tell by themselves: whether each begins a word, by id. A sentence begins one anyway."""

    def __init__(self, begins: Bool[np.ndarray, " V"]) -> None:
        self._begins = begins

    def starts(self, texts: Sequence[str], encodings: Sequence[Encoding], ids: UInt[np.ndarray, " T"]) -> Bool[np.ndarray, " T"]:
        starts: np.ndarray = self._begins[ids]
        starts[_first_tokens(encodings)] = True
        return starts


@final
class PreTokenizedWords(WordFinder):
    """Any tokenizer that first splits into words: a token begins one when its word differs from its neighbour's."""

    needs_offsets = True  # `encode_batch_fast` leaves out the words too

    def starts(self, texts: Sequence[str], encodings: Sequence[Encoding], ids: UInt[np.ndarray, " T"]) -> Bool[np.ndarray, " T"]:
        words = np.fromiter(chain.from_iterable(e.word_ids for e in encodings), dtype=np.int64, count=len(ids))
        begins = np.ones(len(ids), dtype=bool)
        begins[1:] = words[1:] != words[:-1]
        begins[_first_tokens(encodings)] = True
        return begins


@final
class TextBoundaries(WordFinder):
    """Boundaries that come from the text: the token whose first visible character stands at one begins a word.

    A boundary inside a token counts for nothing: ids are never changed to suit the words.
    """

    needs_offsets = True

    def __init__(self, segmenter: SegmenterName) -> None:
        self._jieba = load_jieba() if segmenter == "jieba" else None

    def starts(self, texts: Sequence[str], encodings: Sequence[Encoding], ids: UInt[np.ndarray, " T"]) -> Bool[np.ndarray, " T"]:
        parts = [self._one(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=bool)

    def _one(self, text: str, encoding: Encoding) -> Bool[np.ndarray, " n"]:
        spaces = np.fromiter((letter.isspace() for letter in text), dtype=bool, count=len(text))
        end = len(text)
        visible = np.append(np.where(spaces, end, np.arange(end)), end)
        next_visible = np.minimum.accumulate(visible[::-1])[::-1]
        boundary = np.zeros(end + 1, dtype=bool)
        boundary[self._boundaries(text)] = True
        # A token of spaces counts with the word behind it; of the tokens of one character (bytes), the first counts.
        first = next_visible[[start for start, _ in encoding.offsets]]
        begins: np.ndarray = boundary[first]
        begins[1:] &= first[1:] != first[:-1]
        begins[:1] = True
        return begins

    def _boundaries(self, text: str) -> list[int]:
        """Character offsets where words begin, spaces left out."""
        if self._jieba is None:
            return [match.start() for match in re.finditer(r"\S+", text)]
        starts, position = [], 0
        for word in self._jieba.cut(text):
            if not word.isspace():
                starts.append(position)
            position += len(word)
        return starts


def load_jieba() -> Any:
    """The segmenter for Chinese, its dictionary loaded.

    Raises:
        ConfigError: the extra `zh` is not installed.
    """
    try:
        import jieba
    except ImportError as problem:
        raise ConfigError("--segmenter jieba needs the package jieba", hint="pip install 'discern-nlp[zh]'") from problem
    jieba.setLogLevel("ERROR")
    jieba.initialize()
    return jieba


def word_finder(tokenizer: Tokenizer, segmenter: SegmenterName = "none") -> WordFinder:
    """What finds the words for this tokenizer.

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
    return PreTokenizedWords() if splitter is not None else TextBoundaries("none")


def _matching(tokenizer: Tokenizer, matches: Callable[[str], bool]) -> Bool[np.ndarray, " V"]:
    """(V,) True for the ids whose token matches."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    found = np.zeros(max(vocabulary.values()) + 1, dtype=bool)
    found[[number for token, number in vocabulary.items() if matches(token)]] = True
    return found


def _first_tokens(encodings: Sequence[Encoding]) -> Int[np.ndarray, " n"]:
    """Index of the first token of each encoding that has one."""
    lengths = np.fromiter((len(e) for e in encodings), dtype=np.int64, count=len(encodings))
    return (np.cumsum(lengths) - lengths)[lengths > 0]
