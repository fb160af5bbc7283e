"""The examples that task files are read into: plain values, the same for every format of a family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from discern.data.problems import Problem

E = TypeVar("E")
# A class, a number (regression), several classes at once, or unknown.
Label = str | float | tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class ClassificationExample:
    """A text, or a pair of texts, and what it is.

    Attributes:
        id: unique within its file; the official one where the format has one.
        label: a str is a class, a float a score, a tuple several classes at once; None where the file has no labels.
    """

    id: str
    text: str
    pair: str | None = None
    label: Label = None


@dataclass(frozen=True, slots=True)
class TaggingExample:
    """The words of a sentence, and a tag for each; None where the file has no tags."""

    id: str
    words: tuple[str, ...]
    tags: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A piece of a context: `context[start : start + len(text)] == text`, to the character."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class QuestionExample:
    """A question about a context.

    Attributes:
        answers: where the answers stand; the first is what training takes. Only answers that occur in the context.
        golds: the texts that the official metric compares with, whether they occur in the context or not.
        impossible: the context holds no answer; None where the file does not say (a test file).
    """

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] = ()
    golds: tuple[str, ...] = ()
    impossible: bool | None = None


@dataclass(frozen=True, slots=True)
class Reading(Generic[E]):
    """What a file gave.

    Attributes:
        examples: in the order of the file.
        source: the file, as messages call it.
        problems: what was left out or put right, counted by kind with the first few places (`file:line` and why).
        notes: what was decided in reading, a line each: which column is what, which tag scheme.
        places: of each example, `file:line`; empty where that is not known.
    """

    examples: tuple[E, ...]
    source: str
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    places: tuple[str, ...] = ()

    def place(self, number: int) -> str:
        """Where an example stands, for messages."""
        return self.places[number] if self.places else f"{self.source}, example {getattr(self.examples[number], 'id', number)}"


def label_counts(examples: Sequence[ClassificationExample]) -> dict[str, int]:
    """How often each class occurs, the most frequent first and equals by name. Scores count as nothing."""
    counts: Counter[str] = Counter()
    for example in examples:
        if isinstance(example.label, str):
            counts[example.label] += 1
        elif isinstance(example.label, tuple):
            counts.update(example.label)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def tag_counts(examples: Sequence[TaggingExample]) -> dict[str, int]:
    """How often each tag occurs, the most frequent first and equals by name."""
    counts = Counter(tag for example in examples for tag in example.tags or ())
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
