"""The protocol by which long work reports its progress, independent of who listens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

SHARE = "share"
"""Unit of a stage whose total is 1, shown in percent."""


@runtime_checkable
class Progress(Protocol):
    """A listener for work that takes more than two seconds. The command line shows a bar or plain lines."""

    def start(self, description: str, total: float | None, unit: str) -> None:
        """Begin a stage of `total` units; None if unknown."""

    def advance(self, amount: float, **metrics: str) -> None:
        """Report that `amount` more units are done. `metrics` (short, by name) are shown beside the bar."""

    def note(self, message: str) -> None:
        """Print a line that stays on the screen: a warning, an evaluation, a file written."""

    def finish(self) -> None:
        """End the stage."""


def warning_to(progress: Progress) -> Callable[[str], None]:
    """A function that prints warnings through a listener."""
    return lambda message: progress.note(f"warning: {message}")


class BudgetProgress:
    """Progress of work with a time budget: counts steps and reports the fraction of the budget that is used.

    Args:
        listener: listener that the fraction, the time and the steps are reported to.
        seconds: budget in seconds.
        used: seconds that are already used.
        max_units: units after which the work ends even if time is left. Not shown, as the time usually ends first.
        clock: returns the current time in seconds.
    """

    def __init__(
        self,
        listener: Progress,
        seconds: float,
        used: float = 0.0,
        max_units: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener, self._seconds, self._max_units, self._clock = listener, seconds, max_units, clock
        self._began = clock() - used
        self._units = self._shown = 0.0
        self._unit = ""

    def start(self, description: str, total: float | None, unit: str) -> None:
        """Begin a stage. `unit` is the unit that `advance` counts; `total` is ignored."""
        self._unit, self._units, self._shown = unit, 0.0, 0.0
        self._listener.start(description, 1.0, SHARE)

    def advance(self, amount: float, **metrics: str) -> None:
        self._units += amount
        used = min(self._clock() - self._began, self._seconds)
        share = max(used / self._seconds, self._units / self._max_units if self._max_units else 0.0)
        counts = {"time": f"{duration(used)}/{duration(self._seconds)}", self._unit: f"{self._units:,.0f}"}
        self._listener.advance(max(share - self._shown, 0.0), **counts, **metrics)
        self._shown = max(share, self._shown)

    def note(self, message: str) -> None:
        self._listener.note(message)

    def finish(self) -> None:
        self._listener.finish()


def duration(seconds: float) -> str:
    """ "0:07", "12:30", "3:02:11", "2 days 4:00"."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} days {hours % 24}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def duration_in_words(seconds: float) -> str:
    """ "45 seconds", "10 minutes", "2.5 hours"."""
    if seconds < 120:
        return f"{seconds:,.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:,.1f} hours"


class Silent:
    """A listener that shows nothing, for library use and tests."""

    def start(self, description: str, total: float | None, unit: str) -> None: ...

    def advance(self, amount: float, **metrics: str) -> None: ...

    def note(self, message: str) -> None: ...

    def finish(self) -> None: ...
