"""CSV and TSV files with one column that contains the text. Labels and headers are never read as text.

A file is a table if its name ends in .csv, .tsv or .tab, or if its first lines have the same number of fields and the
first one looks like a header. Rows that do not fit the header are left out and reported.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, dropwhile
from typing import final

from discern.data.sources.base import TEXT_NAMES, FileSource, ReadContext, ending, is_number, record_texts
from discern.data.sources.documents import Document, Lines
from discern.data.sources.streams import HeadStream
from discern.data.sources.text import text_lines
from discern.errors import DataError

LABEL_NAMES = "label labels class category target sentiment stars rating score intent topic gold_label".split()
"""Usual names of label columns, likeliest first."""

_OTHER_NAMES = (*LABEL_NAMES, *"id idx index language lang date author url source split tags".split())
DELIMITERS = ",;\t|"
_ENDINGS = {"csv": DELIMITERS, "tsv": "\t", "tab": "\t"}
_EXCEL = re.compile(r'\ufeff?"?sep=([^"\r\n]?)"?[\s,;|]*', re.IGNORECASE)
NO_DELIMITER = "\x1f"
"""For a table with one column, where "great film, loved it" is one text."""
# In characters: longer than any text, and short enough for memory if an unclosed quotation mark takes in the rest of a file.
_LONGEST_FIELD = 10_000_000


@dataclass(frozen=True)
class Dialect:
    """The format of a table.

    Attributes:
        delimiter: character between fields.
        tabbed: whether quotation marks are text unless they enclose a whole field, as in TSV, rather than as in CSV.
    """

    delimiter: str
    tabbed: bool = False


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
        widths = {len(_fields(line, mark)) for line in lines}
        named = {field.strip().lower() for field in _fields(lines[0], mark)} & {*TEXT_NAMES, *_OTHER_NAMES}
        if len(widths) == 1 and widths != {1} and len(lines) > 2 and named and is_header(_fields(lines[0], mark)):
            return Dialect(mark, mark == "\t")
    return None


def dialect_of(lines: Sequence[str], marks: str = DELIMITERS) -> Dialect:
    """The format of a table, by its header, or by the line `sep=;` above it.

    Args:
        lines: its first lines.
        marks: possible delimiters. A tab alone stands for TSV.
    """
    excel = excel_delimiter(lines[0])
    if excel is None and marks == "\t":
        return Dialect("\t", tabbed=True)
    header = lines[0] if excel is None else "".join(lines[1:2])
    return Dialect(excel or delimiter_of(header, marks) or NO_DELIMITER, tabbed=marks == "\t" == (excel or "\t"))


def excel_delimiter(line: str) -> str | None:
    """The delimiter in a first line such as `sep=;`, which Excel writes; empty if it is missing; None for other lines."""
    found = _EXCEL.fullmatch(line)
    return found[1] if found else None


def delimiter_of(header: str, marks: str = DELIMITERS) -> str | None:
    """The delimiter of a CSV file, by its header; None if there is a single column."""
    counts = {mark: len(_fields(header, mark)) for mark in marks}
    found = max(marks, key=counts.__getitem__)
    return found if counts[found] != 1 else None


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


def column_names(header: Sequence[str], where: str) -> tuple[str, ...]:
    """The names of the columns. One without a name, such as the index of a written table, is "column 1".

    Raises:
        DataError: two have the same name.
    """
    columns = [field.strip() or f"column {place}" for place, field in enumerate(header, start=1)]
    twice = next((column for place, column in enumerate(columns) if column in columns[:place]), None)
    if twice is not None:
        raise DataError(
            f"{where}: two columns are named '{twice}'",
            hint="give every column a name of its own in the first line; if that line is not a header, write one above it",
        )
    return tuple(columns)


def is_header(fields: Sequence[str]) -> bool:
    """Whether these look like column names: short, and not numbers. The first may be empty, for an index."""
    names = [field.strip() for field in fields]
    filled = names[1:] if names and not names[0] and len(names) > 1 else names
    return all(
        name and len(name) <= 40 and len(name.split()) <= 4 and not is_number(name) and name[-1] not in ".!?。！？"
        for name in filled
    )


def _whole_lines(head: bytes) -> list[str]:
    """The non-empty lines at the beginning of a file, without the last one if it may be incomplete."""
    lines = head.removeprefix(b"\xef\xbb\xbf").decode("utf-8", errors="replace").split("\n")
    whole = lines[:-1] if len(lines) > 1 and len(head) >= 1 << 16 else lines
    return [line.rstrip("\r") for line in whole if line.strip()]


def _fields(line: str, delimiter: str) -> list[str]:
    try:
        return line.split("\t") if delimiter == "\t" else next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:  # reading the rows reports it
        return []


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
            if len(begun) > _LONGEST_FIELD:
                raise DataError(
                    f"{name}: a line of more than {_LONGEST_FIELD:,} characters",
                    hint="if the file is not a table, give it a name that ends in .txt",
                )
        else:
            yield begun + last
            begun = ""
    if begun:
        yield begun


def split_rows(lines: Iterator[tuple[int, str]], name: str, dialect: Dialect) -> Iterator[tuple[int, list[str]]]:
    """The rows, header included, and the line in which each begins. Skips blank lines, and a first line such as `sep=;`.

    Args:
        lines: lines and their numbers.

    Raises:
        DataError: a row cannot be read as CSV.
    """
    lines = dropwhile(lambda numbered: not numbered[1].strip() or excel_delimiter(numbered[1]) is not None, lines)
    if dialect.tabbed:
        for number, line in lines:
            if content := line.rstrip("\r"):
                yield number, [_unquoted(field) for field in content.split("\t")]
        return
    begins, last = 0, 0  # the line before the row, the last line read

    def fed() -> Iterator[str]:
        nonlocal last
        for last, line in lines:  # noqa: B007 (read outside)
            yield line + "\n"

    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_FIELD))
    reader = csv.reader(fed(), delimiter=dialect.delimiter, strict=True)
    while True:
        begins = last
        try:
            fields = next(reader, None)
        except csv.Error as problem:
            raise _damaged(name, begins + 1, last, problem) from problem
        if fields is None:
            return
        if fields:
            yield begins + 1, fields


def _damaged(name: str, begins: int, shows: int, problem: csv.Error) -> DataError:
    """The error for a row that begins in one line and cannot be parsed in another."""
    if "new-line character" in str(problem):
        return DataError(
            f"{name}:{shows}: the line contains a carriage return outside quotation marks",
            hint="if one ends every line: tr '\\r' '\\n' < FILE > NEW; otherwise quote the field that contains it",
        )
    until = f", detected in line {shows}" if shows > begins else ""
    if "field limit" in str(problem):
        return DataError(
            f"{name}:{begins}: a field of more than {csv.field_size_limit():,} characters in the row that begins here{until}",
            hint="close the quotation mark that opens there, or use JSON lines",
        )
    return DataError(
        f"{name}:{begins}: unbalanced quotation marks in the row that begins here{until} ({problem})",
        hint='double them inside a quoted field: "he said ""yes"""; an unquoted field may have them anywhere '
        "but at its start; or use JSON lines",
    )


def _unquoted(field: str) -> str:
    """A field quoted as by spreadsheets, without the quotes; any other field unchanged."""
    if len(field) < 2 or not (field.startswith('"') and field.endswith('"')):
        return field
    inner = field[1:-1].replace('""', "\0")
    return field if '"' in inner else inner.replace("\0", '"')
