"""Finds the tokens that begin a word, for any kind of tokenizer. The ids do not depend on it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, chain
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int, UInt
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers

from discern.data.languages import SEGMENTERS
from discern.data.tokenizer.loading import normalized, vocab_size
from discern.errors import ConfigError

WordStarts = Callable[[str], Iterable[int]]
SegmenterName = Literal["none", "jieba", "fugashi", "kiwipiepy", "pythainlp"]
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


@dataclass(frozen=True)
class WordFinder:
    """Finds the tokens that begin a word. The first token of a sentence always does.

    Attributes:
        begins: (T,) True where a word begins within a sentence.
        needs_encodings: whether it needs the encodings of the library, with offsets and words, besides the ids.
    """

    begins: Callable[[Sentences], np.ndarray]
    needs_encodings: bool = False

    def starts(self, sentences: Sentences) -> Bool[np.ndarray, " T"]:
        """True where a word begins."""
        starts: np.ndarray = self.begins(sentences)
        starts[(np.cumsum(sentences.lengths) - sentences.lengths)[sentences.lengths > 0]] = True
        return starts


def word_finder(tokenizer: Tokenizer, segmenter: SegmenterName = "none") -> WordFinder:
    """The word finder for a tokenizer."""
    if segmenter != "none":
        return _in_text(_LOADERS[segmenter]())
    model, splitter = tokenizer.model, tokenizer.pre_tokenizer
    tokens = [tokenizer.id_to_token(number) or "" for number in range(vocab_size(tokenizer))]
    if isinstance(model, models.WordPiece):
        return _by_table(not token.startswith(model.continuing_subword_prefix) for token in tokens)
    if isinstance(splitter, pre_tokenizers.Metaspace) and splitter.split:
        return _by_table(token.startswith(splitter.replacement) for token in tokens)
    if isinstance(splitter, pre_tokenizers.ByteLevel):
        return _by_characters(tokens)
    # Gemma's pre-tokenizer does not separate words: its normalizer leaves no space to separate them at.
    if splitter is not None and len(splitter.pre_tokenize_str(normalized(tokenizer, "a b"))) > 1:
        return WordFinder(_by_pre_tokens, needs_encodings=True)
    return _in_text(lambda text: (match.start() for match in re.finditer(r"\S+", text)))


def _by_table(begins: Iterable[bool]) -> WordFinder:
    """For tokenizers whose tokens show whether they begin a word."""
    table: np.ndarray = np.array(list(begins))
    return WordFinder(lambda sentences: table[sentences.ids])


def _by_characters(tokens: Sequence[str]) -> WordFinder:
    """For byte-level tokenizers: a word begins at a space, and where letters, digits and other characters meet.

    Words are split as in GPT-2, except that contractions are split at the apostrophe and combining marks stay with their
    letters. Only ids are needed. Bytes that are part of a character count as letters.
    """
    texts = [decoders.ByteLevel().decode([token]) for token in tokens]
    first = np.array([ord(_character_class(text[:1])) for text in texts], dtype=np.uint8)
    last = np.array([ord(_character_class(text[-1:])) for text in texts], dtype=np.uint8)

    def begins(sentences: Sentences) -> np.ndarray:
        left, right = last[sentences.ids][:-1], first[sentences.ids]
        found: np.ndarray = right == ord("Z")
        found[1:] |= (right[1:] != left) & (left != ord("Z"))  # a single space belongs to the word that follows
        return found

    return WordFinder(begins)


def _character_class(character: str) -> str:
    """Class of a character: L letter (including marks and parts of characters), N number, Z space, P anything else."""
    if character.isspace():
        return "Z"
    category = unicodedata.category(character)[0] if character else "P"
    return "L" if category == "M" or character == "\ufffd" else category if category in "LN" else "P"


def _by_pre_tokens(sentences: Sentences) -> np.ndarray:
    """For any tokenizer that first splits text into words: a token begins a word if the previous token belongs to another one."""
    assert sentences.encodings is not None
    words = np.fromiter(chain.from_iterable(e.word_ids for e in sentences.encodings), np.int64, count=len(sentences.ids))
    begins: np.ndarray = np.diff(words, prepend=-1) != 0
    return begins


def _in_text(word_starts: WordStarts) -> WordFinder:
    """Word boundaries in the text: a token begins a word if its first visible character is at a boundary.

    A boundary inside a token is ignored, because ids do not depend on words.
    """

    def of_sentence(text: str, encoding: Encoding) -> np.ndarray:
        visible = np.array([place for place, letter in enumerate(text) if not letter.isspace()] + [len(text)])
        # A token of spaces belongs to the next word. Of several tokens of one character (bytes), the first one counts.
        first = visible[np.searchsorted(visible, [start for start, _ in encoding.offsets])]
        is_boundary = np.zeros(len(text) + 1, dtype=bool)
        is_boundary[list(word_starts(text))] = True
        is_boundary[-1] = False
        begins: np.ndarray = is_boundary[first] & (np.diff(first, prepend=-1) != 0)
        return begins

    def begins(sentences: Sentences) -> np.ndarray:
        assert sentences.encodings is not None
        parts = [of_sentence(*each) for each in zip(sentences.texts, sentences.encodings, strict=True)]
        return np.concatenate([np.zeros(0, dtype=bool), *parts])

    return WordFinder(begins, needs_encodings=True)


def check_segmenter(segmenter: SegmenterName) -> None:
    """Check that a segmenter is installed, without loading it.

    Raises:
        ConfigError: its extra is not installed.
    """
    if segmenter != "none" and find_spec(segmenter) is None:
        raise ConfigError(
            f"--segmenter {segmenter} needs the package {segmenter}, which is not installed",
            hint=f"pip install 'discern-nlp[{SEGMENTERS[segmenter]}]'",
        )


def _jieba() -> WordStarts:
    import jieba

    jieba.setLogLevel("ERROR")
    jieba.initialize()
    return lambda text: _starts(jieba.cut(text))


def _fugashi() -> WordStarts:
    from fugashi import Tagger

    tagger = Tagger("-Owakati")
    return lambda text: _starts(part for word in tagger(text) for part in (word.white_space, word.surface))


@cache
def _kiwipiepy() -> WordStarts:
    """Morphemes: a particle or an ending is a word of its own, as the spaces of Korean do not show."""
    from kiwipiepy import Kiwi

    kiwi = Kiwi(num_workers=1)
    return lambda text: (morpheme.start for morpheme in kiwi.tokenize(text))


def _pythainlp() -> WordStarts:
    from pythainlp.tokenize import word_tokenize

    return lambda text: _starts(word_tokenize(text, engine="newmm"))


def _starts(words: Iterable[str]) -> Iterable[int]:
    """Where each word begins in the text that the words make up, and where the text ends."""
    return accumulate(map(len, words), initial=0)


_LOADERS: dict[str, Callable[[], WordStarts]] = {
    "jieba": _jieba,
    "fugashi": _fugashi,
    "kiwipiepy": _kiwipiepy,
    "pythainlp": _pythainlp,
}
"""Loads a segmenter: a function from a text to the offsets of the characters that begin a word. Those of spaces do not count."""


def keeps_spaces(tokenizer: Tokenizer) -> bool:
    """Whether the tokens of a word within a text include the space before it, unlike those of the same word alone."""
    alone, within = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("a", " a"))
    return bool(alone != within)


def word_forms(tokenizer: Tokenizer, text: str) -> list[str]:
    """The words of a text in the form that the model gets, in order."""
    splitter, text = tokenizer.pre_tokenizer, text.strip()
    if isinstance(splitter, pre_tokenizers.ByteLevel) and not splitter.add_prefix_space:
        text = f" {text}"  # within a text, a word follows a space, which this kind keeps with the word
    text = normalized(tokenizer, text)
    words = [text] if splitter is None else [word for word, _ in splitter.pre_tokenize_str(text)]
    return list(filter(None, words))


def is_too_long(tokenizer: Tokenizer, form: str) -> bool:
    """Whether WordPiece encodes a word as [UNK] because of its length."""
    model = tokenizer.model
    return isinstance(model, models.WordPiece) and len(form) > model.max_input_chars_per_word
