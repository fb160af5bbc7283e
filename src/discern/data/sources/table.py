"""CSV and TSV files with one column that contains the text. Labels and headers are never read as text.

A file is a table if its name ends in .csv, .tsv or .tab, or if its first lines have the same number of fields and the
first one looks like a header. Rows that do not fit the header are left out and reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import final

from discern.data.sources.base import TEXT_NAMES, FileSource, ReadContext, ending, record_texts
from discern.data.sources.documents import Document, Lines
from discern.data.sources.streams import HeadStream
from discern.data.sources.text import text_lines
from discern.data.tables import (
    DELIMITERS,
    LONGEST_FIELD,
    Dialect,
    column_names,
    dialect_of,
    excel_delimiter,
    fields_of,
    is_header,
    split_rows,
)
from discern.errors import DataError

LABEL_NAMES = "label labels class category target sentiment stars rating score intent topic gold_label".split()
"""Usual names of label columns, likeliest first."""

_OTHER_NAMES = (*LABEL_NAMES, *"id idx index language lang date author url source split tags".split())
_ENDINGS = {"csv": DELIMITERS, "tsv": "\t", "tab": "\t"}


@final
class TableSource(FileSource):
    """The rows of a CSV or TSV file; each row is a record."""

    priority = -1  # after JSON lines and WikiExtractor: their content is more reliable than a name that ends in .csv

    def recognizes(self, name: str, head: bytes) -> bool:
        return table_dialect(name, head) is not None

    def documents(self, stream: HeadStream, context: ReadContext) -> Iterator[Document]:
        dialect = table_dialect(context.name, stream.head)
        assert dialect is not None
        lines = text_lines(stream, context.name, context.problems, squeeze=False)
        columns, has_header, rows = table_rows(lines, context.name, dialect)
        if has_header and len(columns) == 1:  # a short first line of text looks like a name, so the user must be able to notice
            context.problems.note(f"tables: the first line, '{columns[0]}', is taken as the header")

        def records() -> Iterator[tuple[str, dict[str, str]]]:
            for number, row in rows:
                where = f"{context.name}: line {number:,}"
                if len(row) == len(columns):
                    yield where, dict(zip(columns, row, strict=True))
                else:
                    context.problems.add("row skipped, as its number of fields differs from the header", where)

        return context.cut_records(record_texts(records(), context, tabular=True))


def table_dialect(name: str, head: bytes) -> Dialect | None:
    """The format of a file; None if it is not a table.

    Args:
        name: name of the file or of the member of an archive.
        head: first bytes of the file.
    """
    lines = _whole_lines(head)
    if not lines:
        return None
    marks = _ENDINGS.get(ending(name))
    if marks is not None or excel_delimiter(lines[0]) is not None:
        return dialect_of(lines, marks or DELIMITERS)
    for mark in "\t,;|":
        widths = {len(fields_of(line, mark)) for line in lines}
        named = {field.strip().lower() for field in fields_of(lines[0], mark)} & {*TEXT_NAMES, *_OTHER_NAMES}
        if len(widths) == 1 and widths != {1} and len(lines) > 2 and named and is_header(fields_of(lines[0], mark)):
            return Dialect(mark, mark == "\t")
    return None


def table_rows(
    lines: Iterator[Lines], name: str, dialect: Dialect
) -> tuple[tuple[str, ...], bool, Iterator[tuple[int, list[str]]]]:
    """The names of the columns, whether they come from a header, and the rows with the line where each begins.

    Without a header, the columns are "column 1", "column 2", ...; an empty file has none.

    Raises:
        DataError: a quotation mark is never closed.
    """
    rows = split_rows(enumerate(_strings(lines, name), start=1), name, dialect)
    number, first = next(rows, (0, list[str]()))
    has_header = bool(first) and is_header(first)
    columns = column_names(first if has_header else [""] * len(first), f"{name}:{number}")
    return columns, has_header, rows if has_header or not first else chain([(number, first)], rows)


def _whole_lines(head: bytes) -> list[str]:
    """The non-empty lines at the beginning of a file, without the last one if it may be incomplete."""
    lines = head.removeprefix(b"\xef\xbb\xbf").decode("utf-8", errors="replace").split("\n")
    whole = lines[:-1] if len(lines) > 1 and len(head) >= 1 << 16 else lines
    return [line.rstrip("\r") for line in whole if line.strip()]


def _strings(batches: Iterator[Lines], name: str) -> Iterator[str]:
    """Whole lines, joined where a batch ends in the middle of one."""
    begun = ""
    for batch in batches:
        *whole, last = batch.lines
        for line in whole:
            yield begun + line
            begun = ""
        if batch.continues:
            begun += last
            if len(begun) > LONGEST_FIELD:
                raise DataError(
                    f"{name}: a line of more than {LONGEST_FIELD:,} characters",
                    hint="if the file is not a table, give it a name that ends in .txt",
                )
        else:
            yield begun + last
            begun = ""
    if begun:
        yield begun
