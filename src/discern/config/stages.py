"""Values that grow in stages during a run: `[[0, 16384], [50_000_000, 65536]]`, by the number of tokens read so far."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

ValueT = TypeVar("ValueT")

Stage = tuple[int, int]
"""The number of tokens after which the stage begins, and its value."""


def stage_at(stages: Sequence[Stage], tokens: int) -> int:
    """The value after this number of tokens; the first stage begins at 0."""
    return next(value for begin, value in reversed(stages) if begin <= tokens)


def rescaled(stages: Sequence[tuple[int, ValueT]], factor: float) -> tuple[tuple[int, ValueT], ...]:
    """The stages with their beginnings multiplied by a factor. Those that rounding makes equal are moved apart by one.

    They move to before the last one; only where there is no room, in a very short schedule, after it.
    """
    found: list[int] = []
    for begin, _ in stages:
        moved = round(begin * factor)
        found.append(max(moved, found[-1] + 1) if found else moved)
    if stages and (end := round(stages[-1][0] * factor)) >= len(stages) - 1:
        found = [min(begin, end - after) for after, begin in zip(reversed(range(len(found))), found, strict=True)]
    return tuple((begin, value) for begin, (_, value) in zip(found, stages, strict=True))


def check_stages(name: str, stages: Sequence[Stage], least: int = 1) -> None:
    """Check that a schedule begins at token 0, and that the beginnings and the values of its stages increase.

    Args:
        least: smallest value.

    Raises:
        ValueError: it does not, or they do not.
    """
    if not stages:
        return
    begins, values = [begin for begin, _ in stages], [value for _, value in stages]
    example = "[[0, 128], [40000000, 512]]" if "length" in name else "[[0, 16384], [50000000, 65536]]"
    if begins[0] != 0:
        raise ValueError(f"{name} begins at token {begins[0]:,}; expected 0 in its first stage, as in {example}")
    if any(right <= left for left, right in pairwise(begins)):
        raise ValueError(f"the stages of {name} begin at the tokens {begins}; each must begin after the one before")
    if any(right <= left for left, right in pairwise(values)) or values[0] < least:
        raise ValueError(f"{name} has the values {values}; each must be larger than the one before, the first at least {least}")
