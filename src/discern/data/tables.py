"""Reading of files as lines, as JSON or as tables, decompressed by content.

A table is CSV, TSV, JSON lines, a JSON array, Parquet, or plain text with one text per line.

CSV is read strictly: an unclosed quotation mark is an error that names the line where it opened, where a lenient reader would
read the rest of the file into one field. In TSV a quotation mark is text, unless a field is quoted as by spreadsheets. Rows are
read one by one, so that a file of any size fits into memory. Any other fault of a row is an error, or is counted in a
`ProblemLog` and the row left out.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast, get_args

from discern.data.sources.documents import ProblemLog
from discern.data.sources.streams import Expansion, NotTextError, Readable, naming, open_text
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
        name and len(name) <= 40 and len(name.split()) <= 4 and number_in(name) is None and name[-1] not in ".!?。！？"
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


COMPRESSED = frozenset({".gz", ".xz", ".zst", ".bz2"})
"""Suffixes of compression, which do not tell the format of the content."""
_LONGEST_LINE = 1 << 28
Lines = Iterator[tuple[int, str]]
"""The lines of a file and their numbers, from 1, without line ends."""


def suffix_of(path: Path | str) -> str:
    """The suffix of a file, ignoring suffixes of compression: ".csv" for "reviews.csv.gz"."""
    return next((end.lower() for end in reversed(Path(path).suffixes) if end.lower() not in COMPRESSED), "")


def numbered_lines(path: Path) -> Lines:
    """The lines of a UTF-8 file, numbered from 1, without line ends. Only a newline ends a line.

    Raises:
        DataError: the file is missing, damaged or not UTF-8; the message names the line.
    """
    with naming(str(path)), path.open("rb") as file:
        yield from stream_lines(file, str(path))


def stream_lines(file: Readable, name: str) -> Lines:
    """Like `numbered_lines`, for a stream such as standard input, with bounded memory."""
    with naming(name):
        yield from split_lines(open_text(file, name), name)


def split_lines(pieces: Iterable[str], name: str, limit: int = _LONGEST_LINE) -> Lines:
    """The numbered lines of text that comes in pieces. A byte order mark is left out.

    Raises:
        DataError: a line is longer than the limit.
    """
    for number, line in enumerate(_whole_lines(pieces, name, limit), start=1):
        yield number, (line.removeprefix("\ufeff") if number == 1 else line).removesuffix("\n").removesuffix("\r")


def _whole_lines(pieces: Iterable[str], name: str, limit: int = _LONGEST_LINE) -> Iterator[str]:
    """The lines with their ends, and with a byte order mark if there is one."""
    rest = ""
    for piece in pieces:
        *whole, rest = (rest + piece).split("\n")
        for line in whole:
            yield line + "\n"
        if len(rest) > limit:
            raise DataError(
                f"{name}: a line of more than {limit:,} characters",
                hint="is it text? A table whose name does not end in .csv or .tsv is read as plain text if it ends in .txt",
            )
    if rest:
        yield rest


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
        yield from _whole_lines(open_text(file, str(path)), str(path))


def whole_text(path: Path) -> str:
    """The content of a UTF-8 file, with unchanged line ends.

    Raises:
        DataError: the file is missing, damaged or not UTF-8.
    """
    with naming(str(path)), path.open("rb") as file:
        return "".join(open_text(file, str(path))).removeprefix("\ufeff")


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


MALFORMED = "malformed row, left out"
"""Kind of the problem of a row that does not fit its table."""
TableFormat = Literal["csv", "tsv", "jsonl", "json", "parquet", "text"]

BY_SUFFIX: dict[str, TableFormat] = {
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
_BETWEEN = re.compile(r"[\s,]*")
_SAMPLE_ROWS = 100


class Row(NamedTuple):
    """A row of a table.

    Attributes:
        where: its place in messages ("reviews.csv:3").
        number: line of the file where it begins; in a JSON array or Parquet its number, from 1.
    """

    where: str
    values: Mapping[str, Any]
    number: int


@dataclass(slots=True)
class Table:
    """The rows of a file, which can be read once.

    Attributes:
        columns: columns in the order of the file; for JSON lines the keys of the first record.
    """

    name: str
    format: TableFormat
    columns: tuple[str, ...]
    rows: Iterator[Row]

    def sample(self) -> list[Row]:
        """The first hundred rows, which are not read by this. Their keys become columns."""
        sample = list(itertools.islice(self.rows, _SAMPLE_ROWS))
        self.rows = itertools.chain(sample, self.rows)
        self.columns = tuple(dict.fromkeys(itertools.chain(self.columns, *(row.values for row in sample))))
        return sample

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
    if format in (None, "parquet") and path.is_file():  # what is read from a pipe cannot be read again
        with naming(name), path.open("rb") as file:
            is_parquet = file.read(4) == b"PAR1"
        if is_parquet:
            return arrow_table(path.open("rb"), name)
    lines = stream_lines(sys.stdin.buffer, name) if str(path) == "-" else numbered_lines(path)
    begin = list(itertools.islice(itertools.dropwhile(lambda numbered: not numbered[1].strip(), lines), 2))
    if not begin:
        raise DataError(f"{name} is empty", hint="expected a header and rows, or JSON lines")
    (number, first), lines = begin[0], itertools.chain(begin, lines)
    excel = excel_delimiter(first) is not None
    kind = cast(TableFormat, format) or ("csv" if excel else _format(path, first))
    if kind == "parquet":
        raise DataError(f"{name} is not a parquet file", hint="write the file again, or rename it with the suffix of its format")
    if kind == "jsonl" and first.strip() == "{":
        raise one_object(name)
    if kind == "jsonl":
        return json_table(lines, name, None)
    if kind == "json":
        # Many lines at a time, as a value that is not whole is parsed again.
        return array_table(iter(lambda: "\n".join(line for _, line in itertools.islice(lines, 10_000)), ""), name, None)
    if kind == "text":
        # Every line is a row, so that rows and lines stay aligned: what needs a text refuses an empty one by its number.
        above = ((line, "") for line in range(1, number))
        rows = (Row(f"{name}:{line}", {"text": text}, line) for line, text in without_blank_end(itertools.chain(above, lines)))
        return Table(name, "text", ("text",), rows)
    dialect = dialect_of([line for _, line in begin], "\t" if kind == "tsv" else DELIMITERS)
    return delimited_table(lines, name, replace(dialect, verbatim=verbatim), header, malformed)


def _format(path: Path, line: str) -> TableFormat:
    if _JSON_OBJECT.match(line):
        return "jsonl"
    if _JSON_ARRAY.match(line) and suffix_of(path) in (".json", ""):
        return "json"
    return BY_SUFFIX.get(suffix_of(path), "text")


def delimited_table(
    lines: Lines, name: str, dialect: Dialect, header: Sequence[str] | None, problems: ProblemLog | None
) -> Table:
    """The rows of a CSV or TSV file.

    Args:
        header: the columns of a file whose first line is a row with as many fields; None: the first line is the header if it
            looks like one, and otherwise the columns are "column 1", "column 2", ...
        problems: counts rows whose number of fields differs from the header, which are left out; None: they are errors.
    """
    records = split_rows(lines, name, dialect)
    number, first = next(records, (0, list[str]()))
    columns = column_names(first, f"{name}:{number}") if header is not None or is_header(first) else ()
    if header is None and not columns:
        records = itertools.chain([(number, first)] if first else [], records)
        columns = column_names([""] * len(first), name)
    elif header and len(first) == len(header) and not set(first) & set(header):
        records = itertools.chain([(number, first)], records)
        columns = tuple(header)

    def rows() -> Iterator[Row]:
        for number, fields in records:
            if len(fields) == len(columns):
                yield Row(f"{name}:{number}", dict(zip(columns, fields, strict=True)), number)
            elif problems is None:
                raise _other_width(f"{name}:{number}", fields, columns, dialect)
            else:
                problems.add(MALFORMED, f"{name}:{number} ({len(fields)} fields instead of {len(columns)})")

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


def one_object(name: str) -> NotTextError:
    """The error for a JSON file that is a single object."""
    return NotTextError(
        name,
        "it is one JSON object, expected one object per line, or an array of objects",
        "if it is SQuAD's file: --task squad1 --data FOLDER; otherwise write its records as JSON lines: jq -c '.KEY[]' FILE",
    )


def json_table(lines: Lines, name: str, problems: ProblemLog | None) -> Table:
    """The objects of JSON lines.

    Args:
        problems: counts lines that are no objects, which are left out; None: they are errors.
    """

    def values() -> Iterator[tuple[str, Any, int]]:
        for number, line in lines:
            if line.strip():
                try:
                    yield f"{name}:{number}", parsed_json(line, f"{name}:{number}"), number
                except DataError:
                    if problems is None:
                        raise
                    problems.add("line skipped, as it is not JSON", f"{name}:{number}")

    return _object_table(name, "jsonl", values(), problems)


def array_table(pieces: Iterable[str], name: str, problems: ProblemLog | None, limit: int = _LONGEST_LINE) -> Table:
    """The objects of a JSON array, parsed one by one.

    Args:
        pieces: the text.
        problems: counts values that are no objects, which are left out; None: they are errors.
        limit: number of characters that a value may have.
    """

    def values() -> Iterator[tuple[str, Any, int]]:
        parse, text, number = json.JSONDecoder().raw_decode, "", 0
        for piece in pieces:
            text, place = text + piece, 0
            if number == 0 and text.lstrip("\ufeff \t\r\n").startswith("["):
                place = text.index("[") + 1
            while number > 0 or place > 0:
                place = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]
                if text.startswith("]", place):
                    return
                try:
                    value, end = parse(text, place)
                except (ValueError, RecursionError):
                    break  # the value goes on in the next piece
                if end == len(text):
                    break  # as a number may do
                number, place = number + 1, end
                yield f"{name}: record {number}", value, number
            text = text[place:] if number else text
            if len(text) > limit:
                break
        raise DataError(
            f"{name}: not a JSON array of objects: record {number + 1} is damaged, cut short or too long",
            hint="python -m json.tool FILE shows what is wrong; or use JSON lines (one object per line)",
        )

    return _object_table(name, "json", values(), problems)


def _object_table(name: str, format: TableFormat, values: Iterator[tuple[str, Any, int]], problems: ProblemLog | None) -> Table:
    def rows() -> Iterator[Row]:
        for where, value, number in values:
            if isinstance(value, dict):
                yield Row(where, value, number)
            elif problems is None:
                raise DataError(f"{where}: {type(value).__name__} instead of an object", hint="every record is an object: {...}")
            else:
                problems.add("record skipped, as it is not a JSON object", where)

    every = rows()
    first = list(itertools.islice(every, 1))
    if problems is None and not first:
        raise DataError(f"{name} is empty", hint="expected JSON objects")
    return Table(name, format, tuple(first[0].values) if first else (), itertools.chain(first, every))


_BATCH_BYTES = 1 << 25
_ROWS, _PAGES = -1, -2  # layers of an expansion
# Minimum memory of a row in Python: a file may claim to have a billion empty rows.
_BYTES_PER_ROW = 64


def arrow_table(
    file: BinaryIO, name: str, columns: Sequence[str] = (), *, only_text: bool = False, expansion: Expansion | None = None
) -> Table:
    """The rows of a Parquet file, or of an Arrow stream, which `datasets.save_to_disk` writes.

    Args:
        columns: columns to read; empty: all.
        only_text: whether only columns of strings and of token ids are read.
        expansion: limits how much data may come out of the file.

    Raises:
        ConfigError: the extra `parquet` is not installed.
        DataError: the file is damaged, or decompresses to too much data.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as problem:
        raise ConfigError(
            f"{name} is a parquet file, which needs pyarrow", hint="pip install 'discern-nlp[parquet]'"
        ) from problem

    def batches() -> Iterator[Any]:
        if not is_parquet:
            yield from (batch.select(columns) for batch in arrow.ipc.open_stream(file))
            return
        # In a dictionary array, text that is repeated in many rows is stored once.
        source = parquet.ParquetFile(file, read_dictionary=columns if only_text else None)
        for group in range(source.num_row_groups):
            found = source.metadata.row_group(group)
            size = max(1, found.total_byte_size)
            if expansion is not None:
                expansion.count_made(size, _PAGES)
            yield from source.iter_batches(max(1, min(1000, _BATCH_BYTES * found.num_rows // size)), [group], columns)

    def rows() -> Iterator[Row]:
        number = 0
        with _undamaged(name):
            for batch in batches():
                for values in zip(*batch.columns, strict=True):
                    number += 1
                    row = {column: value.as_py() for column, value in zip(columns, values, strict=True)}
                    if expansion is not None:
                        # Pages may be compressed a thousand times, or repeat one long text.
                        text = sum(len(value) for value in row.values() if isinstance(value, str))
                        expansion.count_made(_BYTES_PER_ROW + text, _ROWS)
                    yield Row(f"{name}: row {number}", row, number)

    with _undamaged(name):
        is_parquet = file.read(4) == b"PAR1"
        file.seek(0)
        schema = parquet.read_schema(file) if is_parquet else arrow.ipc.open_stream(file).schema
        file.seek(0)
    if only_text:
        strings = (arrow.string(), arrow.large_string())
        columns = [field.name for field in schema if field.type in strings or field.name == TOKEN_IDS]
    columns = list(columns or schema.names)
    return Table(name, "parquet", tuple(columns), rows())


@contextmanager
def _undamaged(name: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as problem:
        raise DataError(f"{name} is a damaged parquet file: {problem}", hint="fetch it again, or leave it out") from problem


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


TOKEN_IDS = "input_ids"
"""Column of the token ids of pre-tokenized text."""
TEXT_NAMES = (
    "text sentence review content comment document body utterance message abstract title premise question text_a sentence1 "
    "question1 text1 article paragraph passage answer tweet post description caption headline hypothesis text_b sentence2 "
    "question2 text2"
).split()
"""Usual names of text columns, likeliest first."""
LABEL_NAMES = "label labels class category target sentiment stars rating score intent topic gold_label".split()
"""Usual names of label columns, likeliest first."""
_FEWEST_WORDS, _FEWEST_CHARACTERS = 3, 6  # of a text, on average; the second for scripts without spaces between words
_IDEOGRAPHS = re.compile("[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")


def text_column(table: Table, *, required: bool = True) -> str | None:
    """The column of running text: `text`, the only column with a usual name, or the only one with several words in a cell.

    Args:
        required: whether it is an error if no column looks like text.

    Raises:
        ConfigError: it is not clear which one it is.
    """
    cells = _texts(table)
    lowered = {column.lower(): column for column in reversed(table.columns)}
    if len(cells) == 1 or "text" in lowered:
        return lowered.get("text", table.columns[0])
    named = [column for column in table.columns if column.lower() in TEXT_NAMES and cells[column]]
    plausible = named or [column for column in table.columns if _are_texts(cells[column])]
    if len(plausible) == 1:
        return plausible[0]
    if not plausible and not required:
        return None
    candidates = f": {' or '.join(map(repr, plausible))}" if plausible else ""
    raise ConfigError(
        f"{table.name}: it is not clear which column holds the text{candidates}; its columns: {', '.join(table.columns)}",
        hint=f"name it: --text-field '{plausible[0]}'" if plausible else "name it: --text-field NAME",
    )


def _texts(table: Table) -> dict[str, list[str]]:
    """The texts in the first rows, by column."""
    sample = table.sample()
    return {
        column: [text for row in sample if isinstance(text := row.values.get(column), str) and text.strip()]
        for column in table.columns
    }


def _are_texts(cells: Sequence[str]) -> bool:
    """Whether the cells of a column contain several words on average."""
    if not cells or all(number_in(cell) is not None for cell in cells):
        return False
    words = sum(len(cell.split()) for cell in cells) / len(cells)
    ideographs = sum(len(_IDEOGRAPHS.findall(cell)) for cell in cells) / len(cells)
    return words >= _FEWEST_WORDS or ideographs >= _FEWEST_CHARACTERS


def choose_column(table: Table, role: str, names: Sequence[str], taken: Collection[str] = ()) -> str:
    """The column of a role, recognized by its name; the only one without another role; or for "text", the only one of texts.

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
    if len(free) > 1 and role == "text":
        free = [column for column, cells in _texts(table).items() if column in free and _are_texts(cells)]
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
    elif table.format == "jsonl" and suffix_of(table.name) == ".json" and len(table.sample()) == 1:
        raise one_object(table.name)


def option_of(role: str) -> str:
    """The option that names the column of a role."""
    return "--set files.start" if role == "start" else f"--{role}"
