"""Small samples: p by hand, against scipy, and the least that p can be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import permutation_test

from discern.compare.summary import compare_samples


def test_three_against_three_that_do_not_overlap_give_the_least_p() -> None:
    found = compare_samples([0.7, 0.8, 0.9], [0.1, 0.2, 0.3])
    assert found.p == pytest.approx(2 / 20)
    assert found.smallest_p == pytest.approx(2 / 20)
    assert found.median == pytest.approx(0.6)
    assert found.verdict == "every seed above every seed of the reference"
    assert compare_samples([0.1, 0.2, 0.3], [0.7, 0.8, 0.9]).verdict == "every seed below every seed of the reference"


def test_by_hand() -> None:
    # {1, 4} against {2, 3}: all six ways part them by 0, 1 or 2 in the mean; every one is at least as far apart as 0.
    found = compare_samples([1.0, 4.0], [2.0, 3.0])
    assert found.p == 1.0
    assert found.verdict == "the seeds overlap"
    # {3, 4} against {1, 2} and its mirror image: two of six.
    assert compare_samples([3.0, 4.0], [1.0, 2.0]).p == pytest.approx(1 / 3)


def test_ties_count_as_equally_far_apart_whatever_the_rounding() -> None:
    assert compare_samples([0.1, 0.2], [0.3, 0.0]).p == 1.0
    assert compare_samples([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]).p == 1.0


def test_unequal_sizes_have_no_mirror_image() -> None:
    found = compare_samples([5.0, 6.0], [1.0, 2.0, 3.0])
    assert found.smallest_p == pytest.approx(1 / 10)
    assert found.p == pytest.approx(1 / 10)


def test_one_seed_has_no_p() -> None:
    found = compare_samples([0.5], [0.4])
    assert found.p is None
    assert found.smallest_p == 1.0


@pytest.mark.parametrize("sizes", [(3, 3), (4, 5), (5, 5)])
def test_as_scipy(sizes: tuple[int, int]) -> None:
    rng = np.random.default_rng(sum(sizes))
    first, second = rng.normal(0.6, 0.1, sizes[0]), rng.normal(0.5, 0.1, sizes[1])
    theirs = permutation_test(
        (first, second), lambda a, b: abs(a.mean() - b.mean()), n_resamples=math.inf, alternative="greater"
    ).pvalue
    assert compare_samples(first.tolist(), second.tolist()).p == pytest.approx(theirs)


def test_many_seeds_are_drawn_from_and_the_same_again() -> None:
    first, second = np.linspace(0, 1, 12).tolist(), np.linspace(0.3, 1.3, 12).tolist()
    found = compare_samples(first, second)
    assert found == compare_samples(first, second)
    assert 0 < (found.p or 0) < 0.2
    assert not found.exact
