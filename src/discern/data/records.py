"""Records with a text field: JSON lines, parquet rows, data sets of the Hugging Face hub."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

from discern.data.expansion import Expansion
from discern.data.problems import ProblemLog
from discern.data.streams import BLOCK_BYTES, Readable
from discern.data.text import Limits, Lines
from discern.errors import ConfigError, DataError, DiscernError
from discern.parsing import json_value

_SPOOL_BYTES = 1 << 26


def json_records(stream: Readable, name: str, field: str, limits: Limits, problems: ProblemLog) -> Iterator[Lines]:
    """The text of each JSON object, one a line. A line that is not one is left out and reported.

    Raises:
        ConfigError: the first record has no such field.
        DataError: a line is longer than the limit for records.
    """
    for number, line in _byte_lines(stream, name, limits.record_bytes):
        where = f"{name}: line {number:,}"
        try:
            record = json_value(line)
        except ValueError:
            problems.add("line that is not JSON, left out", where)
            continue
        if not isinstance(record, dict):
            problems.add("record that is no JSON object, left out", where)
            continue
        yield from _record(record, field, where, problems, first=number == 1)


def parquet_records(
    stream: Readable | BinaryIO, name: str, field: str, expansion: Expansion, problems: ProblemLog
) -> Iterator[Lines]:
    """The text of each row of a parquet file. A stream that cannot be searched is put into a temporary file first.

    Args:
        expansion: of the file: pages of a row may be compressed a thousand times, or name one long text again and again.

    Raises:
        ConfigError: the extra `parquet` is not installed, or there is no such column.
        DataError: the file is damaged, or decompresses to too much data.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as problem:
        raise ConfigError(
            f"{name} is a parquet file, which needs pyarrow", hint="pip install 'discern-nlp[parquet]'"
        ) from problem
    with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as spool:
        while block := stream.read(BLOCK_BYTES):
            spool.write(block)
        spool.seek(0)
        try:
            schema = parquet.read_schema(spool)
            if field not in schema.names:
                raise _no_field(field, name, schema.names)
            # As a dictionary, what stands in many rows is held once.
            strings = arrow.types.is_string(schema.field(field).type) or arrow.types.is_large_string(schema.field(field).type)
            table = parquet.ParquetFile(spool, read_dictionary=[field] if strings else None)
            number = 0
            for rows, group in _row_groups(table, field, expansion):
                for batch in table.iter_batches(batch_size=rows, row_groups=[group], columns=[field]):
                    for value in batch.column(0):
                        number += 1
                        text = value.as_py()
                        expansion.count_made(_BYTES_A_ROW + (len(text) if isinstance(text, str) else 0), _PARQUET)
                        yield from _record({field: text}, field, f"{name}: row {number:,}", problems, first=number == 1)
        except (arrow.ArrowException, OSError) as problem:
            raise DataError(f"{name} is a damaged parquet file: {problem}", hint="fetch it again, or leave it out") from problem


_BATCH_BYTES = 1 << 25
_PARQUET, _PAGES = -1, -2  # layers of an expansion
# What Python takes for a row at least: a file may claim a thousand million empty ones.
_BYTES_A_ROW = 64


def _row_groups(table: Any, field: str, expansion: Expansion) -> Iterator[tuple[int, int]]:
    """Rows to read at a time, so that their bytes are few, and the number of each group of rows.

    Raises:
        DataError: what the file says of its pages is more than text ever compresses to.
    """
    found = table.metadata
    for group in range(found.num_row_groups):
        columns = [found.row_group(group).column(at) for at in range(found.num_columns)]
        mine = [column for column in columns if column.path_in_schema.partition(".")[0] == field]
        size, rows = sum(max(0, column.total_uncompressed_size) for column in mine), max(1, found.row_group(group).num_rows)
        expansion.count_made(size, _PAGES)
        yield max(1, min(1000, _BATCH_BYTES * rows // max(1, size))), group


def hub_records(name: str, field: str, problems: ProblemLog) -> Iterator[Lines]:
    """The text of each row of a data set `NAME[:CONFIGURATION[:SPLIT]]` on the hub, streamed; the split is `train` unless named.

    Raises:
        ConfigError: the extra `hf` is not installed, or the rows have no such field.
        DataError: the data set cannot be loaded.
    """
    try:
        import datasets
    except ImportError as problem:
        raise ConfigError(f"hf:{name} needs the package datasets", hint="pip install 'discern-nlp[hf]'") from problem
    path, _, rest = name.partition(":")
    configuration, _, split = rest.partition(":")
    try:
        rows: Iterable[Mapping[str, Any]] = datasets.load_dataset(
            path, configuration or None, split=split or "train", streaming=True
        )
        for number, row in enumerate(rows, start=1):
            yield from _record(row, field, f"hf:{name}: row {number:,}", problems, first=number == 1)
    except DiscernError:
        raise
    except Exception as problem:  # the library lets through whatever its many back ends raise
        raise DataError(f"hf:{name} cannot be read: {problem}", hint="the form is hf:NAME[:CONFIGURATION[:SPLIT]]") from problem


def _record(record: Mapping[str, Any], field: str, where: str, problems: ProblemLog, *, first: bool) -> Iterator[Lines]:
    text = record.get(field)
    if first and field not in record:
        raise _no_field(field, where, list(record))
    if not isinstance(text, str):
        problems.add(f"record without text in '{field}', left out", where)
        return
    if not text.isascii():
        clean = text.encode("utf-8", errors="replace").decode("utf-8")
        if clean != text:  # half of a surrogate pair: legal in JSON, in no UTF-8
            problems.add("half of a surrogate pair, replaced", where)
            text = clean
    yield Lines(text.split("\n"), ends_record=True)


def _no_field(field: str, where: str, names: list[str]) -> ConfigError:
    return ConfigError(
        f"{where} has no field '{field}'; its fields: {', '.join(names) or 'none'}",
        hint="name the one that holds the text with --text-field",
    )


def _byte_lines(stream: Readable, name: str, limit: int) -> Iterator[tuple[int, bytes]]:
    """Lines of a stream without their ends, and their numbers from 1; blank ones are left out.

    Raises:
        DataError: a line exceeds the limit.
    """
    parts: list[bytes] = []
    size, number = 0, 0
    while block := stream.read(BLOCK_BYTES):
        *whole, rest = block.split(b"\n")
        for line in whole:
            number += 1
            if parts:
                line = b"".join([*parts, line])
                parts, size = [], 0
            if line and not line.isspace():
                yield number, line
        if rest:
            parts.append(rest)
            size += len(rest)
        if size > limit:
            raise DataError(
                f"{name}: a record of more than {limit:,} bytes on one line",
                hint="is it one JSON array? discern reads JSON lines: jq -c '.[]' FILE > FILE.jsonl",
            )
    last = b"".join(parts)
    if last.strip():
        yield number + 1, last
