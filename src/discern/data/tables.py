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
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, NamedTuple, get_args

from discern.data.sources.documents import ProblemLog
from discern.data.sources.streams import (
    NotTextError,
    NumberedLines,
    joined,
    naming,
    open_text,
    split_lines,
    whole_lines,
)
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
    delimiter = max(marks, key=lambda mark: len(fields_of(header, mark)))
    return delimiter if len(fields_of(header, delimiter)) != 1 else None


def column_names(header: Sequence[str], where: str) -> tuple[str, ...]:
    """The names of the columns. One without a name, such as the index of a written table, is "column 1".

    Raises:
        DataError: two have the same name.
    """
    columns = [field.strip() or f"column {place}" for place, field in enumerate(header, start=1)]
    twice = max(columns, key=columns.count, default="")
    if columns.count(twice) > 1:
        raise DataError(
            f"{where}: two columns are named '{twice}'",
            hint="give every column a name of its own in the first line; if that line is not a header, write one above it",
        )
    return tuple(columns)


def is_header(fields: Sequence[str]) -> bool:
    """Whether these look like column names: short, and not numbers. The first may be empty, for an index."""
    names = [field.strip() for field in fields]
    filled = names[1:] if names[:1] == [""] and len(names) > 1 else names
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
    begins = last = 0  # the line before the row, the last line read

    def fed() -> Iterator[str]:
        nonlocal last
        for last, line in lines:  # noqa: B007 (read outside)
            yield line + "\n"

    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_FIELD))
    try:
        for fields in csv.reader(fed(), delimiter=dialect.delimiter, strict=True):
            if fields:
                yield begins + 1, fields
            begins = last
    except csv.Error as problem:
        until = f", detected in line {last}" if last > begins + 1 else ""
        raise DataError(
            f"{name}:{begins + 1}: unbalanced quotation marks or a carriage return in the row that begins here{until}: {problem}",
            hint='double them inside a quoted field: "he said ""yes"""; quote a field with a carriage return; or use JSON lines',
        ) from problem


def _unquoted(field: str) -> str:
    """A field quoted as by spreadsheets, without the quotes; any other field unchanged."""
    quoted = re.fullmatch('"((?:[^"]+|"")*)"', field)
    return quoted[1].replace('""', '"') if quoted else field


COMPRESSED = frozenset({".gz", ".xz", ".zst", ".bz2"})
"""Suffixes of compression, which do not tell the format of the content."""


def suffix_of(path: Path | str) -> str:
    """The suffix of a file, ignoring suffixes of compression: ".csv" for "reviews.csv.gz"."""
    return next((end.lower() for end in reversed(Path(path).suffixes) if end.lower() not in COMPRESSED), "")


def numbered_lines(path: Path) -> NumberedLines:
    """The lines of a UTF-8 file, numbered from 1, without line ends. Only a newline ends a line.

    Raises:
        DataError: the file is missing, damaged or not UTF-8; the message names the line.
    """
    yield from split_lines(_text_in(path), str(path))


def _text_in(path: Path) -> Iterator[str]:
    with naming(str(path)), path.open("rb") as file:
        yield from open_text(file, str(path))


def stream_lines(file: IO[bytes], name: str) -> NumberedLines:
    """Like `numbered_lines`, for a stream such as standard input, with bounded memory."""
    with naming(name):
        yield from split_lines(open_text(file, name), name)


def without_blank_end(
    lines: Iterable[tuple[int, str]], left_out: Callable[[int, int], None] = lambda first, last: None
) -> Iterator[tuple[int, str]]:
    """The lines without empty ones at the end; of each group of empty lines elsewhere, which callers refuse, only the first.

    Args:
        left_out: called with the first and the last number of the empty lines at the end.
    """
    blank: tuple[int, str] | None = None
    number = 0
    for number, text in lines:
        if not text.strip():
            blank = blank or (number, text)
            continue
        if blank is not None:
            yield blank
        blank = None
        yield number, text
    if blank is not None:
        left_out(blank[0], number)


def raw_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file unchanged, with line ends, and with a byte order mark if there is one.

    Raises:
        DataError: the file is missing, damaged or not UTF-8.
    """
    return whole_lines(_text_in(path), str(path))


def whole_text(path: Path) -> str:
    """The content of a UTF-8 file, with unchanged line ends.

    Raises:
        DataError: the file is missing, damaged or not UTF-8.
    """
    return joined(_text_in(path), str(path)).removeprefix("\ufeff")


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
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


MALFORMED = "malformed row, left out"
"""Kind of the problem of a row that does not fit its table."""
TableFormat = Literal["csv", "tsv", "jsonl", "json", "parquet", "text"]

_BY_SUFFIX: dict[str, TableFormat] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
}
_NOT_TEXT = (
    "use a suffix that names the format (.csv, .tsv, .jsonl, .parquet), or --set files.format=csv; for prediction --format csv"
)
_NOT_TAGGED = "use the suffix .conll for a file with one word per line, or --set files.format=conll"
_BATCH_ROWS = 200


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

    def sample(self, size: int = 100) -> list[Row]:
        """The first rows, which stay to be read. Their keys become columns."""
        sample = list(itertools.islice(self.rows, size))
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
    kind = format or table_format(name, first)
    if kind == "parquet":
        raise DataError(f"{name} is not a parquet file", hint="write the file again, or rename it with the suffix of its format")
    if kind == "jsonl":
        return json_table(lines, name, None)
    if kind == "json":
        return array_table((f"{line}\n" for _, line in lines), name, None)
    if kind == "text":
        # Every line is a row, so that rows and lines stay aligned: what needs a text refuses an empty one by its number.
        above = ((line, "") for line in range(1, number))
        rows = (Row(f"{name}:{line}", {"text": text}, line) for line, text in without_blank_end(itertools.chain(above, lines)))
        return Table(name, "text", ("text",), rows)
    dialect = dialect_of([line for _, line in begin], "\t" if kind == "tsv" else DELIMITERS)
    return delimited_table(lines, name, replace(dialect, verbatim=verbatim), header, malformed)


def table_format(name: str, begin: str) -> TableFormat:
    """The format of a file, by its name and its beginning, at least a line. A text may begin with a brace or a bracket, too."""
    suffix = suffix_of(name)
    if re.match(r'\s*\{\s*("|\}\s*$|$)', begin, re.MULTILINE):
        return "jsonl"
    if suffix in ("", ".jsonl") and re.match(r"\s*\[\s*(\{|\]\s*$|$)", begin, re.MULTILINE):
        return "json"
    has_excel_line = excel_delimiter(begin.lstrip("\r\n").partition("\n")[0]) is not None
    return "csv" if has_excel_line else _BY_SUFFIX.get(suffix, "text")


def delimited_table(
    lines: NumberedLines, name: str, dialect: Dialect, header: Sequence[str] | None, problems: ProblemLog | None
) -> Table:
    """The rows of a CSV or TSV file.

    Args:
        header: the columns of a file whose first line is a row with as many fields; None: the first line is the header if it
            looks like one, and otherwise the columns are "column 1", "column 2", ...
        problems: counts rows whose number of fields differs from the header, which are left out; None: they are errors.
    """
    records = split_rows(lines, name, dialect)
    number, first = next(records, (0, list[str]()))
    if header is None:
        header = [] if is_header(first) else [f"column {place}" for place in range(1, len(first) + 1)]
    if header and len(first) == len(header) and not set(first) & set(header):
        records = itertools.chain([(number, first)], records)
        first = list(header)
    columns = column_names(first, f"{name}:{number}")

    def rows() -> Iterator[Row]:
        for number, fields in records:
            if len(fields) == len(columns):
                yield Row(f"{name}:{number}", dict(zip(columns, fields, strict=True)), number)
            elif problems is None:
                raise DataError(
                    f"{name}:{number}: {len(fields)} fields, but the header has {len(columns)} ({', '.join(columns)})",
                    hint=f"fields are separated by {dialect.delimiter!r}; quote texts that contain it",
                )
            else:
                problems.add(MALFORMED, f"{name}:{number} ({len(fields)} fields instead of {len(columns)})")

    return Table(name, "tsv" if dialect.tabbed else "csv", columns, rows())


def one_object(name: str) -> NotTextError:
    """The error for a JSON file that is a single object."""
    return NotTextError(
        name,
        "it is one JSON object, expected one object per line, or an array of objects",
        "if it is SQuAD's file: --task squad1 --data FOLDER; otherwise write its records as JSON lines: jq -c '.KEY[]' FILE",
    )


def json_table(lines: NumberedLines, name: str, problems: ProblemLog | None) -> Table:
    """The objects of JSON lines. `problems` counts lines that are no objects, which are left out; None: they are errors."""

    def values() -> Iterator[tuple[int, Any]]:
        for number, line in lines:
            if line.strip():
                try:
                    yield number, parsed_json(line, f"{name}:{number}")
                except DataError:
                    if number == 1 and line.strip() == "{":
                        raise one_object(name) from None
                    if problems is None:
                        raise
                    problems.add("line skipped, as it is not JSON", f"{name}:{number}")

    return _objects(name, "jsonl", values(), problems)


def array_table(pieces: Iterable[str], name: str, problems: ProblemLog | None) -> Table:
    """The objects of a JSON array, which is read as a whole. `problems` as in `json_table`.

    Raises:
        DataError: it is not a JSON array, or is too large.
    """
    values = parsed_json(joined(pieces, name), name)
    if not isinstance(values, list):
        raise DataError(f"{name}: not a JSON array of objects", hint="use an array of objects, or JSON lines")
    return _objects(name, "json", enumerate(values, start=1), problems)


def _objects(name: str, format: TableFormat, values: Iterable[tuple[int, Any]], problems: ProblemLog | None) -> Table:
    def rows() -> Iterator[Row]:
        for number, value in values:
            where = f"{name}:{number}" if format == "jsonl" else f"{name}: record {number}"
            if isinstance(value, dict):
                yield Row(where, value, number)
            elif problems is None:
                raise DataError(f"{where}: {type(value).__name__} instead of an object", hint="every record is an object: {...}")
            else:
                problems.add("record skipped, as it is not a JSON object", where)

    table = Table(name, format, (), rows())
    if not table.sample(1) and problems is None:
        raise DataError(f"{name} is empty", hint="expected JSON objects")
    return table


def arrow_table(file: BinaryIO, name: str, *, only_text: bool = False) -> Table:
    """The rows of a Parquet file, or of an Arrow stream, which `datasets.save_to_disk` writes.

    Args:
        only_text: whether only columns of strings and of token ids are read.

    Raises:
        ConfigError: the extra `parquet` is not installed.
        DataError: the file is damaged.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as problem:
        raise ConfigError(
            f"{name} is a parquet file, which needs pyarrow", hint="pip install 'discern-nlp[parquet]'"
        ) from problem

    @contextmanager
    def undamaged() -> Iterator[None]:
        try:
            yield
        except (arrow.ArrowException, OSError) as problem:
            raise DataError(f"{name} is a damaged parquet file: {problem}", hint="fetch it again, or leave it out") from problem

    with undamaged():
        is_parquet = file.read(4) == b"PAR1"
        file.seek(0)
        source = parquet.ParquetFile(file) if is_parquet else arrow.ipc.open_stream(file)
        schema = source.schema_arrow if is_parquet else source.schema
    kinds = (arrow.string(), arrow.large_string())
    columns = [field.name for field in schema if not only_text or field.type in kinds or field.name == TOKEN_IDS]

    def rows() -> Iterator[Row]:
        with undamaged():
            batches = source.iter_batches(_BATCH_ROWS, columns=columns) if is_parquet else source
            places = itertools.chain.from_iterable(zip(*batch.select(columns).columns, strict=True) for batch in batches)
            for number, values in enumerate(places, start=1):
                row = {column: value.as_py() for column, value in zip(columns, values, strict=True)}
                yield Row(f"{name}: row {number}", row, number)

    return Table(name, "parquet", tuple(columns), rows())


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
    if value is None or value != value:  # NaN
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | dict | tuple | bytes):
        return None
    is_whole = isinstance(value, float) and value.is_integer()
    return clean_text(str(int(value) if is_whole else value)).strip()


def number_in(text: str) -> float | None:
    """The number in a text, which may not be finite; None if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return None


def list_in(text: str) -> list[Any] | None:
    """The JSON list in a text; None if the text is not one."""
    with suppress(DataError):
        if text.lstrip().startswith("[") and isinstance(value := parsed_json(text, ""), list):
            return value
    return None


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
    words = sum(len(cell.split()) for cell in cells)
    ideographs = sum(len(_IDEOGRAPHS.findall(cell)) for cell in cells)
    return bool(cells) and (words >= _FEWEST_WORDS * len(cells) or ideographs >= _FEWEST_CHARACTERS * len(cells))


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
