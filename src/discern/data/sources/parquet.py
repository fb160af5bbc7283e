"""Parquet files with one column that contains the text."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any, final

from discern.data.sources.base import FileSource, ReadContext, text_column, text_of
from discern.data.sources.documents import Document, Lines
from discern.data.sources.streams import BLOCK_BYTES, Expansion, HeadStream, Readable
from discern.errors import ConfigError, DataError
from discern.storage.files import writing_temporary_files

_SPOOL_BYTES = 1 << 26
_BATCH_BYTES = 1 << 25
_PARQUET, _PAGES = -1, -2  # layers of an expansion
# Minimum memory of a row in Python: a file may claim to have a billion empty rows.
_BYTES_PER_ROW = 64


@final
class ParquetSource(FileSource):
    """The rows of a parquet file; each row is a record."""

    is_binary = True

    def recognizes(self, name: str, head: bytes) -> bool:
        return head.startswith(b"PAR1")

    def documents(self, stream: HeadStream, context: ReadContext) -> Iterator[Document]:
        return context.cut_records(parquet_records(stream, context))


def parquet_records(stream: Readable, context: ReadContext) -> Iterator[Lines]:
    """The text of each row of a parquet file, which is copied to a temporary file, because it is not read in order.

    Raises:
        ConfigError: the extra `parquet` is not installed, or there is no such column.
        DataError: the file is damaged, or decompresses to too much data.
    """
    name, expansion, field = context.name, context.expansion, context.options.text_field
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as problem:
        raise ConfigError(
            f"{name} is a parquet file, which needs pyarrow", hint="pip install 'discern-nlp[parquet]'"
        ) from problem
    with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as spool:
        while block := stream.read(BLOCK_BYTES):
            with writing_temporary_files():
                spool.write(block)
        spool.seek(0)
        try:
            schema = parquet.read_schema(spool)
            kinds = (arrow.types.is_string, arrow.types.is_large_string)
            strings = [column.name for column in schema if any(is_kind(column.type) for is_kind in kinds)]
            columns = strings if strings and field is None else schema.names
            place = text_column(columns, [], field, name)
            assert place is not None
            field = columns[place]
            # In a dictionary array, text that is repeated in many rows is stored once.
            table = parquet.ParquetFile(spool, read_dictionary=[field] if field in strings else None)
            number = 0
            for rows, group in _row_groups(table, field, expansion):
                for batch in table.iter_batches(batch_size=rows, row_groups=[group], columns=[field]):
                    for value in batch.column(0):
                        number += 1
                        text = value.as_py()
                        # Pages may be compressed a thousand times, or repeat one long text.
                        expansion.count_made(_BYTES_PER_ROW + (len(text) if isinstance(text, str) else 0), _PARQUET)
                        yield from text_of(text, field, f"{name}: row {number:,}", context.problems)
        except (arrow.ArrowException, OSError) as problem:
            raise DataError(f"{name} is a damaged parquet file: {problem}", hint="fetch it again, or leave it out") from problem


def _row_groups(table: Any, field: str, expansion: Expansion) -> Iterator[tuple[int, int]]:
    """The number of rows to read at a time, so that they fit into memory, and the index of each row group.

    Raises:
        DataError: according to its metadata, the file is larger than compressed text can be.
    """
    found = table.metadata
    for group in range(found.num_row_groups):
        columns = [found.row_group(group).column(at) for at in range(found.num_columns)]
        mine = [column for column in columns if column.path_in_schema.partition(".")[0] == field]
        size, rows = sum(max(0, column.total_uncompressed_size) for column in mine), max(1, found.row_group(group).num_rows)
        expansion.count_made(size, _PAGES)
        yield max(1, min(1000, _BATCH_BYTES * rows // max(1, size))), group
