"""Words of a text, the same for every model, and how suspicious each is."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from discern.scoring.detection import Detection

Span = tuple[int, int]
_APOSTROPHES = "'\u2019"


def words_of(text: str) -> list[Span]:
    """(start, end) of each word in characters, in order: a run of letters, marks and digits, with the apostrophes inside it.

    Every Han ideograph is a word, and so is every other sign that is no white space. A language written without spaces
    in another script, as Thai, has phrases for words.
    """
    spans: list[Span] = []
    start = 0
    while start < len(text):
        if text[start].isspace():
            start += 1
            continue
        end = start + 1
        if _joins(text[start]):
            while end < len(text) and (_joins(text[end]) or _inside(text, end)):
                end += 1
        spans.append((start, end))
        start = end
    return spans


def word_probabilities(detection: Detection, words: Sequence[Span]) -> list[float]:
    """The probability of each word's most suspicious token; 0 of a word that the tokenizer drops.

    Args:
        words: of the detection's text, in order, none overlapping another.
    """
    found = [0.0] * len(words)
    first = 0
    for (start, end), probability in zip(detection.offsets, detection.replaced_probability, strict=True):
        while first < len(words) and words[first][1] <= start:
            first += 1
        word = first
        while word < len(words) and words[word][0] < end:
            if words[word][1] > start and end > start:
                found[word] = max(found[word], probability)
            word += 1
    return found


def overlapping(words: Sequence[Span], span: Span) -> list[int]:
    """Numbers of the words that share a character with a span."""
    return [number for number, (start, end) in enumerate(words) if start < span[1] and span[0] < end]


def _joins(character: str) -> bool:
    return (unicodedata.category(character)[0] in "LMN" and not _is_han(character)) or character == "_"


def _inside(text: str, place: int) -> bool:
    return text[place] in _APOSTROPHES and place + 1 < len(text) and _joins(text[place + 1])


def _is_han(character: str) -> bool:
    return character >= "\u2e80" and unicodedata.name(character, "").startswith("CJK ")
