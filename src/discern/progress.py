"""How long work tells of its advance, without knowing who listens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """A listener for work that takes more than two seconds. The command line shows a bar, or plain lines."""

    def start(self, description: str, total: float | None, unit: str) -> None:
        """Begin a stage of `total` units (None: unknown)."""

    def advance(self, amount: float, **figures: str) -> None:
        """`amount` more units are done; `figures` (short, by name) are shown beside the bar."""

    def note(self, message: str) -> None:
        """A line that stays on the screen: a warning, an evaluation, a file written."""

    def finish(self) -> None:
        """The stage is over."""


def warning_to(progress: Progress) -> Callable[[str], None]:
    """What tells a listener of a warning: a line that stays and begins with the word."""
    return lambda message: progress.note(f"warning: {message}")


class Silent:
    """A listener that shows nothing: for library use and tests."""

    def start(self, description: str, total: float | None, unit: str) -> None: ...

    def advance(self, amount: float, **figures: str) -> None: ...

    def note(self, message: str) -> None: ...

    def finish(self) -> None: ...


class Logged(Silent):
    """A listener for library use: lines go to the logger `discern`, and the rest is not shown."""

    def note(self, message: str) -> None:
        warns = message.startswith("warning: ")
        logging.getLogger("discern").log(logging.WARNING if warns else logging.INFO, "%s", message.removeprefix("warning: "))
