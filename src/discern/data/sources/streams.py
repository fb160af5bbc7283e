"""Byte streams of unknown content: decompressed, decoded, and limited in how far they may expand."""

from __future__ import annotations

import bz2
import codecs
import io
import lzma
import re
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from http.client import HTTPException
from itertools import chain
from pathlib import Path
from typing import IO, Any

import zstandard

from discern.data.sources.documents import ProblemLog
from discern.errors import ConfigError, DataError

BLOCK_BYTES = 1 << 20
HEAD_BYTES = 1 << 16
MAX_NESTING = 8
# Few, because a block of 4 bytes compressed by zstd may hold 128 KiB.
_COMPRESSED_BYTES = 1 << 11


class NotTextError(DataError):
    """A file is not text, or is markup or a program.

    Args:
        name: name of the file.
        reason: what it is.
    """

    def __init__(self, name: str, reason: str, hint: str) -> None:
        super().__init__(f"{name} is not text: {reason}", hint=hint)
        self.reason = reason


class DamagedFileError(Exception):
    """A file is damaged or cut short. `naming` turns it into a DataError that names the file."""


class _Pieces(io.RawIOBase):
    """Pieces of bytes as a file. A read returns less than asked for only at the end."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = filter(None, pieces)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while len(self._rest) < len(buffer) and (piece := next(self._pieces, b"")):
            self._rest += piece
        part, self._rest = self._rest[: len(buffer)], self._rest[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def opened(pieces: Iterator[bytes]) -> io.BufferedReader:
    """Pieces of bytes as a file."""
    return io.BufferedReader(_Pieces(pieces), HEAD_BYTES)


def head_of(stream: io.BufferedReader) -> bytes:
    """The first 64 KiB of a file of which nothing was read yet, or all of it if there is less."""
    return stream.peek(HEAD_BYTES)


def blocks(stream: IO[bytes], report: Callable[[int], None] = lambda size: None) -> Iterator[bytes]:
    """The content of a stream, block by block.

    Args:
        report: called with the size of each.
    """
    while block := stream.read(BLOCK_BYTES):
        report(len(block))
        yield block


FREE_BYTES = 1 << 26
"""Bytes that any file may expand to."""
LARGEST_RATIO = 250
"""Bytes per byte read that a file may expand to beyond that. Text compresses 3 to 10 times, logs and markup up to 100 times."""


_COMPRESSIONS: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": partial(zlib.decompressobj, 31),
    b"\xfd7zXZ\x00": lzma.LZMADecompressor,
    b"BZh": bz2.BZ2Decompressor,
    b"\x28\xb5\x2f\xfd": zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj,
}


def decompressed(stream: io.BufferedReader, name: str, depth: int = 0) -> tuple[io.BufferedReader, int]:
    """The content of a stream that may be compressed, even more than once, and the depth of the content.

    Args:
        depth: number of compressions and archives around the stream.

    Raises:
        DataError: the depth exceeds `MAX_NESTING`.
    """
    while depth <= MAX_NESTING:
        head = head_of(stream)
        start = next((start for magic, start in _COMPRESSIONS.items() if head.startswith(magic)), None)
        if start is None:
            return stream, depth
        depth += 1
        stream = opened(_decompress(stream, start, name))
    raise DataError(f"{name}: archives nested more than {MAX_NESTING} deep", hint="unpack the outer ones first")


def check_expansion(name: str, size: int, stored: int) -> None:
    """Check that the content of a file is not larger than compressed text can be.

    A few kilobytes can expand to terabytes of zeros or empty lines.

    Raises:
        DataError: it is.
    """
    if size > FREE_BYTES + LARGEST_RATIO * stored:
        raise DataError(
            f"{name} decompresses to too much data: {size:,} bytes came out of {stored:,}, and the limit is {LARGEST_RATIO} "
            f"times the bytes read plus {FREE_BYTES >> 20} MiB",
            hint="if it contains real text, decompress it first and pass the result",
        )


def _decompress(stream: io.BufferedReader, start: Callable[[], Any], name: str) -> Iterator[bytes]:
    """What compressed streams that follow each other hold, possibly with zero bytes between them.

    Unlike the readers of the libraries, this detects damage at the beginning of a stream, which they take for the end of the
    file, and a last frame that is cut short.
    """
    current: Any = None
    stored = size = 0
    while data := stream.read(_COMPRESSED_BYTES):
        stored += len(data)
        while data := data if current is not None else data.lstrip(b"\0"):
            current = current or start()
            piece = current.decompress(data)
            size += len(piece)
            check_expansion(name, size, stored)
            yield piece
            data = b""
            if current.eof:
                data, current = current.unused_data, None
    if current is not None:
        raise DamagedFileError("it ends inside a compressed stream")


_DAMAGE = (
    DamagedFileError,
    EOFError,
    lzma.LZMAError,
    zlib.error,
    zstandard.ZstdError,
    tarfile.TarError,
    zipfile.BadZipFile,
    HTTPException,  # a header of a web archive
)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Turn errors of reading and decompressing into a DataError that names the file."""
    try:
        yield
    except (OSError, *_DAMAGE) as problem:
        said, hint = f"is damaged or cut short: {problem}", "fetch it again, or leave it out of the input"
        if isinstance(problem, OSError) and problem.errno is not None:  # otherwise it is from a decompressor
            said, hint = f"cannot be read: {problem.strerror}", f"check the path; relative paths start at {Path.cwd()}"
        raise DataError(f"{name} {said}", hint=hint) from problem


_NUL = ("it contains NUL bytes", "if it is text, remove them: tr -d '\\0' < FILE > NEW; or --encoding utf-16-le")
HTML = ("it is HTML", "extract its text: trafilatura < FILE > FILE.txt; prepare does it with 'discern-nlp[web]'")
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
    "HTML": (
        r"(?:<!--(?:(?!-->).)*-->|<\?xml[^>]*>|\s)*<(?:!doctype\s+html|(?:html|head|body|title|meta|link|script|style)\b)",
        HTML[1],
    ),
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


def other_content(head: str, name: str = "") -> tuple[str, str] | None:
    """What a file is, if it is a document, markup or a program rather than text, and what to do.

    Args:
        head: its beginning.
        name: its name, which decides for HTML.
    """
    text = head.lstrip("\ufeff \t\r\n")
    for kind, (pattern, hint) in _CONTENTS.items():
        if re.match(pattern, text, re.IGNORECASE | re.DOTALL):
            return f"it is {kind}", hint
    return HTML if name.lower().endswith((".html", ".htm", ".xhtml")) and "<" in text else None


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
    if b"\0" in head:
        return None
    text = head.replace(b"\xff", b"").decode("utf-8", errors="replace")  # seldom a letter: a stray byte
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
        if (encoding := detect_encoding(head)) is None:
            reason = _NUL if b"\0" in head else ("it is not UTF-8", "if it is text, name its encoding: --encoding NAME")
            raise NotTextError(name, *(other_content(head.decode(errors="replace")) or reason))
        if encoding != "utf-8":
            problems.note(f"read as {encoding} (detected): {name}; --encoding NAME to choose another", about=encoding)
    try:
        decoder = codecs.getincrementaldecoder(encoding)()
    except LookupError:
        raise ConfigError(f"unknown encoding '{encoding}'", hint="--encoding takes a name such as windows-1252") from None
    lines = 1
    # The first piece is the head, from which the format is recognized; the last one is empty.
    for block in chain([stream.read(HEAD_BYTES)], blocks(stream), [b""]):
        try:
            text = decoder.decode(block, not block)
        except UnicodeDecodeError as problem:
            data = problem.object
            ends = data.count(b"\n", 0, problem.start)
            where = f"{name}:{lines + ends}"
            if problems is None:
                file, likely = Path(name).name, detect_encoding(data.split(b"\n")[ends]) or "ENCODING"
                raise DataError(
                    f"{where}: not UTF-8: byte 0x{data[problem.start]:02x}",
                    hint=f"it may be {likely}; save it as UTF-8: iconv -f {likely} -t UTF-8 {file} > new-{file}",
                ) from problem
            decoder.errors = "replace"
            text = decoder.decode(block, not block)
            decoder.errors = "strict"
            invalid = max(1, text.count("\ufffd") - data.count("\ufffd".encode()))
            problems.add(f"invalid {encoding.upper()}, replaced", where, invalid)
        if b"\0" in block and "\0" in text:  # in UTF-16, a NUL byte is half of a character
            raise NotTextError(name, *_NUL)
        lines += block.count(b"\n")
        if text:
            yield text


def shown_name(path: Path) -> str:
    """The name of a file, or of standard input (`-`), in messages."""
    return "standard input" if str(path) == "-" else str(path)


def file_pieces(path: Path) -> Iterator[str]:
    """The text of a UTF-8 file that may be compressed, or of standard input (`-`), piece by piece.

    Raises:
        DataError: it is missing, damaged or not UTF-8, decompresses to too much data, or is markup or a program.
    """
    name = shown_name(path)
    with naming(name), nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
        stream, _ = decompressed(opened(blocks(file)), name)
        if content := other_content(head_of(stream).decode(errors="replace"), name):
            raise NotTextError(name, *content)
        yield from text_pieces(stream, name)


LONGEST_LINE = 1 << 26
NumberedLines = Iterator[tuple[int, str]]
"""The lines of a file and their numbers, from 1, without line ends."""


def split_lines(pieces: Iterable[str], name: str) -> NumberedLines:
    """The numbered lines of text that comes in pieces. A byte order mark is left out.

    Raises:
        DataError: a line is longer than `LONGEST_LINE`.
    """
    for number, line in enumerate(whole_lines(pieces, name), start=1):
        yield number, (line.removeprefix("\ufeff") if number == 1 else line).removesuffix("\n").removesuffix("\r")


def whole_lines(pieces: Iterable[str], name: str) -> Iterator[str]:
    """The lines with their ends, and with a byte order mark if there is one."""
    rest = ""
    for piece in pieces:
        *whole, rest = (rest + piece).split("\n")
        for line in whole:
            yield line + "\n"
        if len(rest) > LONGEST_LINE:
            raise DataError(
                f"{name}: a line of more than {LONGEST_LINE:,} characters",
                hint="is it text? An array of JSON objects is read from a file that ends in .json",
            )
    if rest:
        yield rest
