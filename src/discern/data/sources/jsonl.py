"""JSON lines with one field that contains the text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any, final

from discern.data.sources.base import FileSource, ReadContext, ending, record_texts
from discern.data.sources.documents import Document, Limits
from discern.data.sources.problems import ProblemLog
from discern.data.sources.streams import BLOCK_BYTES, HeadStream, NotTextError, Readable
from discern.errors import DataError
from discern.parsing import json_value

ONE_PER_LINE = "write one object per line: jq -c '.[]' FILE > FILE.jsonl, or for SQuAD: jq -c '.data[].paragraphs[]' FILE"


@final
class JsonLinesSource(FileSource):
    """One JSON object per line; each object is a record."""

    def recognizes(self, name: str, head: bytes) -> bool:
        # The first line of a file that was cut into parts may be the end of a record.
        return is_json_lines(head) or (named_json(name) and is_json_lines(head.partition(b"\n")[2]))

    def documents(self, stream: HeadStream, context: ReadContext) -> Iterator[Document]:
        records = json_records(stream, context.name, context.options.limits, context.problems)
        if context.options.text_field is None and ending(context.name) == "json":
            begin = list(islice(records, 2))
            if len(begin) == 1 and "text" not in begin[0][1]:
                raise one_object(context.name)
            records = chain(begin, records)
        return context.cut_records(record_texts(records, context))


def named_json(name: str) -> bool:
    """Whether the name of a file says that it is JSON."""
    return ending(name) in ("json", "jsonl", "ndjson")


def not_json_lines(name: str) -> NotTextError:
    """The error of a file that is named JSON but has no object in its first line."""
    return NotTextError(name, "it is not JSON lines, as its first line is not an object", ONE_PER_LINE)


def is_json_lines(head: bytes) -> bool:
    """Whether the first line of text is a JSON object. If it is longer than the head, its beginning decides."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not text.startswith(b"{"):
        return False
    line, newline, _ = text.partition(b"\n")
    if not newline and len(text) > BLOCK_BYTES // 32:
        return text[1:].lstrip().startswith(b'"')
    try:
        return isinstance(json_value(line), dict)
    except ValueError:
        return False


def one_object(name: str) -> NotTextError:
    """The error of a file that is a single JSON object."""
    return NotTextError(name, "it is one JSON object, expected one object per line", ONE_PER_LINE)


def json_records(stream: Readable, name: str, limits: Limits, problems: ProblemLog) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The JSON objects of a file, one per line, each with its place. Other lines are left out and reported.

    Raises:
        DataError: a line is longer than a record may be.
    """
    for number, line in byte_lines(stream, name, limits.record_bytes):
        where = f"{name}: line {number:,}"
        try:
            record = json_value(line)
        except ValueError:
            problems.add("line skipped, as it is not JSON", where)
            continue
        if isinstance(record, dict):
            yield where, record
        else:
            problems.add("record skipped, as it is not a JSON object", where)


def byte_lines(stream: Readable, name: str, limit: int) -> Iterator[tuple[int, bytes]]:
    """Numbers, from 1, and content of the lines of a stream. Blank lines are left out.

    Raises:
        DataError: a line is longer than the limit.
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
