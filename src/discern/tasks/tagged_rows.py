"""Sentences of words as rows: the tokens of each word, and windows of whole words for sentences that are longer than a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from discern.data.tokenizer.words import UNSPACED, keeps_spaces
from discern.tasks.base import TextEncoder
from discern.tasks.examples import TaggingExample
from discern.wording import counted

NO_WORD = -1
"""In `places["word"]`, marks tokens that no word is predicted from."""
# Number of words tokenized at a time, each distinct word once.
_BLOCK = 10_000


class WordWindow(NamedTuple):
    """Words `start` to `stop - 1` of a sentence, and those of them (`words`) that have the most context in this window."""

    start: int
    stop: int
    words: NDArray[np.int64]


def cut_sentence(sizes: Sequence[int], room: int, overlap: int) -> list[WordWindow]:
    """Split a sentence into windows of whole words, each as long as possible.

    The context of a word in a window is the smaller number of tokens on its two sides; ties go to longer windows, then to
    earlier ones. Every word is among the `words` of exactly one window; windows without such words are left out.
    Reference: BERT, run_squad.py, `_check_is_max_context`.

    Args:
        sizes: (W,) number of tokens of each word, 1 to `room`.
        room: number of tokens in a window.
        overlap: number of tokens that consecutive windows should share; at most half a window, whole words only, and less if
            the next word needs the room.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    begins = ends - np.asarray(sizes, np.int64)
    count, shared = len(ends), min(overlap, room // 2)
    bounds: list[tuple[int, int]] = []
    start = stop = 0
    while not bounds or stop < count:
        if bounds:
            # The next window repeats the last words of this one, but not so many that its first new word has no room.
            start = int(np.searchsorted(begins, max(ends[stop - 1] - shared, ends[stop] - room)))
        stop = int(np.searchsorted(ends, (begins[start] if count else 0) + room, side="right"))
        bounds.append((start, stop))
    most = np.full(count, -1.0)
    owner = np.zeros(count, np.int64)
    for number, (start, stop) in enumerate(bounds):
        around = np.minimum(begins[start:stop] - begins[start], ends[stop - 1] - ends[start:stop]) if count else np.zeros(0)
        shown = around + 0.01 * (ends[stop - 1] - begins[start] if count else 0)
        better = np.flatnonzero(shown > most[start:stop]) + start
        most[better], owner[better] = shown[better - start], number
    windows = [WordWindow(start, stop, np.flatnonzero(owner == number)) for number, (start, stop) in enumerate(bounds)]
    return [window for window in windows if len(window.words) or not count]


class WordPieces:
    """The tokens of every distinct word, from 1 to `room` of them.

    Args:
        spaced: read words with the space before them, if the tokenizer keeps it with the word.

    Attributes:
        of: token ids by the form of a word.
    """

    def __init__(self, examples: Sequence[TaggingExample], text: TextEncoder, room: int, *, spaced: bool) -> None:
        self.of: dict[str, list[int]] = {}
        self._room = room
        self._spaced = spaced and keeps_spaces(text.tokenizer)
        self._cut: set[str] = set()
        self._empty: set[str] = set()
        for block in _blocks(list(dict.fromkeys(form for example in examples for form in self.forms(example)))):
            for form, ids in zip(block, text.ids(block), strict=True):
                if not ids:
                    # For example control characters: the word still needs a token for its tag.
                    self._empty.add(form)
                elif len(ids) > room:
                    self._cut.add(form)
                self.of[form] = ids[:room] or [text.special.unk]

    def forms(self, example: TaggingExample) -> Sequence[str]:
        """The words of a sentence as they are tokenized: within a text, most follow a space."""
        if not self._spaced:
            return example.words
        spaced = (word if UNSPACED.match(word) else f" {word}" for word in example.words[1:])
        return [*example.words[:1], *spaced]

    def notes(self, examples: Sequence[TaggingExample], windowed: int, length: int) -> tuple[str, ...]:
        """Messages about the words and sentences, one per line."""
        odd = self._cut | self._empty
        counts = Counter(form for example in examples for form in self.forms(example) if form in odd) if odd else Counter[str]()
        cut, empty = (sum(counts[form] for form in forms) for forms in (self._cut, self._empty))
        lines = {
            f"{windowed:,} of {len(examples):,} sentences are longer than {length} tokens and were split into windows": windowed,
            f"{counted(cut, 'word')} of more than {self._room} tokens, cut to the first {self._room}": cut,
            f"{counted(empty, 'word')} without any token, read as [UNK]": empty,
        }
        return tuple(line for line, count in lines.items() if count)


def _blocks(words: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(words), _BLOCK):
        yield words[start : start + _BLOCK]


def framed(words: Sequence[list[int]], window: WordWindow, text: TextEncoder) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """`[CLS] words [SEP]`, and for each token the index of the word that is predicted from it."""
    shown = words[window.start : window.stop]
    row = [text.special.cls, *(id for word in shown for id in word), text.special.sep]
    begins = np.cumsum([1, *map(len, shown)])
    place = np.full(len(row), NO_WORD, np.int32)
    place[begins[window.words - window.start]] = window.words
    return np.array(row, np.int32), place
