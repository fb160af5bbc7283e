"""Long contexts as windows that overlap, every token with the characters that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from discern.tasks.base import TextEncoder
from discern.tasks.examples import Answer


class LocatedTokens(NamedTuple):
    """The tokens of a text, T of them, with their places in it.

    Attributes:
        ids: (T,) in the vocabulary.
        starts: (T,) first character of each token, in the text as it was before any normalisation.
        ends: (T,) the one after its last.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]

    def cover(self, answer: Answer) -> tuple[int, int] | None:
        """First and last of the fewest tokens that hold all characters of an answer; None where no token holds any."""
        first = int(np.searchsorted(self.ends, answer.start, side="right"))
        last = int(np.searchsorted(self.starts, answer.start + len(answer.text), side="left")) - 1
        return (first, last) if first <= last else None


def located_tokens(texts: Sequence[str], encoder: TextEncoder) -> list[LocatedTokens]:
    """The tokens of each text, not framed.

    Characters that normalisation drops (combining accents, joiners, control characters) belong to the token that they touch
    from behind, so that a text cut at tokens is cut at none of them.
    """
    located = []
    for text, encoding in zip(texts, encoder.tokenizer.encode_batch(list(texts), add_special_tokens=False), strict=True):
        starts, ends = np.array(encoding.offsets, np.int32).reshape(-1, 2).T.copy()
        following = np.append(starts[1:], len(text))
        for token in np.flatnonzero(following > ends):
            end, limit = int(ends[token]), int(following[token])
            while end < limit and not text[end].isspace():
                end += 1
            ends[token] = end
        located.append(LocatedTokens(np.array(encoding.ids, np.int32), starts, ends))
    return located


class RowShares(NamedTuple):
    """How many tokens of a row are whose.

    Attributes:
        question: kept of the question.
        window: left for the context.
        stride: from one window to the next.
    """

    question: int
    window: int
    stride: int


def row_shares(question: int, length: int, *, max_question: int, stride: int, max_answer: int) -> RowShares:
    """The shares of `[CLS] question [SEP] window [SEP]`.

    A question gets a third of the row at most. Windows overlap by `max_answer` tokens, so that every answer up to that length
    is whole in one of them; where they are too short for that, by half.

    Args:
        question: tokens that it has.
        length: of the row, 8 or more.
        stride: that is wished for.
    """
    kept = min(question, max_question, length // 3)
    window = length - kept - 3
    return RowShares(kept, window, min(stride, max(window - max_answer, window // 2, 1)))


class Window(NamedTuple):
    """Tokens `start` to `stop - 1` of a context; of `best_start` to `best_stop - 1` no other window shows more around them."""

    start: int
    stop: int
    best_start: int
    best_stop: int


def cut_windows(tokens: int, length: int, stride: int) -> list[Window]:
    """The windows of a context, up to the first that reaches its end; a context without tokens has one without any.

    How much a window shows around a token is the lesser of what it shows on both sides; longer windows win, then earlier ones.
    Reference: BERT, run_squad.py, `_check_is_max_context`.
    """
    starts = np.arange(0, max(tokens - length, 0) + stride, stride)
    stops = np.minimum(starts + length, tokens)
    if len(starts) == 1:
        return [Window(0, tokens, 0, tokens)]
    places = np.arange(tokens)
    around = np.minimum(places - starts[:, None], stops[:, None] - 1 - places)
    shown = np.where(around >= 0, around + 0.01 * (stops - starts)[:, None], -1.0)
    # As a function of the place, what two windows show differs by less and less from left to right: so the places of each
    # winner stand together.
    winners = shown.argmax(0)
    numbers = np.arange(len(starts))
    begins, ends = np.searchsorted(winners, numbers, side="left"), np.searchsorted(winners, numbers, side="right")
    return [Window(*map(int, window)) for window in zip(starts, stops, begins, ends, strict=True)]
