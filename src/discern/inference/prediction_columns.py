"""Predictions as additional columns of the input table; the other columns are kept byte for byte.

CSV, TSV and JSON lines are read again as raw text, and the new values are added at the end of each record, so that quotes, spaces
and line ends of the others are preserved. A JSON array and Parquet are rewritten with the same values.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from discern.data.sources.streams import file_pieces, whole_lines
from discern.data.tables import EXCEL, NO_DELIMITER, Table, delimiter_of, open_table, parsed_json, suffix_of
from discern.errors import ConfigError, DataError
from discern.inference.prediction_input import InputFormat
from discern.tasks.base import Prediction

_NAMES = ("prediction", "probability")
_ENDINGS = {".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
_BOM = "\ufeff"
Cells = tuple[Any, ...]


def readable_again(path: Path, out: Path | None, format: InputFormat | None, *, logits: bool) -> Table:
    """Open the table to append predictions to, without reading its rows.

    Raises:
        ConfigError: the input is not a table, or can be read only once; or there is no output, or its name has another format.
        DataError: the input cannot be read.
    """
    if out is None:
        raise ConfigError("--append writes a table to a file", hint="add --out FILE")
    if logits:
        raise ConfigError("--append adds only the prediction and its probability", hint="leave out --logits or --append")
    if str(path) == "-":
        raise ConfigError("--append reads its input twice, which standard input does not allow", hint="save it to a file first")
    none = ConfigError(
        f"{path} is not a table, so no columns can be appended to it",
        hint="--append takes CSV, TSV, JSON lines, a JSON array or Parquet; without it the predictions are JSON lines",
    )
    if format == "conll":
        raise none
    table = open_table(path, format)
    if table.format == "text":
        raise none
    promised = _ENDINGS.get(out.suffix.lower(), table.format)
    if promised != table.format and suffix_of(out) != suffix_of(path):
        raise ConfigError(
            f"{out} would be a {table.format} file, like {path}", hint=f"name it {out.with_suffix(suffix_of(path))}"
        )
    return table


def write_appended(
    table: Table, predictions: Iterable[list[Prediction]], kind: str, file: io.TextIOWrapper, note: Callable[[str], None]
) -> int:
    """Write the rows of a table with their predictions; return the number of rows.

    Args:
        kind: kind of the task's labels.
        note: called with the names of the new columns, if the usual names are taken.

    Raises:
        DataError: the table has changed since its rows were read.
    """
    names = _free_names(table.columns, _NAMES if kind != "number" else _NAMES[:1], note)
    path, rows = Path(table.name), 0
    cells = (_cells(each, kind) for block in predictions for each in block)
    changed = DataError(f"{path} changed while it was read", hint="run the same command again")

    def following() -> Cells:
        found = next(cells, None)
        if found is None:
            raise changed
        return found

    if table.format == "parquet":
        rows = _parquet(path, names, kind, following, file)
    elif table.format == "json":
        records = open_table(path, "json").rows
        done = [{**record.values, **dict(zip(names, following(), strict=True))} for record in records]
        json.dump(done, file, ensure_ascii=False, indent=1)
        file.write("\n")
        rows = len(done)
    else:
        make = {"csv": _csv, "tsv": _tsv, "jsonl": _json_lines}[table.format]
        for piece, is_row in make(path, names, following):
            file.write(piece)
            rows += is_row
    if next(cells, None) is not None:
        raise changed
    return rows


def _free_names(columns: tuple[str, ...], wanted: tuple[str, ...], note: Callable[[str], None]) -> tuple[str, ...]:
    """The wanted names, with a number appended if the table has such a column."""
    number = 1
    while any(_numbered(name, number) in columns for name in wanted):
        number += 1
    names = tuple(_numbered(name, number) for name in wanted)
    if number > 1:
        note(f"the input has such a column, so the new columns are called {' and '.join(names)}")
    return names


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}_{number}"


def _cells(prediction: Prediction, kind: str) -> Cells:
    """The prediction for a row, and its probability."""
    if kind == "number":
        return (prediction["score"],)
    if kind == "single":
        return prediction["label"], prediction["probabilities"][prediction["label"]]
    if kind == "multi":
        return prediction["labels"], [prediction["probabilities"][label] for label in prediction["labels"]]
    if kind == "tags":
        return prediction["tags"], prediction["probabilities"]
    best = prediction["nbest"][0]["probability"] if prediction["answer"] and prediction["nbest"] else None
    return prediction["answer"], best


def _written(value: Any) -> str:
    """A value as text: lists are separated by spaces, or JSON if an item contains a space."""
    if isinstance(value, list):
        parts = [str(each) for each in value]
        return " ".join(parts) if not any(" " in part or not part for part in parts) else json.dumps(value, ensure_ascii=False)
    return "" if value is None else str(value)


def _csv(path: Path, names: tuple[str, ...], following: Callable[[], Cells]) -> Iterator[tuple[str, bool]]:
    """The text of the new file in pieces, each with whether it is a row."""
    taken: list[str] = []
    lines = whole_lines(file_pieces(path), str(path))
    before: list[str] = []
    for first in lines:
        before.append(first)
        if _is_row(first):
            break
    delimiter = delimiter_of("".join(before[-1:]).lstrip(_BOM), "csv")
    mark = "," if delimiter == NO_DELIMITER else delimiter

    def fed() -> Iterator[str]:
        for line in chain(before[-1:], lines):
            taken.append(line)
            yield line.lstrip(_BOM) if len(taken) == 1 else line

    yield from ((line, False) for line in before[:-1])
    is_header = True
    for fields in csv.reader(fed(), delimiter=delimiter, strict=True):
        raw = "".join(taken)
        taken.clear()
        if not fields:
            yield raw, False
            continue
        values = names if is_header else following()
        body = raw.rstrip("\r\n")
        # The texts of a table with one column may contain commas, which become delimiters now.
        kept = body if mark == delimiter else _record(fields, mark)
        cells = _record([_written(value) for value in values], mark)
        yield f"{kept}{mark}{cells}{raw[len(body) :] or chr(10)}", not is_header
        is_header = False


def _record(fields: list[str], delimiter: str) -> str:
    buffer = io.StringIO()
    # With an empty terminator, the writer would not quote line ends inside of a field.
    csv.writer(buffer, delimiter=delimiter, lineterminator="\r\n").writerow(fields)
    return buffer.getvalue().removesuffix("\r\n")


def _is_row(line: str) -> bool:
    """Whether the first lines of a file end with this one: it is neither blank nor written for Excel."""
    return bool(EXCEL.sub("", line.lstrip(_BOM)).strip())


def _tsv(path: Path, names: tuple[str, ...], following: Callable[[], Cells]) -> Iterator[tuple[str, bool]]:
    is_header = True
    for raw in whole_lines(file_pieces(path), str(path)):
        body = raw.rstrip("\r\n")
        if not (_is_row(raw) if is_header else body):
            yield raw, False
            continue
        values = names if is_header else following()
        cells = [" ".join(_written(value).split()) for value in values]  # without tabs and line ends
        yield "\t".join([body, *cells]) + (raw[len(body) :] or "\n"), not is_header
        is_header = False


def _json_lines(path: Path, names: tuple[str, ...], following: Callable[[], Cells]) -> Iterator[tuple[str, bool]]:
    for number, raw in enumerate(whole_lines(file_pieces(path), str(path)), start=1):
        body = raw.strip(_BOM + " \t\r\n")
        if not body:
            yield raw, False
            continue
        values = following()
        record = parsed_json(body, f"{path}:{number}")
        taken = next((name for name in names if name in record), None)
        if taken is not None:
            raise DataError(
                f"{path}:{number}: this record has a '{taken}', but the first one does not",
                hint="rename it, or predict without --append",
            )
        more = ", ".join(
            f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in zip(names, values, strict=True)
        )
        end = raw.rindex("}")
        yield f"{raw[:end].rstrip()}{', ' if record else ''}{more}{raw[end:]}", True


def _parquet(path: Path, names: tuple[str, ...], kind: str, following: Callable[[], Cells], file: io.TextIOWrapper) -> int:
    """Write batches of a thousand rows, to limit memory."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    text, number = arrow.string(), arrow.float64()
    types = {"number": (number,), "single": (text, number), "spans": (text, number)}
    columns = types.get(kind, (arrow.list_(text), arrow.list_(number)))
    source = parquet.ParquetFile(path)
    schema = source.schema_arrow
    for name, column in zip(names, columns, strict=True):
        schema = schema.append(arrow.field(name, column))
    rows = 0
    with parquet.ParquetWriter(file.buffer, schema) as writer:
        for batch in source.iter_batches(batch_size=1000):
            cells = [following() for _ in range(batch.num_rows)]
            new = [arrow.array([each[place] for each in cells], column) for place, column in enumerate(columns)]
            writer.write_batch(arrow.record_batch([*batch.columns, *new], schema=schema))
            rows += batch.num_rows
    return rows
