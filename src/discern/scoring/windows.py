"""Overlapping windows over texts that are longer than a network reads, and which of them each token counts in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `stop` of text number `text`, which has `whole` tokens."""

    text: int
    start: int
    stop: int
    whole: int

    def context(self, position: int) -> float:
        """Tokens of context that a token has on its poorer side; the ends of the text itself take nothing away."""
        left = position - self.start if self.start else math.inf
        right = self.stop - 1 - position if self.stop < self.whole else math.inf
        return min(left, right)


def windows_of(lengths: Sequence[int], room: int) -> list[Window]:
    """Windows of at most `room` tokens that cover texts of these lengths, each overlapping the one before by a half or more."""
    step = max(room // 2, 1)
    return [
        Window(text, start, min(start + room, length), length)
        for text, length in enumerate(lengths)
        if length
        for start in [*range(0, length - room, step), max(length - room, 0)]
    ]


def best_places(windows: Sequence[Window], *, reads_ahead: bool = True) -> list[tuple[int, ...]]:
    """For each window its places whose tokens have no more context in another one; of equal windows the first.

    Args:
        windows: all of their texts.
        reads_ahead: whether context on the right counts.

    Returns:
        Places counted from the beginning of the window, ascending; every token of every text is in exactly one window.
    """
    best: dict[tuple[int, int], tuple[float, int]] = {}
    for number, window in enumerate(windows):
        for position in range(window.start, window.stop):
            context = window.context(position) if reads_ahead else position - window.start
            token = window.text, position
            if token not in best or context > best[token][0]:
                best[token] = context, number
    places: list[list[int]] = [[] for _ in windows]
    for (_, position), (_, number) in sorted(best.items(), key=lambda item: item[0]):
        places[number].append(position - windows[number].start)
    return [tuple(each) for each in places]
