"""How text becomes documents: lines and records cut into documents of sentences, with bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from discern.data.sources.problems import ProblemLog

Document = list[str]
"""The sentences of a document: stripped, none of them empty."""

DocumentRule = Literal["auto", "blank-line", "file", "line", "record"]

_SHORTEST = 8


@dataclass(frozen=True)
class Limits:
    """Limits of the text in memory at one time, in characters unless the name states another unit."""

    sentence: int = 1 << 16
    document: int = 1 << 24
    record_bytes: int = 1 << 26


@dataclass(frozen=True)
class CorpusOptions:
    """How text becomes documents.

    Attributes:
        documents: the separator of documents. With 'auto', the end of a record or `<doc>`, and in running text a blank line.
        text_field: name of the field or column that holds the text. If None, it is chosen by `text_column`.
        limits: limits of the text in memory at one time.
    """

    documents: DocumentRule = "auto"
    text_field: str | None = None
    limits: Limits = field(default_factory=Limits)

    @property
    def record_field(self) -> str:
        """Name of the field in records of data sets."""
        return self.text_field or "text"


@dataclass(frozen=True)
class Cut:
    """Where documents end, besides the end of a file."""

    at_record: bool = False
    at_blank: bool = False
    at_line: bool = False


@dataclass(frozen=True)
class Lines:
    """Consecutive lines of text.

    Attributes:
        lines: text without line ends, not stripped.
        continues: whether the last line continues in the next batch.
        ends_record: whether a record (`<doc>`, JSON object, row) ends here.
    """

    lines: list[str]
    continues: bool = False
    ends_record: bool = False


def documents(batches: Iterable[Lines], cut: Cut, name: str, limits: Limits, problems: ProblemLog) -> Iterator[Document]:
    """Documents of stripped, non-empty sentences. A sentence is a line and counts as at least `_SHORTEST` characters.

    Lines and documents beyond the limits are split and reported.
    """
    sentences: Document = []
    size, continued, full = 0, False, False
    for batch in batches:
        for index, raw in enumerate(batch.lines):
            goes_on = batch.continues and index == len(batch.lines) - 1
            if len(raw) > limits.sentence or goes_on:
                if not continued:
                    problems.add("line split, as it is too long", f"{name}: {raw[:40].strip()!r}...")
                pieces = _split_line(raw, limits.sentence)
            else:
                pieces = [line] if (line := raw.strip()) else []
            for piece in pieces:
                if full:
                    problems.add("document split, as it is too long", f"{name}: before {piece[:40]!r}")
                sentences.append(piece)
                size += len(piece)
                if full := size >= limits.document or len(sentences) >= limits.document // _SHORTEST:
                    yield sentences
                    sentences, size = [], 0
            blank = not pieces and not continued and not goes_on
            continued = goes_on
            if (cut.at_blank and blank) or (cut.at_line and not goes_on):
                if sentences:
                    yield sentences
                sentences, size, full = [], 0, False
        if batch.ends_record and cut.at_record:
            if sentences:
                yield sentences
            sentences, size, full = [], 0, False
    if sentences:
        yield sentences


def _split_line(line: str, limit: int) -> list[str]:
    """Stripped pieces of at most `limit` characters, cut at white space if possible."""
    pieces = []
    start = 0
    while start < len(line):
        stop = min(start + limit, len(line))
        if stop < len(line):
            space = max(line.rfind(" ", start, stop), line.rfind("\t", start, stop))
            stop = space + 1 if space > start else stop
        pieces.append(line[start:stop].strip())
        start = stop
    return [piece for piece in pieces if piece]
