"""Re-ranking n-best lists: what a text encoder makes of each hypothesis, which wins under given weights, and tuning these.

Reference: Clark et al. 2020 (Electric), section 4.2; Salazar et al. 2020; Shin et al. 2019.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from discern.scoring.base import Scorer
from discern.scoring.corpus_metrics import CorpusMetric
from discern.scoring.nbest import NBest
from discern.scoring.rank_measures import Statistics, chosen_statistics

LAMBDA_STEPS = 20
"""How many values between 0 and the largest are tried. Electric, section 4.2: 0.05, 0.1, ... 1.0; here 0 too."""
LENGTH_GRID = tuple(number / 4 for number in range(-8, 9))
"""Weights of a token that are tried, in units of the lists' scores; few, as there is more to overfit than to win."""
# Texts are sorted by length among this many: enough that batches hardly need padding, few enough to tell of the advance.
_BLOCK = 1024


@dataclass(frozen=True)
class Weights:
    """total = score + model x model score + length x number of tokens.

    Attributes:
        model: lambda.
        length: of a token of the model's tokenizer; positive favours longer texts.
    """

    model: float
    length: float = 0.0


UNCHANGED = Weights(0.0)
"""The ranking of the system itself."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """N lists of up to H hypotheses each; what lies beyond the end of a list can never win.

    Attributes:
        scores: of the system that proposed them; -inf beyond the end.
        model_scores: of the model, in nats: pseudo-log-likelihoods or what its scorer gives; 0 beyond the end.
        lengths: in tokens of the model; 0 beyond the end.
        too_long: how many different texts the model read in several windows.
    """

    scores: Float[np.ndarray, "N H"]
    model_scores: Float[np.ndarray, "N H"]
    lengths: Float[np.ndarray, "N H"]
    too_long: int = 0

    def totals(self, weights: Weights) -> Float[np.ndarray, "N H"]:
        """The sum that decides, of every hypothesis."""
        totals: np.ndarray = self.scores + weights.model * self.model_scores + weights.length * self.lengths
        return totals

    def best(self, weights: Weights) -> Int[np.ndarray, "N"]:
        """The place of the winner of each list; of equals the first."""
        best: np.ndarray = self.totals(weights).argmax(axis=1)
        return best

    def chosen(self, lists: Sequence[int]) -> Candidates:
        """Some of the lists alone."""
        rows = np.asarray(lists, dtype=np.intp)
        return Candidates(self.scores[rows], self.model_scores[rows], self.lengths[rows], self.too_long)


def judge(
    lists: Sequence[NBest],
    scorer: Scorer,
    as_read: Callable[[str], str],
    advance: Callable[[int], None],
    read: Callable[[Sequence[str]], None] = lambda _: None,
) -> Candidates:
    """Rerank the lists; each distinct text is scored once.

    Args:
        as_read: a hypothesis to what the model reads.
        advance: told how many hypotheses more are done.
        read: told the tokens of each different text.
    """
    found: dict[str, tuple[float, int]] = {}
    times: dict[str, int] = {}
    for each in lists:
        for hypothesis in each.hypotheses:
            text = as_read(hypothesis.text)
            times[text] = times.get(text, 0) + 1
    texts, too_long = list(times), 0
    for first in range(0, len(texts), _BLOCK):
        block = texts[first : first + _BLOCK]
        for score in scorer.score(block):
            found[score.text] = score.total, len(score.tokens)
            read(score.tokens)
            too_long += score.windows > 1
        advance(sum(times[text] for text in block))
    seen = [[found[as_read(hypothesis.text)] for hypothesis in each.hypotheses] for each in lists]
    return Candidates(
        _padded([[hypothesis.score for hypothesis in each.hypotheses] for each in lists], -np.inf),
        _padded([[total for total, _ in each] for each in seen], 0.0),
        _padded([[length for _, length in each] for each in seen], 0.0),
        too_long,
    )


def lambda_grid(largest: float) -> tuple[float, ...]:
    """The values of lambda to try, from 0 to the largest."""
    return tuple(largest * step / LAMBDA_STEPS for step in range(LAMBDA_STEPS + 1))


def tune(
    lists: Candidates, statistics: Statistics, metric: CorpusMetric, models: Sequence[float], lengths: Sequence[float]
) -> Weights:
    """The pair of weights whose winners are best by the metric; of equally good ones the least far from doing nothing.

    Args:
        statistics: of each hypothesis of each list against its reference.
        models: values of lambda to try.
        lengths: weights of a token to try.
    """
    pairs = sorted(itertools.product(lengths, models), key=lambda pair: (abs(pair[0]), abs(pair[1]), pair))
    tried = [Weights(model, length) for length, model in pairs]
    values = [metric.better * metric.value(chosen_statistics(statistics, lists.best(weights)).sum(0)) for weights in tried]
    return tried[int(np.argmax(values))]


def _padded(rows: Sequence[Sequence[float]], filler: float) -> Float[np.ndarray, "N H"]:
    width = max(map(len, rows), default=0)
    return np.array([[*row, *[filler] * (width - len(row))] for row in rows], dtype=np.float64).reshape(len(rows), width)
