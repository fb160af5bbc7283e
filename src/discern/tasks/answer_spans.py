"""Spans of contexts: long contexts as overlapping windows of tokens, and the best answers of a question over its windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from discern.data.tokenizer.plain_text import encode_texts
from discern.tasks.base import TextEncoder
from discern.tasks.examples import Answer


class LocatedTokens(NamedTuple):
    """The T tokens of a text with their characters.

    Attributes:
        ids: (T,) token ids.
        starts: (T,) first character of each token, in the text before normalization.
        ends: (T,) end of its last character.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]

    def cover(self, answer: Answer) -> tuple[int, int] | None:
        """First and last of the fewest tokens that cover all characters of an answer; None if no token covers any."""
        first = int(np.searchsorted(self.ends, answer.start, side="right"))
        last = int(np.searchsorted(self.starts, answer.start + len(answer.text), side="left")) - 1
        return (first, last) if first <= last else None


def located_tokens(texts: Sequence[str], encoder: TextEncoder) -> list[LocatedTokens]:
    """The tokens of each text, without special tokens.

    Characters that normalization drops (combining accents, joiners, control characters) belong to the token before them, so
    that a piece cut at tokens keeps them.
    """
    located = []
    for text, encoding in zip(texts, encode_texts(encoder.tokenizer, texts), strict=True):
        starts, ends = np.array(encoding.offsets, np.int32).reshape(-1, 2).T.copy()
        following = np.append(starts[1:], len(text))
        for token in np.flatnonzero(following > ends):
            end, limit = int(ends[token]), int(following[token])
            while end < limit and not text[end].isspace():
                end += 1
            ends[token] = end
        located.append(LocatedTokens(np.array(encoding.ids, np.int32), starts, ends))
    return located


class RowBudget(NamedTuple):
    """Numbers of tokens that the parts of a row may have.

    Attributes:
        question: tokens that the question keeps.
        window: tokens that are left for the context.
        stride: tokens from one window to the next.
    """

    question: int
    window: int
    stride: int


def row_budget(question: int, length: int, *, max_question: int, stride: int, max_answer: int) -> RowBudget:
    """Divide a row `[CLS] question [SEP] window [SEP]` between question and context.

    The question gets a third of the row at most. Windows overlap by `max_answer` tokens, so that every answer up to that length
    is whole in at least one of them; windows that are too short for that overlap by half.

    Args:
        question: number of tokens of the question.
        length: number of tokens of the row, at least 8.
        stride: preferred stride.
    """
    kept = min(question, max_question, length // 3)
    window = length - kept - 3
    return RowBudget(kept, window, min(stride, max(window - max_answer, window // 2, 1)))


class ContextWindow(NamedTuple):
    """Tokens `start` to `stop - 1` of a context; those from `best_start` to `best_stop - 1` have most context in this window."""

    start: int
    stop: int
    best_start: int
    best_stop: int


def cut_windows(tokens: int, length: int, stride: int) -> list[ContextWindow]:
    """The windows of a context, up to the first that reaches its end. A context without tokens has one empty window.

    The context of a token in a window is the smaller number of tokens on its two sides; ties go to longer windows, then to
    earlier ones.
    Reference: BERT, run_squad.py, `_check_is_max_context`.
    """
    starts = np.arange(0, max(tokens - length, 0) + stride, stride)
    stops = np.minimum(starts + length, tokens)
    if len(starts) == 1:
        return [ContextWindow(0, tokens, 0, tokens)]
    places = np.arange(tokens)
    around = np.minimum(places - starts[:, None], stops[:, None] - 1 - places)
    shown = np.where(around >= 0, around + 0.01 * (stops - starts)[:, None], -1.0)
    # From left to right, each window overtakes the one before it once: so the tokens that a window wins are contiguous.
    winners = shown.argmax(0)
    numbers = np.arange(len(starts))
    begins, ends = np.searchsorted(winners, numbers, side="left"), np.searchsorted(winners, numbers, side="right")
    return [ContextWindow(*map(int, window)) for window in zip(starts, stops, begins, ends, strict=True)]


HeadOutputs = Mapping[str, NDArray[np.float32]]
"""Outputs of a head for one row; see `answer_heads`."""


class WindowOffsets(NamedTuple):
    """Positions of the T tokens of a window.

    Attributes:
        first: position of the first token in the row.
        best_start, best_stop: range of the tokens, counted in the window, that have most context in this window.
        starts, ends: (T,) characters of the context.
    """

    first: int
    best_start: int
    best_stop: int
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]


class Spans(NamedTuple):
    """First and last tokens of S spans, counted in the window, with their scores; (S,) each."""

    firsts: NDArray[np.int64]
    lasts: NDArray[np.int64]
    start_scores: NDArray[np.float64]
    end_scores: NDArray[np.float64]


class FoundAnswer(NamedTuple):
    """A piece of the context with the scores of its start and its end; higher is better."""

    text: str
    start: int
    start_score: float
    end_score: float

    @property
    def score(self) -> float:
        """Sum of the two scores."""
        return self.start_score + self.end_score


def admissible_spans(outputs: HeadOutputs, window: WindowOffsets, max_length: int) -> Spans:
    """The proposed spans in a window that are at most `max_length` tokens long and start in the best range of the window.

    The restriction to the best range makes sure that each span is scored with as much context as possible.
    """
    starts, ends = (np.rint(outputs[name]).astype(np.int64) - window.first for name in ("starts", "ends"))
    ends = np.broadcast_to(ends, (len(starts), ends.shape[-1]))
    firsts = np.broadcast_to(starts[:, None], ends.shape)
    start_scores = np.broadcast_to(outputs["start_scores"].astype(np.float64)[:, None], ends.shape)
    end_scores = np.broadcast_to(outputs["end_scores"].astype(np.float64), ends.shape)
    fits = (firsts >= window.best_start) & (firsts < window.best_stop)
    fits &= (ends >= firsts) & (ends < len(window.starts)) & (ends - firsts < max_length)
    return Spans(firsts[fits], ends[fits], start_scores[fits], end_scores[fits])


def best_answers(
    context: str, windows: Sequence[WindowOffsets], outputs: Sequence[HeadOutputs], *, max_length: int, number: int
) -> list[FoundAnswer]:
    """The answers with the highest scores, at most `number`, each text once; equal scores in the order of the windows.

    Args:
        windows: windows of the context.
        outputs: outputs of the head for each window.
        max_length: maximum number of tokens of an answer.
    """
    spans = [admissible_spans(output, window, max_length) for window, output in zip(windows, outputs, strict=True)]
    if not spans:
        return []
    begins = np.concatenate([window.starts[each.firsts] for window, each in zip(windows, spans, strict=True)])
    stops = np.concatenate([window.ends[each.lasts] for window, each in zip(windows, spans, strict=True)])
    start_scores = np.concatenate([each.start_scores for each in spans])
    end_scores = np.concatenate([each.end_scores for each in spans])
    found: dict[str, FoundAnswer] = {}
    for place in np.argsort(-(start_scores + end_scores), kind="stable"):
        begin, piece = int(begins[place]), context[begins[place] : stops[place]]
        # The tokens of some tokenizers include the space before them.
        text = piece.strip()
        if text and text not in found:
            begin += len(piece) - len(piece.lstrip())
            found[text] = FoundAnswer(text, begin, float(start_scores[place]), float(end_scores[place]))
            if len(found) == number:
                break
    return list(found.values())


def probabilities(answers: Sequence[FoundAnswer]) -> list[float]:
    """Softmax of the scores: the probability of each answer, assuming that one of them is correct."""
    if not answers:
        return []
    exponents = np.exp(np.array([answer.score for answer in answers]) - max(answer.score for answer in answers))
    return [float(value) for value in exponents / exponents.sum()]


def no_answer_score(nulls: Sequence[float], answers: Sequence[FoundAnswer], *, relative: bool) -> float:
    """Score for having no answer: the minimum over the windows.

    Args:
        nulls: score of each window.
        relative: whether the scores are comparable with those of spans, so that the best answer's score is subtracted.
    """
    # Without any answer its score is taken as 0, as in BERT's script; the prediction is empty either way.
    best = (answers[0].score if answers else 0.0) if relative else 0.0
    return min(nulls) - best
