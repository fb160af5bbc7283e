"""Byte streams of unknown content: decompressed, decoded, and limited in how far they may expand."""

from __future__ import annotations

import bz2
import codecs
import io
import lzma
import os
import re
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import zstandard

from discern.data.sources.documents import ProblemLog
from discern.errors import ConfigError, DataError, nearest

BLOCK_BYTES = 1 << 20
HEAD_BYTES = 1 << 16
MAX_NESTING = 8
# Few, because a block of 4 bytes compressed by zstd may hold 128 KiB.
_COMPRESSED_BYTES = 1 << 11


class Readable(Protocol):
    """Anything that bytes can be read from."""

    def read(self, size: int = -1, /) -> bytes: ...


class NotTextError(DataError):
    """A file is not text, or is markup or a program.

    Args:
        name: name of the file.
        reason: what it is.
    """

    def __init__(self, name: str, reason: str, hint: str) -> None:
        super().__init__(f"{name} is not text: {reason}", hint=hint)
        self.reason = reason


class _Pieces(io.RawIOBase):
    """Pieces of bytes as a file. A read returns less than asked for only at the end."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        filled = 0
        while filled < len(buffer):
            if not self._rest:
                if (piece := next(self._pieces, None)) is None:
                    break
                self._rest = memoryview(piece)
            part = self._rest[: len(buffer) - filled]
            buffer[filled : filled + len(part)] = part
            self._rest = self._rest[len(part) :]
            filled += len(part)
        return filled


def opened(pieces: Iterator[bytes]) -> io.BufferedReader:
    """Pieces of bytes as a file, whose first 64 KiB `head_of` shows."""
    return io.BufferedReader(_Pieces(pieces), HEAD_BYTES)


def head_of(stream: io.BufferedReader) -> bytes:
    """The first 64 KiB of a file of which nothing was read yet, or all of it if there is less."""
    return stream.peek(HEAD_BYTES)


def blocks(stream: Readable, size: int = BLOCK_BYTES) -> Iterator[bytes]:
    """The content of a stream, block by block."""
    return iter(partial(stream.read, size), b"")


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

    def stored(self, file: Readable, report: Callable[[int], None] = lambda size: None) -> io.BufferedReader:
        """The file as stored. The bytes read are counted, and reported."""

        def counted() -> Iterator[bytes]:
            for block in blocks(file):
                self._read += len(block)
                report(len(block))
                yield block

        return opened(counted())

    def made(self, pieces: Iterator[bytes], layer: int) -> io.BufferedReader:
        """What comes out of a decompressor or an archive, counted."""

        def counted() -> Iterator[bytes]:
            for piece in pieces:
                self.count_made(len(piece), layer)
                yield piece

        return opened(counted())

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


_COMPRESSIONS: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": partial(zlib.decompressobj, 31),
    b"\xfd7zXZ\x00": lzma.LZMADecompressor,
    b"BZh": bz2.BZ2Decompressor,
    b"\x28\xb5\x2f\xfd": zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj,
}


def decompressed(stream: io.BufferedReader, name: str, expansion: Expansion, depth: int = 0) -> tuple[io.BufferedReader, int]:
    """The content of a stream that may be compressed, even more than once, and the depth of the content.

    Args:
        depth: number of compressions and archives around the stream.

    Raises:
        DataError: the depth exceeds `MAX_NESTING`.
    """
    while start := next((start for magic, start in _COMPRESSIONS.items() if head_of(stream).startswith(magic)), None):
        depth += 1
        stream = expansion.made(_decompress(stream, start), depth)
        if depth > MAX_NESTING:
            break
    if depth > MAX_NESTING:
        raise DataError(f"{name}: compressed or in archives more than {MAX_NESTING} times", hint="unpack the outer ones first")
    return stream, depth


def _decompress(stream: io.BufferedReader, start: Callable[[], Any]) -> Iterator[bytes]:
    """What compressed streams that follow each other hold, possibly with zero bytes between them.

    Unlike the readers of the libraries, this detects damage at the beginning of a stream, which they take for the end of the
    file, and a last frame that is cut short.
    """
    current, rest = None, b""
    while data := rest or stream.read(_COMPRESSED_BYTES):
        rest = b""
        if current is None:
            if not (data := data.lstrip(b"\0")):
                continue
            current = start()
        yield current.decompress(data)
        if current.eof:
            rest, current = current.unused_data, None
    if current is not None:
        raise EOFError("the file ends inside a compressed stream")


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Turn errors of reading and decompressing into a DataError that names the file."""
    damage = (EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError, tarfile.TarError, zipfile.BadZipFile)
    try:
        yield
    except (OSError, *damage) as problem:
        if isinstance(problem, OSError) and problem.errno is not None:  # otherwise it is from a decompressor
            raise DataError(f"{name} cannot be read: {problem.strerror}", hint=_other_path(name, problem)) from problem
        raise DataError(
            f"{name} is damaged or cut short: {problem}", hint="fetch it again, or leave it out of the input"
        ) from problem


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


_NUL = ("it contains NUL bytes", "if it is text, remove them: tr -d '\\0' < FILE > NEW; or --encoding utf-16-le")
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\r\f\v\b\x1b"))
_BEGINS_HTML = (
    r"(?:<!--(?:(?!-->).)*-->|<\?xml[^>]*>|\s)*<(?:!doctype\s+html|(?:html|head|body|title|meta|link|script|style)\b|"
    r"(div|span|p|a|h[1-6]|table|ul|ol|nav|header|main|article|section)\b.*</\1>)"
)
_CLOSING_TAG = re.compile("</(?:p|div|span|a|li|tr|td|h[1-6]|script|style)>", re.IGNORECASE)
_CONTENTS = {
    "a zip archive or a spreadsheet": ("PK\x03\x04", "unpack it; save a spreadsheet as CSV"),
    "a Git LFS pointer instead of the file": (r"version https://git-lfs\.github\.com/spec/", "fetch the file: git lfs pull"),
    "PDF": ("%PDF-", "extract its text: pdftotext FILE FILE.txt"),
    "PostScript": ("%!PS", "extract its text: ps2ascii FILE FILE.txt"),
    "RTF": (r"\{\\rtf", "extract its text: pandoc -f rtf -t plain FILE -o FILE.txt"),
    "LaTeX": (
        r"(?:%[^\n]*\n|\s)*\\(?:documentclass|documentstyle|begin\{document)",
        "extract its text: pandoc -f latex -t plain FILE -o FILE.txt",
    ),
    "HTML": (_BEGINS_HTML, "extract its text: trafilatura < FILE > FILE.txt; prepare does it with 'discern-nlp[web]'"),
    "XML": (
        r"(?:<!--(?:(?!-->).)*-->|\s)*<(?:\?xml\b|!doctype\b|mediawiki\b|[a-z][^<>]*\sxmlns\b)",
        "extract its text; for a dump of Wikipedia: python -m wikiextractor.WikiExtractor FILE",
    ),
    "a mailbox": (
        r"From \S+ +(?:mon|tue|wed|thu|fri|sat|sun) [^\n]*\d{4}|Return-Path: <|"
        r"Received: (?:from|by) |Message-ID: <|MIME-Version: 1\.0",
        "extract the text of its messages with Python's module mailbox",
    ),
    "a program": (r"#! ?/|#include *[<\"]|<\?php\b", "leave it out; to train on programs, give them as JSON lines"),
}


def is_html(head: str) -> bool:
    """Whether a file that begins with `head` is an HTML page, or consists of pieces of one."""
    begins = re.match(_BEGINS_HTML, head.lstrip("\ufeff \t\r\n"), re.IGNORECASE | re.DOTALL)
    return begins is not None or len(_CLOSING_TAG.findall(head)) > max(2, len(head) // 200)


def other_content(head: str) -> tuple[str, str] | None:
    """What a file that begins with `head` is, if it is a document, markup or a program rather than text, and what to do."""
    text = head.lstrip("\ufeff \t\r\n")
    for kind, (pattern, hint) in _CONTENTS.items():
        if re.match(pattern, text, re.IGNORECASE | re.DOTALL):
            return f"it is {kind}", hint
    return None


_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_ENCODINGS = "cp1252 cp1251 gb18030 shift_jis euc_jp euc_kr big5 cp1250 koi8_r cp1253 cp1254 cp1255 cp1256".split()
_WESTERN = {*map(chr, range(128)), *"ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÑÒÓÔÕÖØÙÚÛÜßàáâãäåæçèéêëìíîïñòóôõöøùúûüÿŒœ«»‘’“”„–—…€£§°ªº¡¿·\xa0"}


def detect_encoding(head: bytes) -> str | None:
    """The likely encoding of text that begins with `head`; None if it is no text, or in no encoding that can be told."""
    if mark := next((encoding for mark, encoding in _MARKS.items() if head.startswith(mark)), None):
        return mark
    controls = len(head) - len(head.translate(None, _CONTROLS))
    if b"\0" in head or controls > 0.1 * len(head) + 3:
        return None
    text = head.decode("utf-8", errors="replace")
    invalid = text.count("\ufffd") - head.count("\ufffd".encode())
    valid = len(re.findall(r"[^\x00-\x7f\ufffd]", text))
    if invalid <= max(valid, len(head) // 1000):  # stray bytes
        return "utf-8"
    import charset_normalizer

    whole = head[: head.rfind(b"\n") + 1] or head  # the head may end inside a character
    matches = charset_normalizer.from_bytes(whole, cp_isolation=_ENCODINGS)
    if (best := matches.best()) is None:
        return "utf-8" if invalid <= 0.1 * len(head) + 3 else None
    with suppress(KeyError):
        # Preferred to cp1250, which differs in few letters.
        if matches["cp1252"].chaos <= best.chaos and set(whole.decode("cp1252", errors="replace")) <= _WESTERN:
            return "windows-1252"
    return best.encoding.replace("cp125", "windows-125")


def text_pieces(
    stream: io.BufferedReader, name: str, encoding: str | None = None, problems: ProblemLog | None = None
) -> Iterator[str]:
    """The text of a stream, decoded piece by piece, with a byte order mark if there is one.

    Args:
        encoding: its encoding; None: detected, or UTF-8 without `problems`.
        problems: counts invalid bytes, which are replaced by U+FFFD; None: they are an error.

    Raises:
        NotTextError: it is in no encoding that can be told, or contains a NUL character.
        DataError: a byte is invalid; the message names the line.
        ConfigError: the encoding is unknown.
    """
    if problems is None:
        encoding = "utf-8"
    elif encoding is None:
        head = head_of(stream)
        encoding = detect_encoding(head)
        if encoding is None:
            reason = _NUL if b"\0" in head else ("it is not UTF-8", "if it is text, name its encoding: --encoding NAME")
            raise NotTextError(name, *(other_content(head.decode(errors="replace")) or reason))
        if encoding != "utf-8":
            problems.note(f"read as {encoding} (detected): {name}; --encoding NAME to choose another", about=encoding)
    try:
        decoder = codecs.getincrementaldecoder(encoding)()
    except LookupError:
        raise ConfigError(f"unknown encoding '{encoding}'", hint="--encoding takes a name such as windows-1252") from None
    # The first piece is the head, from which the format is recognized.
    ends, position, lines = b"", 0, 1
    for block in chain([stream.read(HEAD_BYTES)], blocks(stream), [ends]):
        try:
            text = decoder.decode(block, block is ends)
        except UnicodeDecodeError as problem:
            if problems is None:
                raise _not_utf8(name, lines, problem) from problem
            decoder.errors = "replace"
            text = decoder.decode(block, block is ends)
            decoder.errors = "strict"
            place = position + problem.start - (len(problem.object) - len(block))
            invalid = max(1, text.count("\ufffd") - problem.object.count("\ufffd".encode()))
            problems.add(f"invalid {encoding.upper()}, replaced", f"{name}: byte {place:,}", invalid)
            if (other := detect_encoding(problem.object)) not in (None, "utf-8"):
                problems.note(f"bytes that are not {encoding.upper()} are replaced; the file may be {other}: --encoding {other}")
        if "\0" in text:
            raise NotTextError(name, *_NUL)
        position += len(block)
        lines += block.count(b"\n")
        if text:
            yield text


def _not_utf8(name: str, line: int, problem: UnicodeDecodeError) -> DataError:
    line += problem.object.count(b"\n", 0, problem.start)
    encoding = detect_encoding(problem.object[:HEAD_BYTES])
    may_be = f"it may be {encoding}, so " if encoding not in (None, "utf-8") else ""
    of = encoding if may_be else "ENCODING"
    file = Path(name).name
    return DataError(
        f"{name}:{line}: not UTF-8: byte 0x{problem.object[problem.start]:02x}",
        hint=f"{may_be}save it as UTF-8: iconv -f {of} -t UTF-8 {file} > new-{file}",
    )


def open_text(file: Readable, name: str) -> Iterator[str]:
    """The text of a UTF-8 file that may be compressed, piece by piece.

    Raises:
        DataError: it is damaged or not UTF-8, decompresses to too much data, or is markup or a program.
    """
    expansion = Expansion(name)
    stream, _ = decompressed(expansion.stored(file), name, expansion)
    if content := other_content(head_of(stream).decode(errors="replace")):
        raise NotTextError(name, *content)
    return text_pieces(stream, name)
