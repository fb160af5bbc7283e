"""From the likeliest starts and ends in each window to the best answers to a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Said = Mapping[str, NDArray[np.float32]]
"""What a head says of one row; see `answer_heads`."""


class WindowPlaces(NamedTuple):
    """Where the tokens of a window stand, T of them.

    Attributes:
        first: position of its first token in the row.
        best_start, best_stop: the tokens, counted in the window, of which no other window shows more around them.
        starts, ends: (T,) characters of the context.
    """

    first: int
    best_start: int
    best_stop: int
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]


class Spans(NamedTuple):
    """First and last token of some spans, counted in the window, and the scores of the two; (S,) each."""

    firsts: NDArray[np.int64]
    lasts: NDArray[np.int64]
    start_scores: NDArray[np.float64]
    end_scores: NDArray[np.float64]


class FoundAnswer(NamedTuple):
    """A piece of the context, as it stands there, and what speaks for its beginning and its end: the higher the better."""

    text: str
    start: int
    start_score: float
    end_score: float

    @property
    def score(self) -> float:
        """Of both together."""
        return self.start_score + self.end_score


def admissible_spans(said: Said, window: WindowPlaces, max_length: int) -> Spans:
    """The spans that a head proposes, inside the window, at most `max_length` tokens long, the start where the window is best.

    So that no span is judged with less of its context than another window shows.
    """
    starts, ends = (np.rint(said[name]).astype(np.int64) - window.first for name in ("starts", "ends"))
    ends = np.broadcast_to(ends, (len(starts), ends.shape[-1]))
    firsts = np.broadcast_to(starts[:, None], ends.shape)
    start_scores = np.broadcast_to(said["start_scores"].astype(np.float64)[:, None], ends.shape)
    end_scores = np.broadcast_to(said["end_scores"].astype(np.float64), ends.shape)
    fits = (firsts >= window.best_start) & (firsts < window.best_stop)
    fits &= (ends >= firsts) & (ends < len(window.starts)) & (ends - firsts < max_length)
    return Spans(firsts[fits], ends[fits], start_scores[fits], end_scores[fits])


def best_answers(
    context: str, windows: Sequence[WindowPlaces], outputs: Sequence[Said], *, max_length: int, number: int
) -> list[FoundAnswer]:
    """The answers with the highest scores, of each text the best, at most `number`; equal scores in the order of the windows.

    Args:
        windows: of the context.
        outputs: what a head says of each.
        max_length: of an answer, in tokens.
    """
    spans = [admissible_spans(said, window, max_length) for window, said in zip(windows, outputs, strict=True)]
    if not spans:
        return []
    begins = np.concatenate([window.starts[each.firsts] for window, each in zip(windows, spans, strict=True)])
    stops = np.concatenate([window.ends[each.lasts] for window, each in zip(windows, spans, strict=True)])
    start_scores = np.concatenate([each.start_scores for each in spans])
    end_scores = np.concatenate([each.end_scores for each in spans])
    found: dict[str, FoundAnswer] = {}
    for place in np.argsort(-(start_scores + end_scores), kind="stable"):
        begin, piece = int(begins[place]), context[begins[place] : stops[place]]
        # Tokens of some tokenizers begin with the space before them.
        text = piece.strip()
        if text and text not in found:
            begin += len(piece) - len(piece.lstrip())
            found[text] = FoundAnswer(text, begin, float(start_scores[place]), float(end_scores[place]))
            if len(found) == number:
                break
    return list(found.values())


def probabilities(answers: Sequence[FoundAnswer]) -> list[float]:
    """Of each answer, were one of them right: the softmax of their scores."""
    if not answers:
        return []
    exponents = np.exp(np.array([answer.score for answer in answers]) - max(answer.score for answer in answers))
    return [float(value) for value in exponents / exponents.sum()]


def no_answer_odds(nulls: Sequence[float], answers: Sequence[FoundAnswer], *, relative: bool) -> float:
    """How much speaks for there being no answer: of all windows the one that speaks least for it.

    Args:
        nulls: of each window.
        relative: they are scores like those of spans, and the best answer's is taken off.
    """
    # Without any answer 0 stands for the best one's score, as in BERT's script; the answer is empty either way.
    best = (answers[0].score if answers else 0.0) if relative else 0.0
    return min(nulls) - best
