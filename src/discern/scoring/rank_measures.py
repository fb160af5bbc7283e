"""What a re-ranking is worth: a metric before and after, how sure the change is, and what no re-ranking can better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Int

from discern.scoring.corpus_metrics import CorpusMetric, ErrorRate
from discern.scoring.nbest import NBest

Statistics: TypeAlias = Sequence[Sequence[tuple[int, ...]]]
"""Of each hypothesis of each list, what it adds to the sums of a metric."""
_RESAMPLES, _SEED = 1000, 0


@dataclass(frozen=True)
class Measured:
    """One metric of the texts that win.

    Attributes:
        before, after: over the corpus.
        low, high: 95 % interval of after - before: what the change may be on other texts of the kind.
        better: fraction of the resamples in which after is better than before.
        best_possible: with the fewest errors of each list; None where the metric doesn't say which those are.
    """

    before: float
    after: float
    low: float
    high: float
    better: float
    best_possible: float | None


def measure(lists: Sequence[NBest], before: Int[np.ndarray, "N"], after: Int[np.ndarray, "N"], metric: CorpusMetric) -> Measured:
    """The metric of two choices from the same lists.

    Args:
        lists: all with a reference, at least one.
        before, after: place of the chosen hypothesis of each.
    """
    first, second = (
        np.array([_statistics(each, place, metric) for each, place in zip(lists, places.tolist(), strict=True)], dtype=np.float64)
        for places in (before, after)
    )
    low, high, better = bootstrap(first, second, metric)
    least = best_possible(hypothesis_statistics(lists, metric), metric) if isinstance(metric, ErrorRate) else None
    return Measured(metric.value(first.sum(0)), metric.value(second.sum(0)), low, high, better, least)


def hypothesis_statistics(lists: Sequence[NBest], metric: CorpusMetric) -> Statistics:
    """Of every hypothesis; the lists have references."""
    return [[_statistics(each, place, metric) for place in range(len(each.hypotheses))] for each in lists]


def chosen_statistics(statistics: Statistics, places: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N K"]:
    """Of the hypothesis at a place of each list."""
    return np.array([each[place] for each, place in zip(statistics, places.tolist(), strict=True)], dtype=np.float64)


def bootstrap(
    before: Float[np.ndarray, "N K"], after: Float[np.ndarray, "N K"], metric: CorpusMetric
) -> tuple[float, float, float]:
    """How sure a change is: 2.5th and 97.5th percentile of after - before over 1,000 resamples of the lists, and the
    fraction of them in which after is better. The same lists are drawn for both; the draws are always the same.

    Args:
        before, after: statistics of the text chosen from each list.

    Reference: Bisani and Ney 2004; Koehn 2004.
    """
    rng, number = np.random.default_rng(_SEED), len(before)
    changes = np.empty(_RESAMPLES)
    for index in range(_RESAMPLES):
        times = np.bincount(rng.integers(number, size=number), minlength=number).astype(np.float64)
        changes[index] = metric.value(times @ after) - metric.value(times @ before)
    low, high = np.percentile(changes, [2.5, 97.5])
    return float(low), float(high), float((metric.better * changes > 0).mean())


def best_possible(statistics: Statistics, metric: ErrorRate) -> float:
    """The error rate of the hypotheses with the fewest edits in each list."""
    return metric.value(np.array([min(each) for each in statistics], dtype=np.float64).sum(0))


def _statistics(each: NBest, place: int, metric: CorpusMetric) -> tuple[int, ...]:
    assert each.reference is not None
    return metric.statistics(each.reference, each.hypotheses[place].text)
