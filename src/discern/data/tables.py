"""Reading of files as lines, as JSON or as tables, decompressed by content and decoded strictly.

A table is CSV, TSV, JSON lines, a JSON array, Parquet, or plain text with one text per line.

The format of a table is recognized by the content where possible (Parquet, JSON), otherwise by the suffix. CSV is read strictly:
an unclosed quotation mark is an error that names the line where it opened, where a lenient reader would read the rest of the file
into one field. In TSV a quotation mark is text, unless a field is quoted as by spreadsheets. Rows are read one by one, so that a
file of any size fits into memory.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import stat
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from discern.data.sources.base import ending, is_number
from discern.data.sources.problems import ProblemLog
from discern.data.sources.streams import BLOCK_BYTES, Readable, likely_encoding, naming, open_text
from discern.errors import ConfigError, DataError, did_you_mean
from discern.parsing import json_value

DELIMITERS = ",;\t|"
_EXCEL = re.compile(r'\ufeff?"?sep=([^"\r\n]?)"?[\s,;|]*', re.IGNORECASE)
NO_DELIMITER = "\x1f"
"""For a table with one column, where "great film, loved it" is one text."""
# In characters: longer than any text, and short enough for memory if an unclosed quotation mark takes in the rest of a file.
LONGEST_FIELD = 10_000_000


@dataclass(frozen=True)
class Dialect:
    """The format of a table.

    Attributes:
        delimiter: character between fields.
        tabbed: whether quotation marks are text unless they enclose a whole field, as in TSV, rather than as in CSV.
        verbatim: whether they are text even then.
    """

    delimiter: str
    tabbed: bool = False
    verbatim: bool = False


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
    counts = {mark: len(fields_of(header, mark)) for mark in marks}
    found = max(marks, key=counts.__getitem__)
    return found if counts[found] != 1 else None


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


def fields_of(line: str, delimiter: str) -> list[str]:
    try:
        return line.split("\t") if delimiter == "\t" else next(csv.reader([line], delimiter=delimiter), [])
    except csv.Error:  # reading the rows reports it
        return []


def split_rows(lines: Iterator[tuple[int, str]], name: str, dialect: Dialect) -> Iterator[tuple[int, list[str]]]:
    """The rows, header included, and the line in which each begins. Skips blank lines, and a first line such as `sep=;`.

    Args:
        lines: lines and their numbers.

    Raises:
        DataError: a row cannot be read as CSV.
    """
    lines = itertools.dropwhile(lambda numbered: not numbered[1].strip() or excel_delimiter(numbered[1]) is not None, lines)
    if dialect.tabbed:
        for number, line in lines:
            if content := line.rstrip("\r"):
                cells = content.split("\t")
                yield number, cells if dialect.verbatim else [_unquoted(cell) for cell in cells]
        return
    begins, last = 0, 0  # the line before the row, the last line read

    def fed() -> Iterator[str]:
        nonlocal last
        for last, line in lines:  # noqa: B007 (read outside)
            yield line + "\n"

    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_FIELD))
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


# Suffixes of compression, which do not tell the format of the content.
COMPRESSED = frozenset({".gz", ".xz", ".zst", ".bz2"})
_LONGEST_LINE = 1 << 28


def suffix_of(path: Path) -> str:
    """The suffix of a file, ignoring suffixes of compression."""
    return next((end.lower() for end in reversed(path.suffixes) if end.lower() not in COMPRESSED), "")


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file, numbered from 1, without line ends. Only a newline ends a line.

    Raises:
        DataError: the file is missing, damaged or not UTF-8; the message names the line.
    """
    with naming(str(path)), path.open("rb") as file:
        yield from stream_lines(file, str(path))


def stream_lines(file: Readable, name: str) -> Iterator[tuple[int, str]]:
    """Like `numbered_lines`, for a stream such as standard input, with bounded memory."""
    for number, line in _whole_lines(file, name):
        yield number, (line.removeprefix("\ufeff") if number == 1 else line).removesuffix("\n").removesuffix("\r")


def _whole_lines(file: Readable, name: str) -> Iterator[tuple[int, str]]:
    """The lines with their ends and numbers, and with a byte order mark if there is one."""
    rest, number = b"", 0
    with naming(name):
        stream = open_text(file, name)
        while block := stream.read(BLOCK_BYTES):
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                number += 1
                yield number, _text_of(line + b"\n", name, number)
            if len(rest) > _LONGEST_LINE:
                raise DataError(f"{name}:{number + 1}: a line of more than {_LONGEST_LINE >> 20} MiB", hint="is it a text file?")
        if rest:
            yield number + 1, _text_of(rest, name, number + 1)


def without_blank_end(
    lines: Iterable[tuple[int, str]], left_out: Callable[[int, int], None] = lambda first, last: None
) -> Iterator[tuple[int, str]]:
    """The lines without empty ones at the end; of each group of empty lines elsewhere, which callers refuse, only the first.

    Args:
        left_out: called with the first and the last number of the empty lines at the end.
    """
    begins: tuple[int, str] | None = None
    number = 0
    for number, text in lines:
        if not text.strip():
            begins = begins or (number, text)
            continue
        if begins is not None:
            yield begins
            begins = None
        yield number, text
    if begins is not None:
        left_out(begins[0], number)


def raw_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file unchanged, with line ends, and with a byte order mark if there is one.

    Raises:
        DataError: the file is missing, damaged or not UTF-8.
    """
    with naming(str(path)), path.open("rb") as file:
        yield from (line for _, line in _whole_lines(file, str(path)))


def whole_text(path: Path) -> str:
    """The content of a UTF-8 file, with unchanged line ends.

    Raises:
        DataError: the file is missing, damaged or not UTF-8.
    """
    with naming(str(path)), path.open("rb") as file:
        data = open_text(file, str(path)).read()
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as problem:
        raise _not_utf8(str(path), data.count(b"\n", 0, problem.start) + 1, problem) from problem


def json_file(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        DataError: the file is missing, damaged, not UTF-8 or not JSON.
    """
    return parsed_json(whole_text(path), f"{path}")


def parsed_json(text: str, where: str) -> Any:
    """A JSON value. NaN and infinities are accepted: callers that need finite numbers check them with a better message.

    Raises:
        DataError: the text is not JSON.
    """
    try:
        return json_value(text)
    except json.JSONDecodeError as problem:
        place = f", line {problem.lineno}" if problem.lineno > 1 else ""
        raise DataError(
            f"{where}{place}: not JSON: {problem.msg} at column {problem.colno}",
            hint="JSON lines have one object per line; python -m json.tool FILE shows what is wrong with a JSON file",
        ) from problem


def clean_text(text: str) -> str:
    """The text with lone surrogates (valid in JSON, but not in UTF-8) replaced by U+FFFD, one for one."""
    if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    return "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)


def _text_of(line: bytes, name: str, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise _not_utf8(name, number, problem) from problem


def _not_utf8(name: str, number: int, problem: UnicodeDecodeError) -> DataError:
    wrong = problem.object[problem.start]
    encoding = likely_encoding(problem.object)
    may_be = f"it may be {encoding}, so " if encoding else ""
    return DataError(
        f"{name}:{number}: not UTF-8: byte 0x{wrong:02x}",
        hint=f"{may_be}save it as UTF-8: iconv -f {encoding or 'ENCODING'} -t UTF-8 {Path(name).name} > new-{Path(name).name}",
    )


MALFORMED = "malformed row, left out"
"""Kind of the problem of a row of a published data set that does not fit its table."""
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
    """A row of a table.

    Attributes:
        where: its place in messages ("reviews.csv:3").
        number: line of the file where it begins; in a JSON array or Parquet its number, from 1.
    """

    where: str
    values: Mapping[str, Any]
    number: int


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


def open_table(
    path: Path,
    format: str | None = None,
    *,
    header: Sequence[str] = (),
    verbatim: bool = False,
    malformed: ProblemLog | None = None,
) -> Table:
    """Open a file as a table; `-` is standard input.

    Args:
        format: format of the file; None: recognized by content and name.
        header: the columns of a CSV or TSV file whose first line is a row with as many fields.
        verbatim: quotation marks in TSV files are text, even around a whole field.
        malformed: counts rows whose number of fields differs from the header, which are left out; None: they are errors.

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
        rows = (
            Row(f"{name}:{number}", {"text": line}, number) for number, line in without_blank_end(itertools.chain(above, lines))
        )
        return Table(name, "text", ("text",), rows)
    dialect = dialect_of([line for _, line in begin], "\t" if found == "tsv" else DELIMITERS)
    return _delimited(lines, name, replace(dialect, verbatim=verbatim), header, malformed)


def _format(path: Path, line: str) -> TableFormat:
    if _JSON_OBJECT.match(line):
        return "jsonl"
    ending = suffix_of(path)
    if _JSON_ARRAY.match(line) and ending in (".json", ""):
        return "json"
    return _BY_ENDING.get(ending, "text")


def _delimited(lines: Lines, name: str, dialect: Dialect, header: Sequence[str], malformed: ProblemLog | None) -> Table:
    records = split_rows(lines, name, dialect)
    number, first = next(records)
    if len(first) == len(header) and not set(first) & set(header):
        records = itertools.chain([(number, first)], records)
        first = list(header)
    columns = column_names(first, f"{name}:{number}")

    def rows() -> Iterator[Row]:
        for number, fields in records:
            if len(fields) != len(columns):
                if malformed is None:
                    raise _other_width(f"{name}:{number}", fields, columns, dialect)
                malformed.add(MALFORMED, f"{name}:{number} ({len(fields)} fields instead of {len(columns)})")
                continue
            yield Row(f"{name}:{number}", dict(zip(columns, fields, strict=True)), number)

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
        records = ((number, f"{name}: record {number}", record) for number, record in enumerate(content, start=1))
    else:
        records = ((number, f"{name}:{number}", parsed_json(line, f"{name}:{number}")) for number, line in lines if line.strip())

    def rows() -> Iterator[Row]:
        for number, where, record in records:
            if not isinstance(record, dict):
                raise DataError(
                    f"{where}: {type(record).__name__} instead of an object", hint="every line is a JSON object: {...}"
                )
            yield Row(where, record, number)

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
                    yield Row(f"{path}: row {number}", values, number)
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


def choose_column(table: Table, role: str, names: Sequence[str], taken: Collection[str] = ()) -> str:
    """The column of a role, recognized by its name, or the only one without another role.

    Args:
        names: usual names, likeliest first.
        taken: columns that have another role.

    Raises:
        ConfigError: none can be recognized.
        DataError: the table has no header, or is a single JSON object.
    """
    column = column_named(table, names, taken)
    if column is not None:
        return column
    _refuse_other_layout(table)
    free = [column for column in table.columns if column not in taken]
    if len(free) == 1:
        return free[0]
    raise ConfigError(
        f"{table.name}: cannot recognize the column for {option_of(role)}; its columns: {', '.join(table.columns)}",
        hint=f"name it: {option_of(role)} COLUMN",
    )


def column_named(table: Table, names: Sequence[str], taken: Collection[str] = ()) -> str | None:
    """The first of some names, in lower case, that a column has; None without one."""
    lowered = {column.lower(): column for column in table.columns if column not in taken}
    return next((lowered[name] for name in names if name in lowered), None)


def _refuse_other_layout(table: Table) -> None:
    """Raise a DataError if the first line of a table is not a header, or if a JSON file is one object."""
    if table.format in ("csv", "tsv"):
        mark = delimiter_of(table.columns[0]) if len(table.columns) == 1 else None
        if mark is not None:
            raise DataError(
                f"{table.name} has a single column, but its first line has several separated by '{mark}': "
                f"{table.columns[0]!r:.80}",
                hint="name the file .csv, or --set files.format=csv; for prediction --format csv",
            )
        if not is_header(table.columns):
            raise DataError(
                f"{table.name}: the first line is not a header, as it is long or has numbers: {', '.join(table.columns):.80}",
                hint="write the names of the columns above it, for example: text,label (with the delimiter of the file)",
            )
    elif table.format == "jsonl" and ending(table.name) == "json" and len(list(itertools.islice(table.rows, 2))) == 1:
        raise one_object(table.name)


def option_of(role: str) -> str:
    """The option that names the column of a role."""
    return "--set files.start" if role == "start" else f"--{role}"
