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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, get_args

from discern.data.sources.documents import ProblemLog
from discern.data.sources.streams import NotTextError, NumberedLines, file_pieces, naming, shown_name, split_lines
from discern.errors import ConfigError, DataError, did_you_mean
from discern.parsing import json_value

DELIMITERS = ",;\t|"
EXCEL = re.compile(r'\A"?sep=.?"?[ \t\r,;|]*\n', re.IGNORECASE)
"""A first line such as `sep=;`, which is written for Excel."""
NO_DELIMITER = "\x1f"
"""For a table with one column, where "great film, loved it" is one text."""
# In characters: longer than any text, and short enough for memory if an unclosed quotation mark takes in the rest of a file.
LONGEST_FIELD = 10_000_000


def delimiter_of(text: str, format: str) -> str:
    """The delimiter of a table, by its header. With a tab, the table is TSV.

    Args:
        text: its first lines.
    """
    header = text.lstrip("\r\n").partition("\n")[0]
    mark = "\t" if format == "tsv" else max(DELIMITERS, key=lambda mark: number_of_fields(header, mark))
    return mark if format == "tsv" or number_of_fields(header, mark) > 1 else NO_DELIMITER


def number_of_fields(line: str, delimiter: str) -> int:
    """The number of fields in a line; what is in quotation marks is one field."""
    return re.sub('"[^"]*"', "", line).count(delimiter) + 1


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


def split_rows(lines: NumberedLines, name: str, delimiter: str, *, verbatim: bool) -> Iterator[tuple[int, list[str]]]:
    """The rows, header included, and the line in which each begins. Skips blank lines.

    Args:
        verbatim: quotation marks in TSV are text, even around a whole field.

    Raises:
        DataError: a row cannot be read as CSV.
    """
    if delimiter == "\t":
        for number, line in lines:
            if line:
                cells = line.split("\t")
                yield number, cells if verbatim else [_unquoted(cell) for cell in cells]
        return
    csv.field_size_limit(max(csv.field_size_limit(), LONGEST_FIELD))
    reader = csv.reader((line + "\n" for _, line in lines), delimiter=delimiter, strict=True)
    begins = 1
    try:
        for fields in reader:
            if fields:
                yield begins, fields
            begins = reader.line_num + 1
    except csv.Error as problem:
        until = f", detected in line {reader.line_num}" if reader.line_num > begins else ""
        raise DataError(
            f"{name}:{begins}: unbalanced quotation marks or a carriage return in the row that begins here{until}: {problem}",
            hint='double them inside a quoted field: "he said ""yes"""; quote a field with a carriage return; or use JSON lines',
        ) from problem


def _unquoted(field: str) -> str:
    """A field quoted as by spreadsheets, without the quotes; any other field unchanged."""
    quoted = re.fullmatch('"((?:[^"]++|"")*+)"', field)
    return quoted[1].replace('""', '"') if quoted else field


COMPRESSED = frozenset({".gz", ".xz", ".zst", ".bz2"})
"""Suffixes of compression, which do not tell the format of the content."""


def suffix_of(path: Path | str) -> str:
    """The suffix of a file, ignoring suffixes of compression: ".csv" for "reviews.csv.gz"."""
    return next((end.lower() for end in reversed(Path(path).suffixes) if end.lower() not in COMPRESSED), "")


def numbered_lines(path: Path) -> NumberedLines:
    """The lines of a UTF-8 file, or of standard input (`-`), numbered from 1, without line ends. Only a newline ends a line.

    Raises:
        DataError: the file is missing, damaged or not UTF-8; the message names the line.
    """
    return split_lines(file_pieces(path), shown_name(path))


def without_blank_end(lines: NumberedLines) -> NumberedLines:
    """The lines without empty ones at the end; of each group of empty lines elsewhere, which callers refuse, only the first."""
    blank: list[tuple[int, str]] = []
    for line in lines:
        if line[1].strip():
            yield from [*blank, line]
            blank = []
        else:
            blank = blank or [line]


def whole_text(path: Path) -> str:
    """The content of a UTF-8 file, with unchanged line ends.

    Raises:
        DataError: the file is missing, damaged or not UTF-8.
    """
    return "".join(file_pieces(path)).removeprefix("\ufeff")


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

TABLE_SUFFIXES: dict[str, TableFormat] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
}
_OTHER_FORMAT = (
    "use a suffix that names the format (.csv, .tsv, .jsonl, .parquet, .conll), or --set files.format=csv, or files.format=conll "
    "for one word per line; for prediction --format csv"
)
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
        raise ConfigError(
            f"{self.name} has no column '{column}'{kind}; its columns: {', '.join(self.columns) or 'none'}",
            hint=_OTHER_FORMAT if kind else f"{option}: {did_you_mean(column, self.columns)}",
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
    name = shown_name(path)
    if format in (None, "parquet") and path.is_file():  # what is read from a pipe cannot be read again
        with naming(name), path.open("rb") as file:
            is_parquet = file.read(4) == b"PAR1"
        if is_parquet:
            return arrow_table(path.open("rb"), name)
    pieces = file_pieces(path)
    text = EXCEL.sub("\n", next(pieces, "").removeprefix("\ufeff"))  # a blank line keeps the numbers of the others
    if not text.strip():
        raise DataError(f"{name} is empty", hint="expected a header and rows, or JSON lines")
    kind = format or table_format(name, text)
    if kind == "parquet":
        raise DataError(f"{name} is not a parquet file", hint="write the file again, or rename it with the suffix of its format")
    pieces = itertools.chain([text], pieces)
    if kind in ("csv", "tsv"):
        return delimited_table(pieces, name, delimiter_of(text, kind), header, malformed, verbatim=verbatim)
    if kind == "text":
        # Every line is a row, so that rows and lines stay aligned: what needs a text refuses an empty one by its number.
        lines = without_blank_end(split_lines(pieces, name))
        return Table(name, "text", ("text",), (Row(f"{name}:{number}", {"text": line}, number) for number, line in lines))
    return json_table(pieces, name, None, is_array=kind == "json")


def table_format(name: str, begin: str) -> TableFormat:
    """The format of a file, by its name and its beginning, at least a line. A text may begin with a brace or a bracket, too."""
    suffix = suffix_of(name)
    if re.match(r'\s*\{\s*("|\}\s*$|$)', begin, re.MULTILINE):
        return "jsonl"
    if suffix in ("", ".jsonl") and re.match(r"\s*\[\s*(\{|\]\s*$|$)", begin, re.MULTILINE):
        return "json"
    return TABLE_SUFFIXES.get(suffix, "text")


def delimited_table(
    pieces: Iterable[str],
    name: str,
    delimiter: str,
    header: Sequence[str] | None,
    problems: ProblemLog | None,
    *,
    verbatim: bool = False,
) -> Table:
    """The rows of a CSV or TSV file.

    Args:
        header: the columns of a file whose first line is a row with as many fields; None: the first line is the header if it
            looks like one, and otherwise the columns are "column 1", "column 2", ...
        problems: counts rows whose number of fields differs from the header, which are left out; None: they are errors.
    """
    records = split_rows(split_lines(pieces, name), name, delimiter, verbatim=verbatim)
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
                    hint=f"fields are separated by {delimiter!r}; quote texts that contain it",
                )
            else:
                problems.add(MALFORMED, f"{name}:{number} ({len(fields)} fields instead of {len(columns)})")

    return Table(name, "tsv" if delimiter == "\t" else "csv", columns, rows())


def one_object(name: str) -> NotTextError:
    """The error for a JSON file that is a single object."""
    return NotTextError(
        name,
        "it is one JSON object, expected one object per line, or an array of objects",
        "if it is SQuAD's file: --task squad1 --data FOLDER; otherwise write its records as JSON lines: jq -c '.KEY[]' FILE",
    )


def json_table(pieces: Iterable[str], name: str, problems: ProblemLog | None, *, is_array: bool) -> Table:
    """The objects of JSON lines, or of a JSON array, which is read as a whole.

    Args:
        problems: counts lines and items that are no objects, which are left out; None: they are errors.

    Raises:
        DataError: it is not JSON.
    """

    def rows() -> Iterator[Row]:
        for number, value in enumerate(_items("".join(pieces), name), 1) if is_array else _json_lines(pieces, name, problems):
            where = f"{name}: record {number}" if is_array else f"{name}:{number}"
            if isinstance(value, dict):
                yield Row(where, value, number)
            elif problems is None:
                raise DataError(f"{where}: {type(value).__name__} instead of an object", hint="every record is an object: {...}")
            else:
                problems.add("record skipped, as it is not a JSON object", where)

    table = Table(name, "json" if is_array else "jsonl", (), rows())
    table.sample(1)
    return table


def _items(text: str, name: str) -> list[Any]:
    items = parsed_json(text, name)
    return items if isinstance(items, list) else [items]


def _json_lines(pieces: Iterable[str], name: str, problems: ProblemLog | None) -> Iterator[tuple[int, Any]]:
    for number, line in split_lines(pieces, name):
        if line.strip():
            try:
                yield number, parsed_json(line, f"{name}:{number}")
            except DataError:
                if number == 1 and line.strip() == "{":
                    raise one_object(name) from None
                if problems is None:
                    raise
                problems.add("line skipped, as it is not JSON", f"{name}:{number}")


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
            records = (record for batch in batches for record in batch.select(columns).to_pylist())
            for number, record in enumerate(records, start=1):
                yield Row(f"{name}: row {number}", record, number)

    return Table(name, "parquet", tuple(columns), rows())


def number_in(text: str) -> float | None:
    """The number in a text, which may not be finite; None if the text is not a number."""
    try:
        return float(text)
    except ValueError:
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
_FEWEST_WORDS = 3  # of a text, on average
# Two characters of a script without spaces between words count as a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]{2}|[^\s\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+")


def text_column(table: Table, *, required: bool) -> str | None:
    """The column of running text: `text`, the only column with a usual name, or the only one with several words in a cell.

    Args:
        required: whether it is an error if no column looks like text.

    Raises:
        ConfigError: it is not clear which one it is.
    """
    cells = texts_of(table)
    lowered = {column.lower(): column for column in reversed(table.columns)}
    if len(cells) == 1 or "text" in lowered:
        return lowered.get("text", table.columns[0])
    named = [column for column in table.columns if column.lower() in TEXT_NAMES and cells[column]]
    plausible = named or [column for column in table.columns if are_texts(cells[column])]
    if len(plausible) == 1:
        return plausible[0]
    if not plausible and not required:
        return None
    candidates = f": {' or '.join(map(repr, plausible))}" if plausible else ""
    raise ConfigError(
        f"{table.name}: it is not clear which column holds the text{candidates}; its columns: {', '.join(table.columns)}",
        hint=f"name it: --text-field '{plausible[0]}'" if plausible else "name it: --text-field NAME",
    )


def texts_of(table: Table) -> dict[str, list[str]]:
    """The texts in the first rows, by column."""
    sample = table.sample()
    return {
        column: [text for row in sample if isinstance(text := row.values.get(column), str) and text.strip()]
        for column in table.columns
    }


def are_texts(cells: Sequence[str]) -> bool:
    """Whether the cells of a column contain several words on average."""
    return bool(cells) and sum(len(_WORD.findall(cell)) for cell in cells) >= _FEWEST_WORDS * len(cells)
