"""The examples of an evaluation file, with every text in them, to compare text to train on with."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from discern.data.sources.base import ending
from discern.data.sources.documents import Limits
from discern.data.sources.jsonl import byte_lines, is_json_lines, named_json, not_json_lines, one_object
from discern.data.sources.problems import ProblemLog
from discern.data.sources.streams import HeadStream, naming, open_text
from discern.data.sources.table import Dialect, table_dialect, table_rows
from discern.data.sources.text import text_lines
from discern.errors import ConfigError, DataError, did_you_mean
from discern.parsing import json_value

_FORMATS = "give plain text with one example per line, CSV, TSV or JSON lines"


@dataclass(frozen=True)
class Example:
    """An example of an evaluation file.

    Attributes:
        line: line of the file where it begins, from 1.
        texts: its texts: the line, the fields of the row, or the strings of the object at any depth.
    """

    line: int
    texts: tuple[str, ...]


def read_examples(path: Path, fields: Sequence[str] = ()) -> Iterator[Example]:
    """The examples of a file: lines of text, rows of CSV or TSV, or JSON lines, plain or compressed.

    Args:
        fields: fields or columns to read; empty: all of them.

    Raises:
        DataError: the file is missing, empty, damaged or of another format.
        ConfigError: it lacks one of the fields.
    """
    name = str(path)
    if path.is_dir():
        raise DataError(
            f"{name} is a folder, expected a file with examples", hint="name each file: --against FILE --against FILE"
        )
    found = False
    with naming(name), path.open("rb") as file:
        stream = open_text(file, name)
        for example in _examples(stream, name, fields):
            found = True
            yield example
    if not found:
        raise DataError(f"{name} has no examples", hint=_FORMATS)


def _examples(stream: HeadStream, name: str, fields: Sequence[str]) -> Iterator[Example]:
    head = stream.head
    if is_json_lines(head):
        return _objects(stream, name, fields)
    if named_json(name) and head.strip():
        raise not_json_lines(name)
    if (dialect := table_dialect(name, head)) is not None:
        return _rows(stream, name, dialect, fields)
    if fields and head.strip():
        raise ConfigError(f"{name} is plain text and has no field '{fields[0]}'", hint="leave out --against-field for it")
    return _lines(stream, name)


def _lines(stream: HeadStream, name: str) -> Iterator[Example]:
    for number, line in byte_lines(stream, name, Limits().record_bytes):
        text = line.removeprefix(codecs.BOM_UTF8).decode("utf-8", errors="replace")
        if text.strip():
            yield Example(number, (text,))


def _rows(stream: HeadStream, name: str, dialect: Dialect, fields: Sequence[str]) -> Iterator[Example]:
    lines = text_lines(stream, name, ProblemLog(), squeeze=False)
    columns, _, rows = table_rows(lines, name, dialect)
    if columns:
        _check_fields(fields, columns, name)
    for number, row in rows:
        # A row that does not fit the header is still an example, but which column is which is unknown.
        known = fields and len(row) == len(columns)
        yield Example(number, tuple(row[columns.index(field)] for field in fields) if known else tuple(row))


def _objects(stream: HeadStream, name: str, fields: Sequence[str]) -> Iterator[Example]:
    count = 0
    for count, (number, line) in enumerate(byte_lines(stream, name, Limits().record_bytes), start=1):
        try:
            record = json_value(line)
        except ValueError as problem:
            raise DataError(f"{name}: line {number:,} is not JSON: {problem}", hint=_FORMATS) from problem
        if not isinstance(record, Mapping):
            raise DataError(f"{name}: line {number:,} is not a JSON object", hint=_FORMATS)
        if count == 1:
            _check_fields(fields, tuple(record), name)
        chosen = [record[field] for field in fields if field in record] if fields else [record]
        yield Example(number, tuple(text for value in chosen for text in _strings(value)))
    if count == 1 and ending(name) == "json":
        # Counted as one example, a whole file such as SQuAD's would have a share of 0 or 1.
        raise one_object(name)


def _check_fields(fields: Sequence[str], known: Sequence[str], name: str) -> None:
    missing = next((field for field in fields if field not in known), None)
    if missing is not None:
        raise ConfigError(
            f"{name} has no field '{missing}'; its fields: {', '.join(known) or 'none'}",
            hint=f"{did_you_mean(missing, known)} Without --against-field, all fields are read",
        )


def _strings(value: Any) -> Iterator[str]:
    """The strings in a JSON value, at any depth, in order."""
    stack = [value]
    while stack:
        last = stack.pop()
        if isinstance(last, str):
            yield last
        elif isinstance(last, Mapping):
            stack.extend(reversed(list(last.values())))
        elif isinstance(last, list):
            stack.extend(reversed(last))
