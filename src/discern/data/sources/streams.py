"""Byte streams of unknown content: inspected, decompressed, and limited in how far they may expand."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import os
import re
import select
import tarfile
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import zstandard

from discern.errors import DataError, nearest

BLOCK_BYTES = 1 << 20
HEAD_BYTES = 1 << 16
MAX_NESTING = 8


@runtime_checkable
class Readable(Protocol):
    """Anything that bytes can be read from."""

    def read(self, size: int = -1, /) -> bytes: ...


class HeadStream:
    """A stream whose first bytes can be inspected before they are read.

    Attributes:
        head: the first 64 KiB, or all of it if there is less.
    """

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self.head = read_fully(stream, HEAD_BYTES)
        self._unread = self.head

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes; empty only at the end."""
        if size < 0:
            data, self._unread = self._unread, b""
            return data + self._stream.read()
        if self._unread:
            data, self._unread = self._unread[:size], self._unread[size:]
            return data
        return self._stream.read(size)


class NotTextError(DataError):
    """A file is not UTF-8 text, or is markup or a program.

    Args:
        name: name of the file.
        reason: what it is.
    """

    def __init__(self, name: str, reason: str, hint: str) -> None:
        super().__init__(f"{name} is not text: {reason}", hint=hint)
        self.reason = reason


class TextStream(HeadStream):
    """A stream of text, in which a NUL byte is an error, wherever it is."""

    def __init__(self, stream: Readable, name: str) -> None:
        super().__init__(stream)
        self._name = name

    def read(self, size: int = -1, /) -> bytes:
        data = super().read(size)
        if b"\0" in data:
            raise NotTextError(self._name, *_NUL)
        return data


_NUL = ("it contains NUL bytes", "if it is text, remove them: tr -d '\\0' < FILE > NEW")
_CONVERT = "convert it: iconv -f {0} -t UTF-8 FILE > NEW"
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\r\f\v\b\x1b"))
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
_CONTENTS = {
    "a zip archive or a spreadsheet": (rb"PK\x03\x04", "unpack it; save a spreadsheet as CSV"),
    "a Git LFS pointer instead of the file": (rb"version https://git-lfs\.github\.com/spec/", "fetch the file: git lfs pull"),
    "PDF": (rb"%PDF-", "extract its text: pdftotext FILE FILE.txt"),
    "PostScript": (rb"%!PS", "extract its text: ps2ascii FILE FILE.txt"),
    "RTF": (rb"\{\\rtf", "extract its text: pandoc -f rtf -t plain FILE -o FILE.txt"),
    "LaTeX": (
        rb"(?:%[^\n]*\n|\s)*\\(?:documentclass|documentstyle|begin\{document)",
        "extract its text: pandoc -f latex -t plain FILE -o FILE.txt",
    ),
    "HTML": (
        rb"(?:<!--(?:(?!-->).)*-->|<\?xml[^>]*>|\s)*<(?:!doctype\s+html|(?:html|head|body|title|meta|script|style)\b)",
        "extract its text: trafilatura < FILE > FILE.txt",
    ),
    "XML": (
        rb"(?:<!--(?:(?!-->).)*-->|\s)*<(?:\?xml\b|!doctype\b|mediawiki\b|[a-z][^<>]*\sxmlns\b)",
        "extract its text; for a dump of Wikipedia: python -m wikiextractor.WikiExtractor FILE",
    ),
    "a mailbox": (
        rb"From \S+ +(?:mon|tue|wed|thu|fri|sat|sun) [^\n]*\d{4}|Return-Path: <|"
        rb"Received: (?:from|by) |Message-ID: <|MIME-Version: 1\.0",
        "extract the text of its messages with Python's module mailbox",
    ),
    "a program": (rb"#! ?/|#include *[<\"]|<\?php\b", "leave it out; to train on programs, give them as JSON lines"),
}


def other_content(head: bytes) -> tuple[str, str] | None:
    """What a file that begins with `head` is, if it is a document, markup or a program rather than text, and what to do."""
    text = head.lstrip(codecs.BOM_UTF8 + b" \t\r\n")
    for kind, (pattern, hint) in _CONTENTS.items():
        if re.match(pattern, text, re.IGNORECASE | re.DOTALL):
            return f"it is {kind}", hint
    return None


def other_encoding(head: bytes) -> tuple[str, str] | None:
    """Why a file that begins with `head` is not UTF-8, and what to do; None if it may be."""
    marked = next((encoding for mark, encoding in _MARKS if head.startswith(mark)), None)
    if marked is not None:
        return f"it is {marked}", _CONVERT.format(marked)
    controls = len(head) - len(head.translate(None, _CONTROLS))
    replaced = head.decode("utf-8", errors="replace").count("\ufffd") - head.count("\ufffd".encode())
    wrong = controls + replaced
    if b"\0" in head:
        encoding = likely_encoding(head) if wrong > 0.15 * len(head) else None
        return _NUL if encoding is None else (f"it is {encoding}", _CONVERT.format(encoding))
    if wrong <= 0.1 * len(head) + 3:
        return None
    encoding = likely_encoding(head)
    reason = f"{wrong:,} of its first {len(head):,} bytes are not UTF-8" + (f"; it may be {encoding}" if encoding else "")
    return reason, "if it is text, " + _CONVERT.format(encoding or "ENCODING")


def likely_encoding(data: bytes) -> str | None:
    """The likely encoding of text that is not UTF-8, as iconv names it; None if there is none."""
    if b"\0" in data:
        candidates = ["UTF-32LE", "UTF-32BE", "UTF-16LE", "UTF-16BE"]
    else:
        runs = re.findall(rb"[\x80-\xff]+", data)
        beyond = len(b"".join(runs))
        if beyond < 1.5 * len(runs):  # single letters among ASCII ones
            return "CP1252"
        candidates = ["GB18030", "CP1251"] if beyond >= 8 else []
    for encoding in candidates:
        with suppress(UnicodeDecodeError):
            letters = set(codecs.getincrementaldecoder(encoding)().decode(data)) - set("\t\n\r\f\ufeff")
            if not {"Cc", "Cn", "Co", "Cs"}.intersection(map(unicodedata.category, letters)):
                return encoding
    return None


class PipeStream:
    """Reads a pipe or terminal without blocking for longer than half a second.

    A signal that arrives just before a blocking read is handled only when that read returns, which may be never.
    """

    _WAKE_SECONDS = 0.5

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int = -1, /) -> bytes:
        """The bytes available now, at most `size`; empty only at the end."""
        assert size >= 0
        while not select.select([self._file], [], [], self._WAKE_SECONDS)[0]:
            pass
        return os.read(self._file.fileno(), size)

    def close(self) -> None:
        self._file.close()


class ManyStreams:
    """Decompresses bz2 streams, xz streams or zstd frames that follow each other.

    Unlike the readers of the libraries, it detects damage at the beginning of a stream, which they take for the end of the file,
    and a last frame that is cut short; and it skips the zero bytes that may follow an xz stream.

    Args:
        start: makes the decompressor of one stream.
        block: number of bytes to decompress at a time.
        limit: largest output of one call, if the decompressor takes it.
    """

    def __init__(self, stream: Readable, start: Callable[[], Any], block: int = BLOCK_BYTES, *limit: int) -> None:
        self._stream = stream
        self._start = start
        self._block = block
        self._limit = limit
        self._current: Any = None
        self._input = b""
        self._output = bytearray()

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes.

        Raises:
            EOFError: the file ends inside a stream.
            OSError, lzma.LZMAError, zstandard.ZstdError: it is damaged.
        """
        while size < 0 or len(self._output) < size:
            if not self._input and getattr(self._current, "needs_input", True):
                self._input = self._stream.read(self._block)
                if not self._input:
                    if self._current is not None:
                        raise EOFError("the file ends inside a compressed stream")
                    break
            if self._current is None:
                self._input = self._input.lstrip(b"\0")
                if not self._input:
                    continue
                self._current = self._start()
            self._output += self._current.decompress(self._input, *self._limit)
            self._input = b""
            if self._current.eof:
                self._input, self._current = self._current.unused_data, None
        size = len(self._output) if size < 0 else size
        data = bytes(self._output[:size])
        del self._output[:size]
        return data


_COMPRESSIONS: dict[bytes, Callable[[Readable], Readable]] = {
    b"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=_as_file(stream), mode="rb"),
    b"\xfd7zXZ\x00": lambda stream: ManyStreams(stream, lzma.LZMADecompressor, BLOCK_BYTES, BLOCK_BYTES),
    b"BZh": lambda stream: ManyStreams(stream, bz2.BZ2Decompressor, BLOCK_BYTES, BLOCK_BYTES),
    # A block of 4 compressed bytes may hold 128 KiB, so small reads limit what one call can return.
    b"\x28\xb5\x2f\xfd": lambda stream: ManyStreams(
        stream, zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj, 2048
    ),
}


def decompressor(head: bytes) -> Callable[[Readable], Readable] | None:
    """The decompressor of a stream that begins with `head`; None if it is not compressed."""
    return next((open_ for magic, open_ in _COMPRESSIONS.items() if head.startswith(magic)), None)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Turn errors of reading and decompressing into a DataError that names the file."""
    try:
        yield
    except OSError as problem:
        if problem.errno is None:  # from a decompressor
            raise _damaged(name, problem) from problem
        raise DataError(f"{name} cannot be read: {problem.strerror}", hint=_other_path(name, problem)) from problem
    except (EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError, tarfile.TarError) as problem:
        raise _damaged(name, problem) from problem


def _other_path(name: str, problem: OSError) -> str | None:
    """A hint for a file that cannot be opened: the most similar name in its folder."""
    if isinstance(problem, PermissionError):
        return f"ls -l '{name}' shows who may read it"
    if not isinstance(problem, FileNotFoundError):
        return None
    path = Path(name)
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}; relative paths start at {Path.cwd()}"
    with suppress(OSError):
        if match := nearest(path.name, os.listdir(path.parent)):
            return f"did you mean {path.parent / match}?"
    return f"check the path; relative paths start at {Path.cwd()}"


def _damaged(name: str, problem: Exception) -> DataError:
    return DataError(f"{name} is damaged or cut short: {problem}", hint="fetch it again, or leave it out of the input")


def read_fully(stream: Readable, size: int) -> bytes:
    """Exactly `size` bytes, fewer only at the end. A single read may return less."""
    parts = []
    while size > 0 and (data := stream.read(size)):
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


class _File(io.RawIOBase):
    """A stream as a file object, which the decompressors require."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _as_file(stream: Readable) -> io.BufferedReader:
    return io.BufferedReader(_File(stream), BLOCK_BYTES)


FREE_BYTES = 1 << 26
"""Bytes that any file may expand to."""
LARGEST_RATIO = 250
"""Bytes per byte read that a file may expand to beyond that. Text compresses 3 to 10 times, logs and markup up to 100 times."""


class Expansion:
    """Compares the content of a file with its size as stored, in each layer of compression and archives.

    Decompression must be limited: a few kilobytes can expand to terabytes of zeros or empty lines.

    Args:
        name: name of the file, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._read = 0
        self._made: Counter[int] = Counter()

    def count_read(self, count: int) -> None:
        """Count bytes read from the file as stored."""
        self._read += count

    def count_made(self, count: int, layer: int) -> None:
        """Count bytes of content.

        Args:
            layer: number of decompressors and archives that they came through.

        Raises:
            DataError: the content is larger than compressed text can be.
        """
        self._made[layer] += count
        if self._made[layer] > FREE_BYTES + LARGEST_RATIO * self._read:
            raise DataError(
                f"{self._name} decompresses to too much data: {self._made[layer]:,} bytes came out of "
                f"{self._read:,}, and the limit is {LARGEST_RATIO} times the bytes read and {FREE_BYTES >> 20} MiB",
                hint="if it contains real text, decompress it first and pass the result",
            )

    def watched(self, stream: Readable, layer: int) -> Readable:
        """A stream from a decompressor or an archive, whose bytes are counted."""
        return CountingStream(stream, lambda count: self.count_made(count, layer))


class CountingStream:
    """Reports how many bytes are read from a stream."""

    def __init__(self, stream: Readable, report: Callable[[int], None]) -> None:
        self._stream = stream
        self._report = report

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes of the stream. All of it is read in pieces, which are reported one by one."""
        if size < 0:
            return b"".join(iter(lambda: self.read(1 << 20), b""))
        data = self._stream.read(size)
        self._report(len(data))
        return data


def open_text(file: Readable, name: str) -> TextStream:
    """A file of UTF-8 text, decompressed.

    Raises:
        DataError: it decompresses to too much data, or is not text.
    """
    expansion = Expansion(name)
    stream = HeadStream(CountingStream(file, expansion.count_read))
    layer = 0
    while decompress := decompressor(stream.head):
        layer += 1
        if layer > MAX_NESTING:
            raise DataError(f"{name} is compressed more than {MAX_NESTING} times", hint="decompress it first")
        stream = HeadStream(expansion.watched(decompress(stream), layer))
    if (problem := other_content(stream.head) or other_encoding(stream.head)) is not None:
        raise NotTextError(name, *problem)
    return TextStream(stream, name)
