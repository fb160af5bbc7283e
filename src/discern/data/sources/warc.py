"""Web archives: the text of the pages in the WET files of Common Crawl, which are WARC files.

Reference: ISO 28500:2017, the WARC format 1.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

from discern.data.sources.base import FileSource, ReadContext
from discern.data.sources.documents import Document, Lines
from discern.data.sources.streams import BLOCK_BYTES, HeadStream, Readable, read_fully
from discern.errors import DataError

_TEXT_TYPES = ("conversion", "resource")
_LONGEST_HEADER = 1 << 16


@final
class WarcSource(FileSource):
    """The records of plain text in a WARC file; each is a record. Other records, such as HTML pages, are left out."""

    is_binary = True
    priority = 1

    def recognizes(self, name: str, head: bytes) -> bool:
        return head.startswith((b"WARC/1.", b"WARC/0.1"))

    def documents(self, stream: HeadStream, context: ReadContext) -> Iterator[Document]:
        return context.cut_records(_records(stream, context))


def _records(stream: Readable, context: ReadContext) -> Iterator[Lines]:
    """The text of each record.

    Raises:
        DataError: the file is damaged or cut short.
    """
    reader, limit = _Reader(stream), context.options.limits.record_bytes
    number = 0
    while (fields := _header(reader, context.name)) is not None:
        number += 1
        where = f"{context.name}: record {number:,}"
        length = fields.get("content-length", "")
        if not length.isdecimal():
            raise DataError(f"{where} has no Content-Length", hint="fetch the file again, or leave it out of the input")
        kind, media = fields.get("warc-type", ""), fields.get("content-type", "").partition(";")[0].strip().lower()
        if kind in _TEXT_TYPES and media == "text/plain" and int(length) <= limit:
            content = reader.read(int(length))
            text = content.decode("utf-8", errors="replace")
            if (replaced := text.count("\ufffd") - content.count("\ufffd".encode())) > 0:
                context.problems.add("invalid UTF-8, replaced", where, replaced)
            yield Lines(text.split("\n"), ends_record=True)
        else:
            reader.skip(int(length))
            if kind in _TEXT_TYPES and media == "text/plain":
                context.problems.add("record skipped, as it is too long", where)
            elif kind in (*_TEXT_TYPES, "response"):
                context.problems.add("record skipped, as it is not plain text; WET files have the text of pages", where)
        reader.ended(where)


class _Reader:
    """Lines and blocks of a stream."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._rest = b""
        self._short = False

    def line(self) -> bytes:
        """A line with its end; empty at the end of the stream."""
        while (place := self._rest.find(b"\n")) < 0 and len(self._rest) < _LONGEST_HEADER:
            if not (block := self._stream.read(BLOCK_BYTES)):
                break
            self._rest += block
        cut = place + 1 if place >= 0 else len(self._rest)
        line, self._rest = self._rest[:cut], self._rest[cut:]
        return line

    def read(self, size: int) -> bytes:
        """Exactly `size` bytes, fewer only at the end."""
        data, self._rest = self._rest[:size], self._rest[size:]
        data += read_fully(self._stream, size - len(data))
        self._short = len(data) < size
        return data

    def skip(self, size: int) -> None:
        """Leave out bytes."""
        while size > 0 and not self._short:
            step = min(size, BLOCK_BYTES)
            self.read(step)
            size -= step

    def ended(self, where: str) -> None:
        """Check that the last record was whole.

        Raises:
            DataError: the stream ended inside it.
        """
        if self._short:
            raise DataError(f"{where} is cut short", hint="fetch the file again, or leave it out of the input")


def _header(reader: _Reader, name: str) -> dict[str, str] | None:
    """The fields of the next record, with names in lower case; None at the end.

    Raises:
        DataError: no record begins here.
    """
    line = reader.line()
    while line in (b"\r\n", b"\n"):
        line = reader.line()
    if not line:
        return None
    if not line.startswith(b"WARC/"):
        raise DataError(f"{name} is damaged: expected a WARC record, found {line[:40]!r}", hint="fetch it again, or leave it out")
    fields: dict[str, str] = {}
    size = 0
    while (line := reader.line()) not in (b"\r\n", b"\n", b""):
        key, _, value = line.decode("utf-8", errors="replace").partition(":")
        fields[key.strip().lower()] = value.strip()
        size += len(line)
        if size > _LONGEST_HEADER:
            raise DataError(f"{name} is damaged: a WARC header of more than {_LONGEST_HEADER:,} bytes", hint="fetch it again")
    return fields
