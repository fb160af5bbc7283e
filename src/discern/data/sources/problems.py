"""Problems of the input that do not stop the work, counted by kind, with examples of each."""

from __future__ import annotations

from discern.config.schema import Section

MAX_EXAMPLES = 10


class Problem(Section):
    """A kind of problem, how often it occurred, and up to ten places where it did."""

    kind: str
    count: int
    examples: tuple[str, ...]

    def __str__(self) -> str:
        more = ", ..." if self.count > len(self.examples) else ""
        return f"{self.kind}: {self.count:,} ({', '.join(self.examples)}{more})"


class ProblemLog:
    """Collects problems in order of occurrence, in bounded memory."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._examples: dict[str, list[str]] = {}
        self._notes: dict[str, None] = {}

    def add(self, kind: str, where: str, count: int = 1) -> None:
        """Count a problem.

        Args:
            where: the file and the place in it.
        """
        self._counts[kind] = self._counts.get(kind, 0) + count
        examples = self._examples.setdefault(kind, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(where)

    def merge(self, problem: Problem) -> None:
        """Count a kind of problem of another log, whose input follows."""
        self._counts[problem.kind] = self._counts.get(problem.kind, 0) + problem.count
        examples = self._examples.setdefault(problem.kind, [])
        examples += problem.examples[: MAX_EXAMPLES - len(examples)]

    def note(self, line: str) -> None:
        """Record a decision about the input. Repeated lines are kept once."""
        self._notes[line] = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Decisions about the input."""
        return tuple(self._notes)

    def summary(self) -> tuple[Problem, ...]:
        """Every kind of problem, in order of first occurrence."""
        return tuple(
            Problem(kind=kind, count=count, examples=tuple(self._examples[kind])) for kind, count in self._counts.items()
        )
