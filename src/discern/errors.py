"""Errors that a user can act on: what was found, what was expected, and what to type next."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class DiscernError(Exception):
    """Base class of all errors that discern raises on purpose.

    Args:
        message: what was found and what was expected, one or more lines.
        hint: what to do next, ideally a command or a setting to type.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class ConfigError(DiscernError):
    """The command or the configuration asks for something that does not exist or is not possible."""

    exit_code = 2


class DataError(DiscernError):
    """A file or data set is missing, unreadable, or does not fit the rest of the command."""


class CheckpointError(DiscernError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class MissingHeadError(CheckpointError):
    """A model without a pre-training head, such as a classifier, was asked for what only the pre-training head can do."""


class NumericsError(DiscernError):
    """A loss or gradient is not finite."""


class RanksError(DiscernError):
    """One of several processes that train together has ended, or does not respond."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to `name`; None if none is similar."""
    matches = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Hint for an unknown name: the most similar known one, or all of them if none is similar."""
    names = sorted(known)
    match = nearest(name, names)
    return f"did you mean '{match}'?" if match else f"known: {', '.join(names)}"


def counted(count: int, noun: str) -> str:
    """`count` and `noun`, which gets an "s" unless the count is 1: "1 row", "1,024 rows"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
