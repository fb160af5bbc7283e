"""Weights of a loss as a function of the step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Point = tuple[int, float]
"""A step, and the factor of the weight there."""


def factor_at(points: Sequence[Point], step: int) -> float:
    """The factor of a weight at a step: straight lines between the points, level before the first and after the last.

    No points: 1 throughout. [[0, 0.0], [1000, 1.0]] is a warm-up of 1000 steps; [[999, 1.0], [1000, 0.0]] stops at step 1000.
    """
    if not points:
        return 1.0
    if step <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in pairwise(points):
        if step <= right:
            return low + (high - low) * (step - left) / (right - left)
    return points[-1][1]


def check_points(name: str, points: Sequence[Point]) -> None:
    """Raise a ValueError where the steps don't rise or a factor is negative."""
    steps = [step for step, _ in points]
    if any(right <= left for left, right in pairwise(steps)) or any(step < 0 for step in steps):
        raise ValueError(f"{name} has the steps {steps}; each must be larger than the one before, the first at least 0")
    if any(factor < 0 for _, factor in points):
        raise ValueError(f"{name} has a negative factor; 0 switches the loss off")
