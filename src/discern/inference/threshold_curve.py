"""Precision and recall of a detector at every threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

_QUANTILE = 1.959964  # of the normal distribution: 95% lie between minus and plus this


@dataclass(frozen=True)
class Rates:
    """Precision and recall of one threshold. 0/0 is 0.

    Attributes:
        threshold: items with this score or more are marked.
        precision: fraction of the marked items that are wrong.
        recall: fraction of the wrong items that are marked.
        f1: harmonic mean of precision and recall.
        marked: number of marked items.
        hits: number of marked items that are wrong.
    """

    threshold: float
    precision: float
    recall: float
    f1: float
    marked: int
    hits: int

    def precision_interval(self) -> tuple[float, float]:
        """95% confidence interval of the precision, as if the marked items were independent.

        Reference: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
        """
        if not self.marked:
            return 0.0, 1.0
        n, z2 = self.marked, _QUANTILE**2
        middle = (self.precision + z2 / (2 * n)) / (1 + z2 / n)
        spread = _QUANTILE * math.sqrt(self.precision * (1 - self.precision) / n + z2 / (4 * n * n)) / (1 + z2 / n)
        return max(0.0, middle - spread), min(1.0, middle + spread)


class ThresholdCurve:
    """Precision and recall at every distinct threshold. Scores are compared as `score >= threshold`.

    Args:
        scores: any finite numbers; larger ones are more suspicious.
        wrong: whether each item is wrong.
    """

    def __init__(self, scores: ArrayLike, wrong: ArrayLike) -> None:
        given, truth = np.asarray(scores, np.float64), np.asarray(wrong, np.bool_)
        self._wrong = int(truth.sum())
        order = np.argsort(-given, kind="stable")
        ranked = given[order]
        # Equal scores are marked together, so only the last of each group is a possible threshold.
        last = np.flatnonzero(np.diff(ranked, append=-np.inf))
        self._scores: NDArray[np.float64] = ranked[last]
        self._marked: NDArray[np.int64] = last.astype(np.int64) + 1
        self._hits: NDArray[np.int64] = np.cumsum(truth[order], dtype=np.int64)[last]

    def at(self, threshold: float) -> Rates:
        """Precision and recall at this threshold."""
        stop = int(np.searchsorted(-self._scores, -threshold, side="right")) - 1
        return self._rates(threshold, *((int(self._marked[stop]), int(self._hits[stop])) if stop >= 0 else (0, 0)))

    def reaching(self, precision: float, min_marked: int = 1) -> Rates | None:
        """The threshold with the highest recall among those of at least this precision; None if there is none.

        Args:
            min_marked: thresholds that mark fewer items are ignored, as their precision is mostly chance.
        """
        enough = (self._marked >= min_marked) & (self._hits >= precision * self._marked - 1e-9)
        places = np.flatnonzero(enough)
        return self._stop(int(places[-1])) if len(places) else None

    def most_precise(self, min_marked: int = 1) -> Rates | None:
        """The threshold with the highest precision, of several the one with the highest recall; None for too few items."""
        places = np.flatnonzero(self._marked >= min_marked)
        if not len(places):
            return None
        precision = self._hits[places] / self._marked[places]
        return self._stop(int(places[np.flatnonzero(precision == precision.max())[-1]]))

    def best_f1(self) -> Rates | None:
        """The threshold with the highest F1, of several the highest one; None if no item is wrong."""
        if not self._wrong:
            return None
        return self._stop(int(np.argmax(2 * self._hits / (self._marked + self._wrong))))

    def _stop(self, place: int) -> Rates:
        """Rates if items up to the end of a group are marked. The threshold is midway to the next score, for safe rounding."""
        below = self._scores[place + 1] if place + 1 < len(self._scores) else self._scores[place]
        threshold = float((self._scores[place] + below) / 2)
        if threshold <= below:  # adjacent floats, or the last group
            threshold = float(self._scores[place])
        return self._rates(threshold, int(self._marked[place]), int(self._hits[place]))

    def _rates(self, threshold: float, marked: int, hits: int) -> Rates:
        precision, recall = hits / marked if marked else 0.0, hits / self._wrong if self._wrong else 0.0
        f1 = 2 * hits / (marked + self._wrong) if marked + self._wrong else 0.0
        return Rates(threshold, precision, recall, f1, marked, hits)
