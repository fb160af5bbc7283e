"""How text becomes documents: lines and records cut into documents of sentences, with bounded memory, and the problems met."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Literal, TypeAlias

import numpy as np

from discern.config.schema import Section

TokenIds: TypeAlias = np.ndarray
"""Token ids of a pre-tokenized document or part of a stream: int64, one dimension."""
Document: TypeAlias = list[str] | TokenIds
"""The sentences of a document, stripped, none of them empty; or the token ids of pre-tokenized input."""
DocumentRule = Literal["auto", "blank-line", "file", "line", "record"]

MAX_EXAMPLES = 10
# Limits of the text in memory at one time, in characters.
LONGEST_SENTENCE, LONGEST_DOCUMENT = 1 << 16, 1 << 24
_SHORTEST = 8


class Problem(Section):
    """A kind of problem, how often it occurred, and up to ten places where it did."""

    kind: str
    count: int
    examples: tuple[str, ...]

    def __str__(self) -> str:
        more = ", ..." if self.count > len(self.examples) else ""
        return f"{self.kind}: {self.count:,} ({', '.join(self.examples)}{more})"


class ProblemLog:
    """Collects problems that do not stop the work, in order of occurrence, in bounded memory."""

    def __init__(self) -> None:
        self._problems: dict[str, Problem] = {}
        self._notes: dict[str, str] = {}

    def add(self, kind: str, where: str, count: int = 1) -> None:
        """Count a problem.

        Args:
            where: the file and the place in it.
        """
        self.merge(Problem(kind=kind, count=count, examples=(where,)))

    def merge(self, problem: Problem) -> None:
        """Count a kind of problem of another log, whose input follows."""
        before = self._problems.get(problem.kind, Problem(kind=problem.kind, count=0, examples=()))
        examples = (*before.examples, *problem.examples)[:MAX_EXAMPLES]
        self._problems[problem.kind] = Problem(kind=problem.kind, count=before.count + problem.count, examples=examples)

    def note(self, line: str, about: str | None = None) -> None:
        """Record a decision about the input. Of the notes about one thing (by default, of equal lines), the first is kept."""
        self._notes.setdefault(about or line, line)

    @property
    def notes(self) -> tuple[str, ...]:
        """Decisions about the input."""
        return tuple(self._notes.values())

    def summary(self) -> tuple[Problem, ...]:
        """Every kind of problem, in order of first occurrence."""
        return tuple(self._problems.values())


@dataclass(frozen=True)
class CorpusOptions:
    """How text becomes documents.

    Attributes:
        documents: the separator of documents. With 'auto', the end of a record or `<doc>`, and in running text a blank line.
        text_fields: names of fields or columns that hold the text: NAME, or PATTERN:NAME for the inputs that a pattern matches.
            Without one, it is chosen by `text_column`.
        exclude: patterns of files to leave out of folders, glob patterns and archives.
        encoding: encoding of all text; None: UTF-8, or detected in each file that is not.
    """

    documents: DocumentRule = "auto"
    text_fields: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    encoding: str | None = None

    def text_field(self, name: str) -> str | None:
        """The field or column that holds the text of an input; None if it is not given."""
        parted = [entry.rpartition(":") for entry in self.text_fields]
        fitting = [field for pattern, _, field in parted if pattern and _matches(name, pattern)]
        return next(iter(fitting + [field for pattern, _, field in parted if not pattern]), None)

    def excludes(self, path: str) -> bool:
        """Whether a file is left out, by its path below the input."""
        return any(_matches(path, pattern) for pattern in self.exclude)


def _matches(path: str, pattern: str) -> bool:
    """Whether a pattern matches a path or the end of it, from the name of a folder or file on."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*[/!]{pattern}")


@dataclass(frozen=True)
class Lines:
    """Consecutive lines of text.

    Attributes:
        lines: text without line ends, not stripped.
        ends_record: whether a record (`<doc>`, JSON object, row) ends here.
    """

    lines: list[str]
    ends_record: bool = False


def documents(
    batches: Iterable[Lines], options: CorpusOptions, name: str, problems: ProblemLog, *, are_records: bool
) -> Iterator[list[str]]:
    """Documents of stripped, non-empty sentences. A sentence is a line and counts as at least `_SHORTEST` characters.

    Lines and documents beyond the limits are split and reported.
    """
    sentences: list[str] = []
    size = 0
    for sentence in chain(_sentences(batches, options.documents, name, problems, are_records), [None]):
        if sentence is not None:
            sentences.append(sentence)
            size += len(sentence)
            if size < LONGEST_DOCUMENT and len(sentences) < LONGEST_DOCUMENT // _SHORTEST:
                continue
            problems.add("document split, as it is too long", f"{name}: after {sentence[:40]!r}")
        if sentences:
            yield sentences
        sentences, size = [], 0


def _sentences(
    batches: Iterable[Lines], rule: DocumentRule, name: str, problems: ProblemLog, are_records: bool
) -> Iterator[str | None]:
    """The sentences of all documents, with None at the end of each."""
    cuts_at_blank = rule == "blank-line" or (rule == "auto" and not are_records)
    for batch in batches:
        for raw in batch.lines:
            line = raw.strip()
            if len(line) > LONGEST_SENTENCE:
                problems.add("line split, as it is too long", f"{name}: {line[:40]!r}...")
                yield from _split_line(line, LONGEST_SENTENCE)
            elif line:
                yield line
            if rule == "line" or (cuts_at_blank and not line):
                yield None
        if batch.ends_record and rule != "file":
            yield None


def _split_line(line: str, limit: int) -> list[str]:
    """Stripped pieces of at most `limit` characters, cut at white space if possible."""
    # The rest; otherwise up to the last space or tab; otherwise any characters.
    pieces = re.findall(rf"(?s).{{1,{limit}}}\Z|.{{1,{limit - 1}}}[ \t]|.{{1,{limit}}}", line)
    return [piece for raw in pieces if (piece := raw.strip())]
