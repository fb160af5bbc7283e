"""What a few seeds allow one to say: median and spread, and an exact test of two small samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_EXACT_UP_TO = 200_000  # ways to part the seeds; beyond, that many are drawn


@dataclass(frozen=True)
class Difference:
    """Two samples compared.

    Attributes:
        median: of the first sample less that of the second.
        p: two-sided, of a permutation test of the difference of the means; None where a sample has fewer than two values.
        smallest_p: the smallest p that samples of these sizes can give, however far apart they are.
        verdict: in words, whether the samples overlap.
    """

    median: float
    p: float | None
    smallest_p: float
    verdict: str


def compare_samples(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Compare two samples of at least one value each.

    The test asks how many of all ways to part the pooled values into two groups of these sizes give means at least as far
    apart. It assumes nothing of the values but that they could be exchanged if there were no difference. It is unpaired:
    pairing the seeds would have a still larger smallest p at these numbers (2 of 2^n instead of 2 of n from 2n).
    """
    ways = math.comb(len(first) + len(second), len(first))
    # Mirror images, which equal sizes have among the partings, are as far apart.
    smallest = min(1.0, (2 if len(first) == len(second) else 1) / ways)
    p = None
    if min(len(first), len(second)) >= 2:
        p = _permuted(np.asarray(first, float), np.asarray(second, float), ways)
    return Difference(float(np.median(first) - np.median(second)), p, smallest, _verdict(first, second))


def _permuted(first: np.ndarray, second: np.ndarray, ways: int) -> float:
    """Share of the partings whose means are at least as far apart as those of the samples."""
    pooled, size = np.concatenate([first, second]), len(first)
    if ways <= _EXACT_UP_TO:
        chosen = np.array(list(itertools.combinations(range(len(pooled)), size)))
    else:
        draws = np.random.default_rng(0).random((_EXACT_UP_TO, len(pooled))).argsort(axis=1)[:, :size]
        chosen = np.concatenate([np.arange(size)[None], draws])  # the samples themselves are one of the ways
    sums = pooled[chosen].sum(axis=1)
    apart = np.abs(sums / size - (pooled.sum() - sums) / len(second))
    # Partings with the same values in another order must count as equally far apart, whatever the rounding.
    return float(np.mean(apart >= abs(first.mean() - second.mean()) - 1e-12))


def _verdict(first: Sequence[float], second: Sequence[float]) -> str:
    if min(first) > max(second):
        return "every seed above every seed of the reference"
    if max(first) < min(second):
        return "every seed below every seed of the reference"
    return "the seeds overlap"
