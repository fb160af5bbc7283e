"""Tables of the user: CSV, TSV, JSON lines, a JSON array, Parquet, or plain text with one text per line.

The format is recognized by the content where possible (Parquet, JSON), otherwise by the suffix. CSV is read strictly: an
unclosed quotation mark is an error that names the line where it opened, where a lenient reader would read the rest of the file
into one field. In TSV a quotation mark is text, unless a field is quoted as by spreadsheets. Rows are read one by one, so that a
file of any size fits into memory.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from discern.data.sources.streams import naming
from discern.data.sources.table import (
    DELIMITERS,
    Dialect,
    column_names,
    delimiter_of,
    dialect_of,
    excel_delimiter,
    split_rows,
)
from discern.errors import ConfigError, DataError, did_you_mean
from discern.tasks.readers.files import clean_text, numbered_lines, parsed_json, stream_lines, suffix_of, without_blank_end

TableFormat = Literal["csv", "tsv", "jsonl", "json", "parquet", "text"]

_BY_ENDING: dict[str, TableFormat] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
_NOT_TEXT = (
    "use a suffix that names the format (.csv, .tsv, .jsonl, .parquet), or --set files.format=csv; for prediction --format csv"
)
_NOT_TAGGED = "use the suffix .conll for a file with one word per line, or --set files.format=conll"
# A text may begin with a brace or a bracket, too.
_JSON_OBJECT = re.compile(r"\s*\{\s*(?:\"|\}\s*$|$)")
_JSON_ARRAY = re.compile(r"\s*\[\s*(?:\{|\]\s*$|$)")
Lines = Iterator[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Row:
    """A row and its place in messages ("reviews.csv:3")."""

    where: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of a file, which can be read once.

    Attributes:
        columns: columns in the order of the file; for JSON lines the keys of the first record.
    """

    name: str
    format: TableFormat
    columns: tuple[str, ...]
    rows: Iterator[Row]

    def require(self, column: str, option: str) -> str:
        """The name of a column that exists.

        Raises:
            ConfigError: it does not exist; the hint names the most similar one.
        """
        if column in self.columns:
            return column
        kind = " (read as plain text, one text per line)" if self.format == "text" else ""
        another_format = _NOT_TAGGED if option in ("--words", "--tags") else _NOT_TEXT
        raise ConfigError(
            f"{self.name} has no column '{column}'{kind}; its columns: {', '.join(self.columns) or 'none'}",
            hint=another_format if kind else f"{option}: {did_you_mean(column, self.columns)}",
        )


def open_table(path: Path, format: str | None = None) -> Table:
    """Open a file as a table; `-` is standard input.

    Args:
        format: format of the file; None: recognized by content and name.

    Raises:
        ConfigError: the format is unknown, or is Parquet and pyarrow is not installed.
        DataError: the file is missing, empty, not UTF-8, or its header cannot be read.
    """
    if format is not None and format not in get_args(TableFormat):
        raise ConfigError(f"unknown table format '{format}'", hint=did_you_mean(format, get_args(TableFormat)))
    name = "standard input" if str(path) == "-" else str(path)
    if str(path) != "-":
        with naming(name):
            # What is read from a pipe cannot be read again.
            if format in (None, "parquet") and stat.S_ISREG(path.stat().st_mode):
                with path.open("rb") as file:
                    is_parquet = file.read(4) == b"PAR1"
                if is_parquet:
                    return _parquet(path)
    lines = stream_lines(sys.stdin.buffer, name) if str(path) == "-" else numbered_lines(path)
    first = next(((number, line) for number, line in lines if line.strip()), None)
    if first is None:
        raise DataError(f"{name} is empty", hint="expected a header and rows, or JSON lines")
    begin = [first, *itertools.islice(lines, 1)]
    lines = itertools.chain(begin, lines)
    found = format or _format(path, first[1])
    if found == "parquet":
        raise DataError(f"{name} is not a parquet file", hint="write the file again, or rename it with the suffix of its format")
    if found == "jsonl" and first[1].strip() == "{":
        raise one_object(name)
    if found in ("jsonl", "json"):
        return _json(lines, name, cast(TableFormat, found))
    excel = format is None and excel_delimiter(first[1]) is not None
    if found == "text" and not excel:
        # Every line is a row, so that rows and lines stay aligned: what needs a text refuses an empty one by its number.
        above = ((number, "") for number in range(1, first[0]))
        rows = (Row(f"{name}:{number}", {"text": line}) for number, line in without_blank_end(itertools.chain(above, lines)))
        return Table(name, "text", ("text",), rows)
    return _delimited(lines, name, dialect_of([line for _, line in begin], "\t" if found == "tsv" else DELIMITERS))


def _format(path: Path, line: str) -> TableFormat:
    if _JSON_OBJECT.match(line):
        return "jsonl"
    ending = suffix_of(path)
    if _JSON_ARRAY.match(line) and ending in (".json", ""):
        return "json"
    return _BY_ENDING.get(ending, "text")


def _delimited(lines: Lines, name: str, dialect: Dialect) -> Table:
    records = split_rows(lines, name, dialect)
    number, header = next(records)
    columns = column_names(header, f"{name}:{number}")

    def rows() -> Iterator[Row]:
        for number, fields in records:
            if len(fields) != len(columns):
                raise _other_width(f"{name}:{number}", fields, columns, dialect)
            yield Row(f"{name}:{number}", dict(zip(columns, fields, strict=True)))

    return Table(name, "tsv" if dialect.tabbed else "csv", columns, rows())


def _other_width(where: str, fields: list[str], columns: tuple[str, ...], dialect: Dialect) -> DataError:
    mark = delimiter_of(fields[0])
    if mark is not None and len(fields) == 1 and fields[0].count(mark) == len(columns) - 1:
        hint = f"this row is separated by '{mark}', but the header by {dialect.delimiter!r}: use one delimiter in all rows"
    elif dialect.tabbed:
        hint = "for texts with tabs or line breaks use CSV or JSON lines"
    else:
        hint = f"quote texts that contain '{dialect.delimiter}': \"like{dialect.delimiter} this\""
    return DataError(f"{where}: {len(fields)} fields, but the header has {len(columns)} ({', '.join(columns)})", hint=hint)


def one_object(name: str) -> DataError:
    """The error for a JSON file that is a single object."""
    return DataError(
        f"{name} is one JSON object, expected one object per line, or an array of objects",
        hint="if it is SQuAD's file: --task squad1 --data FOLDER; otherwise write its records as JSON lines: jq -c '.KEY[]' FILE",
    )


def _json(lines: Lines, name: str, format: TableFormat) -> Table:
    if format == "json":
        content = parsed_json("\n".join(line for _, line in lines), name)
        if not isinstance(content, list):
            raise DataError(
                f"{name}: not a JSON array of objects", hint="use an array of objects, or JSON lines (one object per line)"
            )
        records = ((f"{name}: record {number}", record) for number, record in enumerate(content, start=1))
    else:
        records = ((f"{name}:{number}", parsed_json(line, f"{name}:{number}")) for number, line in lines if line.strip())

    def rows() -> Iterator[Row]:
        for where, record in records:
            if not isinstance(record, dict):
                raise DataError(
                    f"{where}: {type(record).__name__} instead of an object", hint="every line is a JSON object: {...}"
                )
            yield Row(where, record)

    every = rows()
    first = next(every, None)
    if first is None:
        raise DataError(f"{name} is empty", hint="expected JSON objects")
    return Table(name, format, tuple(first.values), itertools.chain([first], every))


def _parquet(path: Path) -> Table:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as problem:
        raise ConfigError(
            f"{path} is a parquet file, which needs pyarrow", hint="pip install 'discern-nlp[parquet]'"
        ) from problem
    damaged = DataError(f"{path} is a damaged parquet file", hint="download or write it again")
    try:
        table = parquet.ParquetFile(io.BytesIO(path.read_bytes()) if path.stat().st_size < 1 << 20 else path)
        columns = tuple(table.schema_arrow.names)
    except (arrow.ArrowException, OSError) as problem:
        raise damaged from problem

    def rows() -> Iterator[Row]:
        number = 0
        try:
            for batch in table.iter_batches(batch_size=1000):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(f"{path}: row {number}", values)
        except (arrow.ArrowException, OSError) as problem:
            raise damaged from problem

    return Table(str(path), "parquet", columns, rows())


def value_of(row: Row, column: str) -> Any:
    """The value of a column.

    Raises:
        DataError: a JSON record lacks the key.
    """
    if column not in row.values:
        raise DataError(
            f"{row.where}: no '{column}'; it has: {', '.join(map(str, row.values)) or 'nothing'}",
            hint=did_you_mean(column, row.values),
        )
    return row.values[column]


def text_of(row: Row, column: str) -> str:
    """The text of a column, stripped; numbers are converted to text.

    Raises:
        DataError: the value is missing, empty, or a list or object.
    """
    value = value_of(row, column)
    text = written(value)
    if text is None:
        raise DataError(
            f"{row.where}: '{column}' is a {type(value).__name__}, expected a text: {value!r:.60}", hint="choose another column"
        )
    if not text:
        hint = "remove the row, or give it a text; grep '[^[:space:]]' FILE removes the empty lines of plain text"
        raise DataError(f"{row.where}: '{column}' is empty", hint=hint)
    return text


def written(value: Any) -> str | None:
    """A cell as text: stripped; whole numbers without a point; empty for null and NaN; None for lists and objects."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, (list, dict, tuple, bytes)):
        return None
    return clean_text(str(value)).strip()


def number_in(text: str) -> float | None:
    """The number in a text, which may not be finite; None if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return None


def list_in(text: str) -> list[Any] | None:
    """The JSON list in a text; None if the text is not one."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = parsed_json(text, "")
    except DataError:
        return None
    return value if isinstance(value, list) else None
