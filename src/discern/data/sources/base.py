"""What a source is, and how an input is read by the source that recognizes it.

To read another format: write a `FileSource` (or a `NamedSource`, for inputs such as `hf:NAME`) in a file of its own and
register it in `discern.data.sources`, or from another package under the entry point group `discern.sources`.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, ClassVar

from discern.data.sources import sources
from discern.data.sources.documents import CorpusOptions, Cut, Document, Lines, documents
from discern.data.sources.problems import ProblemLog
from discern.data.sources.streams import (
    BLOCK_BYTES,
    MAX_NESTING,
    Expansion,
    HeadStream,
    NotTextError,
    Readable,
    TextStream,
    decompressor,
    naming,
    other_content,
    other_encoding,
)
from discern.errors import ConfigError, DataError, did_you_mean

_COMPRESSED = {"gz", "xz", "zst", "bz2"}
TEXT_NAMES = (
    "text sentence review content comment document body utterance message abstract title premise question text_a sentence1 "
    "question1 text1 article paragraph passage answer tweet post description caption headline hypothesis text_b sentence2 "
    "question2 text2"
).split()
"""Usual names of text columns, likeliest first."""
_SAMPLE_RECORDS = 100
_FEWEST_WORDS, _FEWEST_CHARACTERS = 3, 6  # of a text, on average; the second for scripts without spaces between words
_IDEOGRAPHS = re.compile("[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")


@dataclass(frozen=True)
class ReadContext:
    """The input being read, and how its text becomes documents.

    Attributes:
        name: path of the file, `ARCHIVE!MEMBER`, or the input as given. Messages use it.
        explicit: True if the user named the input itself rather than a folder, a pattern or an archive that contains it.
            Such an input must be readable as text.
        options: how text becomes documents.
        problems: collects problems that do not stop the work.
        expansion: limits how much data may come out of the file.
        depth: number of archives and compressions around the content.
    """

    name: str
    explicit: bool
    options: CorpusOptions
    problems: ProblemLog
    expansion: Expansion
    depth: int = 0

    def cut_records(self, lines: Iterator[Lines]) -> Iterator[Document]:
        """Documents of an input that consists of records."""
        rule = self.options.documents
        cut = Cut(at_record=rule != "file", at_blank=rule == "blank-line", at_line=rule == "line")
        return documents(lines, cut, self.name, self.options.limits, self.problems)

    def cut_text(self, lines: Iterator[Lines]) -> Iterator[Document]:
        """Documents of running text."""
        rule = self.options.documents
        cut = Cut(at_blank=rule in ("auto", "blank-line"), at_line=rule == "line")
        return documents(lines, cut, self.name, self.options.limits, self.problems)

    def read_member(self, stream: Readable, name: str) -> Iterator[Document]:
        """Documents of a file inside this one, read by the source that recognizes it.

        Raises:
            DataError: the file is damaged, or decompresses to too much data.
        """
        inner = replace(self, name=name, explicit=False, depth=self.depth + 1)
        return read_stream(self.expansion.watched(stream, inner.depth), inner)


class FileSource(abc.ABC):
    """A file format, recognized by content. Instances hold no state.

    Attributes:
        is_binary: True if files of this format are not UTF-8 text. Other sources are not tried for binary files.
        priority: sources are tried in order of descending priority, those of equal priority by name; the first that
            recognizes a file reads it. Those below 0 read any text, but no markup such as HTML.
    """

    is_binary: ClassVar[bool] = False
    priority: ClassVar[int] = 0

    @abc.abstractmethod
    def recognizes(self, name: str, head: bytes) -> bool:
        """Whether a file is of this format.

        Args:
            name: name of the file or of the member of an archive. It should decide only if the content cannot.
            head: the first 64 KiB of the file, decompressed, or all of it if it is shorter.
        """

    @abc.abstractmethod
    def documents(self, stream: HeadStream, context: ReadContext) -> Iterator[Document]:
        """The documents of a file, usually made by `context.cut_records` or `context.cut_text`.

        Raises:
            DataError: the file is damaged.
            ConfigError: its records have no such field, or an optional package is missing.
        """


class NamedSource(abc.ABC):
    """Inputs given by name rather than by path: `hf:NAME` is read by the source registered as `hf`."""

    @abc.abstractmethod
    def documents(self, address: str, context: ReadContext) -> Iterator[Document]:
        """The documents of an input.

        Args:
            address: what follows the colon.

        Raises:
            DataError: the input cannot be read.
            ConfigError: its records have no such field, or an optional package is missing.
        """


def named_source(text: str) -> NamedSource | None:
    """The source of an input such as `hf:NAME`; None for a path."""
    scheme, colon, _ = text.partition(":")
    kind = sources.load(scheme) if colon and scheme in sources.names() else None
    return kind() if kind is not None and issubclass(kind, NamedSource) else None


def read_stream(stream: Readable, context: ReadContext) -> Iterator[Document]:
    """The documents of a stream of unknown content, decompressed if necessary.

    Raises:
        DataError: the stream is damaged, expands beyond the limits, or is not text although the user named it.
        ConfigError: its records have no such field, or an optional package is missing.
    """
    if context.depth > MAX_NESTING:
        raise DataError(f"{context.name}: archives nested more than {MAX_NESTING} deep", hint="unpack the outer ones first")
    with naming(context.name):
        whole = HeadStream(stream)
        if decompress := decompressor(whole.head):
            inner = replace(context, depth=context.depth + 1)
            yield from read_stream(context.expansion.watched(decompress(whole), inner.depth), inner)
        else:
            try:
                source = _recognize(context.name, whole.head)
                yield from source.documents(whole if source.is_binary else TextStream(whole, context.name), context)
            except NotTextError as problem:
                while context.depth and whole.read(BLOCK_BYTES):
                    pass  # checksums come last: a damaged archive must be an error rather than a file left out
                if context.explicit:
                    raise
                context.problems.add("file skipped, as it is not text", f"{context.name} ({problem.reason})")
                context.problems.note(f"skipped: {problem.reason}; {problem.hint}")


def _recognize(name: str, head: bytes) -> FileSource:
    """The source that reads a file.

    Raises:
        NotTextError: it is binary and of no known format, or markup that only the sources of any text would read.
    """
    kinds = [kind for kind in map(sources.load, sources.names()) if issubclass(kind, FileSource)]
    ranked: list[FileSource] = [kind() for kind in sorted(kinds, key=lambda kind: -kind.priority)]
    problem = other_encoding(head)
    for is_binary in (True, False):
        for source in ranked:
            if source.is_binary == is_binary and (is_binary or problem is None) and source.recognizes(name, head):
                content = other_content(head) if source.priority < 0 else None
                if content is not None:
                    raise NotTextError(name, *content)
                return source
    assert problem is not None  # the source of plain text recognizes any
    raise NotTextError(name, *(other_content(head) or problem))


def record_texts(
    records: Iterator[tuple[str, Mapping[str, Any]]], context: ReadContext, *, tabular: bool = False
) -> Iterator[Lines]:
    """The text of each record, one at a time.

    Args:
        records: records, each with its place for messages.
        tabular: whether they are rows of a table. If no column looks like text, only a table that the user named is an error.

    Raises:
        ConfigError: there is no such field, or it is not clear which one holds the text.
    """
    field, problems = context.options.text_field, context.problems
    sample = list(islice(records, 1))
    if sample and field is None and "text" not in sample[0][1]:
        sample += islice(records, _SAMPLE_RECORDS)
    names = list(dict.fromkeys(key for _, record in sample for key in record))
    if not names:
        return
    rows = [[text if isinstance(text := record.get(key), str) else "" for key in names] for _, record in sample]
    place = text_column(names, rows, field, context.name, required=context.explicit or not tabular)
    if place is None:
        problems.add("table skipped, as no column looks like text (choose one with --text-field NAME)", context.name)
        return
    chosen = names.pop(place)
    if names and (tabular or chosen not in ("text", field)):
        kind = "tables" if tabular else "records"
        problems.note(f"{kind}: the text is read from the column '{chosen}'; ignored: {', '.join(names)}")
    for where, record in chain(sample, records):
        yield from text_of(record.get(chosen), chosen, where, problems)


def text_of(text: Any, field: str, where: str, problems: ProblemLog) -> Iterator[Lines]:
    """The text of one record, if it has some."""
    if not isinstance(text, str) or not text.strip():
        problems.add(f"record skipped, as it has no text in '{field}'", where)
        return
    if not text.isascii():
        clean = text.encode("utf-8", errors="replace").decode("utf-8")
        if clean != text:  # half of a surrogate pair, which is valid in JSON but not in UTF-8
            problems.add("half of a surrogate pair, replaced", where)
            text = clean
    yield Lines(text.split("\n"), ends_record=True)


def text_column(
    columns: Sequence[str], rows: Sequence[Sequence[str]], field: str | None, name: str, *, required: bool = True
) -> int | None:
    """Index of the column that holds the text; None if no column does and none is required.

    Args:
        rows: some rows.
        field: its name; if None, it is `text`, the only one with a usual name, or the only one with several words in a cell.

    Raises:
        ConfigError: there is no such column, or it is not clear which one it is.
    """
    listed = ", ".join(columns)
    if field is not None:
        if field not in columns:
            raise ConfigError(
                f"{name} has no column '{field}'; its columns: {listed}",
                hint=f"--text-field NAME; {did_you_mean(field, columns)}",
            )
        return columns.index(field)
    lowered = [column.lower() for column in columns]
    if len(columns) == 1 or "text" in lowered:
        return lowered.index("text") if "text" in lowered else 0
    cells = [[row[place] for row in rows if row[place].strip()] for place in range(len(columns))]
    named = [place for place, column in enumerate(lowered) if column in TEXT_NAMES and (cells[place] or not rows)]
    plausible = named or [place for place, texts in enumerate(cells) if _are_texts(texts)]
    if len(plausible) == 1:
        return plausible[0]
    if not plausible and not required:
        return None
    found = f": {' or '.join(repr(columns[place]) for place in plausible)}" if plausible else ""
    raise ConfigError(
        f"{name}: it is not clear which column holds the text{found}; its columns: {listed}",
        hint=f"name it: --text-field '{columns[plausible[0]]}'" if plausible else "name it: --text-field NAME",
    )


def _are_texts(filled: Sequence[str]) -> bool:
    """Whether the cells of a column contain several words on average."""
    if not filled or all(map(is_number, filled)):
        return False
    words = sum(len(value.split()) for value in filled) / len(filled)
    ideographs = sum(len(_IDEOGRAPHS.findall(value)) for value in filled) / len(filled)
    return words >= _FEWEST_WORDS or ideographs >= _FEWEST_CHARACTERS


def is_number(value: str) -> bool:
    """Whether a cell is a number."""
    try:
        float(value)
    except ValueError:
        return False
    return True


def ending(name: str) -> str:
    """The extension of a file without that of a compression: "csv" for "reviews.csv.gz"."""
    parts = name.rsplit("/", 1)[-1].lower().split(".")[1:]
    while parts and parts[-1] in _COMPRESSED:
        parts.pop()
    return parts[-1] if parts else ""
