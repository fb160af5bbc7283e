"""Finds the tokens that begin a word, for any kind of tokenizer. The ids do not depend on it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from itertools import accumulate

import numpy as np
from jaxtyping import Bool, Int, UInt
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers

from discern.data.languages import SEGMENTERS, SegmenterName
from discern.data.tokenizer.loading import normalized, vocab_size
from discern.errors import ConfigError

UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]")
"""Chinese and Japanese characters, and those of scripts of Southeast Asia: text without spaces between words."""


class WordFinder:
    """Finds the tokens that begin a word. The first token of a sentence always does.

    Where tokens show it, only ids are needed. In WordPiece, continuations begin with "##"; in SentencePiece, words with "▁". In
    byte-level tokenizers, a word begins at a space, and where letters, digits and other characters meet: as in GPT-2, except that
    contractions are split at the apostrophe and combining marks stay with their letters. In other tokenizers and with a
    segmenter, a token begins a word if its first visible character does in the text. A boundary inside a token is ignored.

    Args:
        tokenizer: tokenizer of the ids.
        segmenter: source of word boundaries; without one, they are at spaces.

    Attributes:
        needs_encodings: whether it needs the texts and the encodings of the library, with offsets, besides the ids.
    """

    def __init__(self, tokenizer: Tokenizer, segmenter: SegmenterName = "none") -> None:
        texts = [tokenizer.id_to_token(number) or "" for number in range(vocab_size(tokenizer))]
        mark = _mark(tokenizer) if segmenter == "none" else ""
        if mark == "Ġ":
            texts = [decoders.ByteLevel().decode([token]) for token in texts]
            first, last = ([_character_class(text[part]) for text in texts] for part in (slice(1), slice(-1, None)))
        else:
            first, last = ["Z" if text.startswith(mark) is (mark == "▁") else "L" for text in texts], ["L"] * len(texts)
        # Classes of the first and the last character of each token. A word begins at a "Z", and where two classes meet.
        self._first, self._last = (np.array(list(map(ord, classes)), dtype=np.uint8) for classes in (first, last))
        self.needs_encodings = not mark
        self._boundaries = _segmenter(segmenter) if self.needs_encodings else None

    def starts(
        self,
        ids: UInt[np.ndarray, " T"],
        lengths: Int[np.ndarray, " S"],
        texts: Sequence[str] = (),
        encodings: Sequence[Encoding] = (),
    ) -> Bool[np.ndarray, " T"]:
        """True where a word begins.

        Args:
            ids: tokens of all sentences, one after the other.
            lengths: number of tokens of each sentence.
            texts: the sentences, if encodings are needed.
            encodings: encoding of each sentence by the library, if needed.
        """
        if self._boundaries is None:
            left, right = self._last[ids][:-1], self._first[ids]
            starts: np.ndarray = right == ord("Z")
            starts[1:] |= (right[1:] != left) & (left != ord("Z"))  # a single space belongs to the word that follows
        else:
            parts = [_in_text(text, self._boundaries(text), each) for text, each in zip(texts, encodings, strict=True)]
            starts = np.concatenate([np.zeros(0, dtype=bool), *parts])
        starts[(np.cumsum(lengths) - lengths)[lengths > 0]] = True
        return starts


def _mark(tokenizer: Tokenizer) -> str:
    """The mark by which the tokens of a vocabulary show where words begin: "##", "▁" or "Ġ"; "" if they do not."""
    if isinstance(tokenizer.model, models.WordPiece):
        return "##"
    splitter = tokenizer.pre_tokenizer
    # Gemma's pre-tokenizer does not separate words: its normalizer leaves no space to separate them at.
    words = splitter.pre_tokenize_str(normalized(tokenizer, "a b")) if splitter is not None else []
    mark: str = words[-1][0][0] if len(words) == 2 else ""
    return mark if mark in ("▁", "Ġ") else ""


def _character_class(character: str) -> str:
    """Class of a character: L letter (including marks and parts of characters), N number, Z space, P anything else."""
    if character.isspace():
        return "Z"
    category = unicodedata.category(character)[0] if character else "P"
    return "L" if category == "M" or character == "\ufffd" else category if category in "LN" else "P"


def _in_text(text: str, boundaries: Iterable[int], encoding: Encoding) -> Bool[np.ndarray, " T"]:
    """Whether the first visible character of each token is at a boundary."""
    visible = np.array([place for place, letter in enumerate(text) if not letter.isspace()] + [len(text)])
    # A token of spaces belongs to the next word. Of several tokens of one character (bytes), the first one counts.
    first = visible[np.searchsorted(visible, [start for start, _ in encoding.offsets])]
    is_boundary = np.zeros(len(text) + 1, dtype=bool)
    is_boundary[list(boundaries)] = True
    is_boundary[-1] = False
    begins: np.ndarray = is_boundary[first] & (np.diff(first, prepend=-1) != 0)
    return begins


def check_segmenter(segmenter: SegmenterName) -> None:
    """Check that a segmenter is installed, without loading it.

    Raises:
        ConfigError: its extra is not installed.
    """
    if segmenter != "none" and find_spec(segmenter) is None:
        extra = next(code for code, name in SEGMENTERS.items() if name == segmenter)
        raise ConfigError(
            f"--segmenter {segmenter} needs the package {segmenter}, which is not installed",
            hint=f"pip install 'discern-nlp[{extra}]'",
        )


@cache
def _segmenter(name: SegmenterName) -> Callable[[str], Iterable[int]]:
    """A function from a text to the offsets of the characters that begin a word. Those of spaces do not count."""
    split: Callable[[str], Iterable[str]] = re.compile(r"\s+|\S+").findall
    if name == "jieba":
        import jieba

        jieba.setLogLevel("ERROR")
        split = jieba.cut
    elif name == "fugashi":
        from fugashi import Tagger

        tagger = Tagger("-Owakati")

        def split(text: str) -> Iterable[str]:
            return (part for word in tagger(text) for part in (word.white_space, word.surface))
    elif name == "kiwipiepy":
        from kiwipiepy import Kiwi

        # Morphemes: a particle or an ending is a word of its own, as the spaces of Korean do not show.
        analyzer = Kiwi(num_workers=1)
        return lambda text: (morpheme.start for morpheme in analyzer.tokenize(text))
    elif name == "pythainlp":
        from pythainlp.tokenize import word_tokenize

        split = partial(word_tokenize, engine="newmm")
    return lambda text: accumulate(map(len, split(text)), initial=0)


def word_forms(tokenizer: Tokenizer, text: str) -> list[str]:
    """The words of a text in the form that the model gets, in order."""
    splitter, text = tokenizer.pre_tokenizer, text.strip()
    if isinstance(splitter, pre_tokenizers.ByteLevel) and not splitter.add_prefix_space:
        text = f" {text}"  # within a text, a word follows a space, which this kind keeps with the word
    text = normalized(tokenizer, text)
    words = [text] if splitter is None else [word for word, _ in splitter.pre_tokenize_str(text)]
    return list(filter(None, words))
