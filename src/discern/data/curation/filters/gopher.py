"""The rules by which Gopher's authors left out pages of the web.

Reference: Rae et al. 2021, "Scaling Language Models: Methods, Analysis & Insights from Training Gopher", appendix A.1.1 and
table A1.
Differs: documents have lines and no paragraphs, so the two rules on repeated paragraphs are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from discern.data.curation.filters import Rule, no_argument
from discern.data.sources.documents import Document

_WORDS = (50, 100_000)
_MEAN_LENGTH = (3, 10)
_MOST_SYMBOLS_PER_WORD = 0.1
_MOST_BULLETS, _MOST_ELLIPSES = 0.9, 0.3
_FEWEST_ALPHABETIC = 0.8
_STOP_WORDS = frozenset(["the", "be", "to", "of", "and", "that", "have", "with"])
_FEWEST_STOP_WORDS = 2
_BULLETS = ("•", "‣", "-", "*")

_REPEATED_LINES, _REPEATED_LINE_CHARACTERS = 0.3, 0.2
_TOP_NGRAMS = {2: 0.2, 3: 0.18, 4: 0.16}
_REPEATED_NGRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.1}


def quality(argument: str | None) -> Rule:
    """Keeps documents that look like English prose: number and length of words, symbols, bullets, ellipses and stop words."""
    no_argument("gopher-quality", argument)
    return _quality


def _quality(document: Document) -> Document | str:
    words = list(chain.from_iterable(sentence.split() for sentence in document))
    if not _WORDS[0] <= len(words) <= _WORDS[1]:
        return f"not {_WORDS[0]:,} to {_WORDS[1]:,} words"
    if not _MEAN_LENGTH[0] <= sum(map(len, words)) / len(words) <= _MEAN_LENGTH[1]:
        return f"mean length of words not {_MEAN_LENGTH[0]} to {_MEAN_LENGTH[1]} characters"
    symbols = sum(sentence.count("#") + sentence.count("...") + sentence.count("…") for sentence in document)
    if symbols > _MOST_SYMBOLS_PER_WORD * len(words):
        return "more than 0.1 hash signs and ellipses per word"
    if sum(sentence.startswith(_BULLETS) for sentence in document) > _MOST_BULLETS * len(document):
        return "more than 90% of the lines begin with a bullet"
    if sum(sentence.endswith(("...", "…")) for sentence in document) > _MOST_ELLIPSES * len(document):
        return "more than 30% of the lines end with an ellipsis"
    if sum(any(map(str.isalpha, word)) for word in words) < _FEWEST_ALPHABETIC * len(words):
        return "fewer than 80% of the words have a letter"
    if len(_STOP_WORDS & {word.lower() for word in words}) < _FEWEST_STOP_WORDS:
        return "fewer than two English stop words"
    return document


def repetition(argument: str | None) -> Rule:
    """Keeps documents that do not repeat themselves: lines, the most frequent n-gram, and all n-grams that occur twice."""
    no_argument("gopher-repetition", argument)
    return _repetition


def _repetition(document: Document) -> Document | str:
    repeated = _repeated(document)  # type: ignore[arg-type]
    if len(repeated) > _REPEATED_LINES * len(document):
        return "more than 30% of the lines are repeated"
    characters = sum(map(len, document))
    if sum(map(len, repeated)) > _REPEATED_LINE_CHARACTERS * characters:
        return "more than 20% of the characters are in repeated lines"
    words = list(chain.from_iterable(sentence.split() for sentence in document))
    total = sum(map(len, words))
    for size, most in _TOP_NGRAMS.items():
        if _in_top_ngram(words, size) > most * total:
            return f"more than {most:.0%} of the characters are in one {size}-gram"
    for size, most in _REPEATED_NGRAMS.items():
        if _in_repeated_ngrams(words, size) > most * total:
            return f"more than {most:.0%} of the characters are in repeated {size}-grams"
    return document


def _repeated(lines: Sequence[str]) -> list[str]:
    """The lines that occurred before."""
    seen: set[str] = set()
    found = []
    for line in lines:
        if line in seen:
            found.append(line)
        seen.add(line)
    return found


def _in_top_ngram(words: Sequence[str], size: int) -> int:
    """Characters in the occurrences of the most frequent n-gram; 0 if none occurs twice."""
    counts = Counter(zip(*(words[place:] for place in range(size)), strict=False))
    if not counts:
        return 0
    # Of n-grams of the same number, the longest: the result must not depend on their order.
    count, length = max((count, sum(map(len, ngram))) for ngram, count in counts.items())
    return count * length if count > 1 else 0


def _in_repeated_ngrams(words: Sequence[str], size: int) -> int:
    """Characters in n-grams that occurred before; a word in several of them counts once."""
    seen: set[tuple[str, ...]] = set()
    covered, end = 0, 0
    for place, ngram in enumerate(zip(*(words[first:] for first in range(size)), strict=False)):
        if ngram in seen:
            covered += sum(map(len, words[max(place, end) : place + size]))
            end = place + size
        seen.add(ngram)
    return covered
