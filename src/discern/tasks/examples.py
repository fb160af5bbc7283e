"""Examples of tasks: plain values, the same for every file format of a family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from discern.data.sources.problems import Problem

E = TypeVar("E")
# A class, a number (regression), several classes at once, or unknown.
Label = str | float | tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class ClassificationExample:
    """A text or a pair of texts with its label.

    Attributes:
        id: unique within its file; the official id if the format has one.
        label: a str is a class, a float a score, a tuple a set of classes; None if the file has no labels.
    """

    id: str
    text: str
    pair: str | None = None
    label: Label = None


@dataclass(frozen=True, slots=True)
class TaggingExample:
    """The words of a sentence with their tags, None if the file has no tags."""

    id: str
    words: tuple[str, ...]
    tags: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in a context: `context[start : start + len(text)] == text` exactly."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class QuestionExample:
    """A question about a context.

    Attributes:
        answers: answers that occur in the context; training uses the first.
        golds: texts that the official metric compares with, whether they occur in the context or not.
        impossible: whether the context contains no answer; None if unknown (a test file).
    """

    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] = ()
    golds: tuple[str, ...] = ()
    impossible: bool | None = None


@dataclass(frozen=True, slots=True)
class TextGroup:
    """Texts whose vectors are compared: an anchor, its positive and its negatives; or a query, or a document, alone.

    Attributes:
        texts: anchor, positive, negatives in this order; or a single text.
        score: similarity of the first two texts, as judged by people; None if unknown.
        relevant: ids of the documents that are relevant for a query, with their grades; None if this is not a query.
        judged: whether the similarity of the first two texts is asked for although its score is unknown.
    """

    id: str
    texts: tuple[str, ...]
    score: float | None = None
    relevant: tuple[tuple[str, float], ...] | None = None
    judged: bool = False

    @property
    def text(self) -> str:
        """The anchor, the query or the document."""
        return self.texts[0]


@dataclass(frozen=True, slots=True)
class Reading(Generic[E]):
    """The content of a file.

    Attributes:
        examples: examples in the order of the file.
        source: name of the file in messages.
        problems: rows that were left out or corrected, counted by kind, with the first few places (`file:line` and reason).
        notes: decisions of the reader, one per line, such as the columns or the tag scheme.
        places: `file:line` of each example; empty if unknown.
        indivisible: whether the examples only make sense together, as queries and the documents that are searched.
    """

    examples: tuple[E, ...]
    source: str
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    indivisible: bool = False

    def place(self, number: int) -> str:
        """Place of an example in its file, for messages."""
        return self.places[number] if self.places else f"{self.source}, example {getattr(self.examples[number], 'id', number)}"


def label_counts(examples: Sequence[ClassificationExample]) -> dict[str, int]:
    """Number of examples of each class, the most frequent first, ties sorted by name. Scores are not counted."""
    counts: Counter[str] = Counter()
    for example in examples:
        if isinstance(example.label, str):
            counts[example.label] += 1
        elif isinstance(example.label, tuple):
            counts.update(example.label)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def tag_counts(examples: Sequence[TaggingExample]) -> dict[str, int]:
    """Number of occurrences of each tag, the most frequent first, ties sorted by name."""
    counts = Counter(tag for example in examples for tag in example.tags or ())
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
