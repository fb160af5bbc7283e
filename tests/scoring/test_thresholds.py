"""Thresholds on scores whose precision and recall are counted by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from discern.scoring.thresholds import Rates, ThresholdCurve

# From the highest: wrong, wrong, right, wrong, right, right, wrong, right; two pairs of equal scores.
SCORES = [0.9, 0.8, 0.7, 0.7, 0.5, 0.4, 0.2, 0.2]
WRONG = [True, True, False, True, False, False, True, False]


def curve() -> ThresholdCurve:
    order = np.random.default_rng(0).permutation(len(SCORES))
    return ThresholdCurve(np.array(SCORES)[order], np.array(WRONG)[order])


@pytest.mark.parametrize(
    ("threshold", "marked", "hits"),
    [(1.0, 0, 0), (0.9, 1, 1), (0.85, 1, 1), (0.8, 2, 2), (0.7, 4, 3), (0.71, 2, 2), (0.5, 5, 3), (0.2, 8, 4), (0.0, 8, 4)],
)
def test_a_score_that_equals_the_threshold_is_marked(threshold: float, marked: int, hits: int) -> None:
    rates = curve().at(threshold)
    assert (rates.threshold, rates.marked, rates.hits) == (threshold, marked, hits)
    assert rates.precision == (hits / marked if marked else 0)
    assert rates.recall == hits / 4
    assert rates.f1 == pytest.approx(2 * hits / (marked + 4))


def test_the_lowest_threshold_of_a_precision_is_found_and_equal_scores_are_not_parted() -> None:
    # 0.9: 1/1, 0.8: 2/2, 0.7: 3/4, 0.5: 3/5, 0.4: 3/6, 0.2: 4/8.
    assert curve().reaching(1.0) == Rates(0.75, 1.0, 0.5, 2 / 3, 2, 2)
    assert curve().reaching(0.75) == Rates(0.6, 0.75, 0.75, 0.75, 4, 3)
    # Precision falls and rises: 3/6 and 4/8 are the same one half, and of these the higher recall counts.
    assert curve().reaching(0.5) == Rates(0.2, 0.5, 1.0, 2 / 3, 8, 4)


def test_thresholds_lie_midway_so_that_rounding_moves_nothing() -> None:
    found = curve().reaching(0.75)
    assert found is not None
    noise = np.random.default_rng(1).uniform(-1e-6, 1e-6, len(SCORES))
    assert ThresholdCurve(np.array(SCORES) + noise, WRONG).at(found.threshold).marked == found.marked


def test_what_cannot_be_reached_is_none_and_the_best_is_told() -> None:
    never = ThresholdCurve([0.9, 0.8, 0.7, 0.6], [False, True, True, False])
    # 0/1, 1/2, 2/3, 2/4.
    assert never.reaching(0.7) is None
    best = never.most_precise()
    assert best is not None
    assert (best.precision, best.recall, best.marked) == (pytest.approx(2 / 3), 1.0, 3)
    assert best.threshold == pytest.approx(0.65)


def test_a_handful_of_marks_is_no_evidence() -> None:
    assert curve().reaching(1.0, fewest=3) is None
    best = curve().most_precise(fewest=3)
    assert best is not None
    assert (best.marked, best.precision) == (4, 0.75)
    assert curve().most_precise(fewest=9) is None


def test_best_f1() -> None:
    best = curve().best_f1()
    assert best is not None
    assert (best.marked, best.f1) == (4, 0.75)
    assert ThresholdCurve([0.1, 0.2], [False, False]).best_f1() is None


def test_nothing_and_one() -> None:
    empty = ThresholdCurve([], [])
    assert empty.at(0.5) == Rates(0.5, 0.0, 0.0, 0.0, 0, 0)
    assert empty.reaching(0.5) is None
    assert empty.most_precise() is None
    assert ThresholdCurve([0.3], [True]).reaching(1.0) == Rates(0.3, 1.0, 1.0, 1.0, 1, 1)
    with pytest.raises(ValueError, match="one length"):
        ThresholdCurve([0.3], [True, False])


def test_neighbouring_floats_stay_apart() -> None:
    low = 0.5
    high = math.nextafter(low, 1)
    assert ThresholdCurve([high, low], [True, False]).reaching(1.0) == Rates(high, 1.0, 1.0, 1.0, 1, 1)


def test_by_closed_form_on_two_uniform_distributions() -> None:
    """Wrong ones uniform on (0, 1), right ones on (0, 1/2), as many of each: from t >= 1/2 on precision is 1, and below it
    (1 - t) / ((1 - t) + (1 - 2t)), which is 0.8 at t = 3/7."""
    n = 20_000
    grid = (np.arange(n) + 0.5) / n
    found = ThresholdCurve(np.concatenate([grid, grid / 2]), np.arange(2 * n) < n).reaching(0.8)
    assert found is not None
    assert found.threshold == pytest.approx(3 / 7, abs=1e-3)
    assert found.recall == pytest.approx(4 / 7, abs=1e-3)


def test_the_interval_is_wilson_s() -> None:
    # 8 of 10: the textbook's 0.490 to 0.943.
    low, high = Rates(0.5, 0.8, 1.0, 0.0, 10, 8).precision_interval()
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert Rates(0.5, 0.0, 0.0, 0.0, 0, 0).precision_interval() == (0.0, 1.0)
    assert Rates(0.5, 1.0, 1.0, 1.0, 3, 3).precision_interval()[1] == 1.0
