"""Small samples: p by hand, and the smallest that p can be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from discern.compare.summary import compare_samples

ABOVE, BELOW = "every seed above every seed of the reference", "every seed below every seed of the reference"


@pytest.mark.parametrize(
    ("first", "second", "p", "smallest", "verdict"),
    [
        ([0.7, 0.8, 0.9], [0.1, 0.2, 0.3], 2 / 20, 2 / 20, ABOVE),
        ([0.2, 0.3], [0.7, 0.8], 1 / 3, 1 / 3, BELOW),
        # All six ways part {1, 4} and {2, 3} by 0, 1 or 2 in the mean; every one is at least as far apart as 0.
        ([1.0, 4.0], [2.0, 3.0], 1.0, 1 / 3, "the seeds overlap"),
        # Ties, despite rounding
        ([0.1, 0.2], [0.3, 0.0], 1.0, 1 / 3, "the seeds overlap"),
        # Groups of unequal sizes have no mirror image.
        ([5.0, 6.0], [1.0, 2.0, 3.0], 1 / 10, 1 / 10, ABOVE),
        ([0.5], [0.4], None, 1.0, ABOVE),
    ],
)
def test_by_hand(first: list[float], second: list[float], p: Any, smallest: float, verdict: str) -> None:
    found = compare_samples(first, second)
    assert found["p"] == (p if p is None else pytest.approx(p))
    assert found["smallest_p"] == pytest.approx(smallest)
    assert found["verdict"] == verdict
    assert found["exact"]


def test_many_seeds_are_drawn_from() -> None:
    found = compare_samples(np.linspace(0, 1, 12).tolist(), np.linspace(0.3, 1.3, 12).tolist())
    assert 0 < found["p"] < 0.2
    assert not found["exact"]
