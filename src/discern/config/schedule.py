"""Schedules: points in a run, as settings give them, and the segments of equal steps that they divide it into."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field


def _fraction_or_step(value: float) -> float:
    if value >= 1 and value != int(value):
        raise ValueError("expected a whole number of steps, or a fraction of the run below 1")
    return value if 0 < value < 1 else int(value)


if TYPE_CHECKING:
    RunPoint = int
else:
    RunPoint = Annotated[float, AfterValidator(_fraction_or_step)]
"""A point in a run: a fraction of the run if it is below 1, otherwise a step. In the configuration of a run it is a step."""

SizeSchedule = tuple[tuple[RunPoint, int], ...]
"""Where each segment begins, and its value: ((0, 16384), (0.5, 65536))."""
MixtureSchedule = tuple[tuple[RunPoint, tuple[Annotated[float, Field(ge=0)], ...]], ...]
"""Where each segment begins, and the weight of each source: ((0, (0.7, 0.3)), (0.8, (0.2, 0.8)))."""


@dataclass(frozen=True)
class ScheduleSegment:
    """Consecutive steps of the same size and the same mixture.

    Attributes:
        first: the first step.
        rows: rows per step, over all ranks.
        length: positions per row.
        examples: rows read before the first step.
        positions: positions read before the first step.
        weights: weight of each source; empty: by their sizes.
    """

    first: int
    rows: int
    length: int
    examples: int = 0
    positions: int = 0
    weights: tuple[float, ...] = ()


def to_step(point: float, max_steps: int) -> int:
    """The step of a point in a run of `max_steps` steps; a fraction above 0 is at least one step."""
    return max(1, round(point * max_steps)) if 0 < point < 1 else int(point)


def to_steps(value: Any, max_steps: int) -> Any:
    """A setting that is a point in a run, or a list of points with values, with every point as a step; None stays None."""
    if isinstance(value, tuple):
        return tuple((to_step(point, max_steps), other) for point, other in value)
    return None if value is None else to_step(value, max_steps)


def last_point(value: Any) -> float:
    """The last point that such a setting names; 0 if it names none."""
    return value[-1][0] if isinstance(value, tuple) and value else value or 0


def check_schedule(name: str, schedule: tuple[tuple[RunPoint, Any], ...], least: int | None = 1) -> None:
    """Check that a schedule begins at 0, and that the points and the values of its segments increase.

    Args:
        least: smallest value; None: the values are not compared.

    Raises:
        ValueError: it does not, or they do not.
    """
    points, values = [point for point, _ in schedule], [value for _, value in schedule]
    if points and points[0] != 0:
        raise ValueError(f"{name} begins at {points[0]:g}; its first segment must begin at 0, as in [[0, ...], [0.5, ...]]")
    # A fraction and a step are compared when the length of the run is known.
    if any(right <= left for left, right in pairwise(points) if (left < 1) == (right < 1) or left == 0):
        raise ValueError(f"the segments of {name} begin at {points}; each must begin after the one before")
    if least is not None and any(right <= left for left, right in pairwise([least - 1, *values])):
        raise ValueError(f"{name} has the values {values}; each must be larger than the one before, the first at least {least}")
