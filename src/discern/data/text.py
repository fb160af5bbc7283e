"""Text streams cut into lines, and lines into documents, with bounded memory whatever the lengths."""

from __future__ import annotations

import codecs
import html
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from discern.data.encoder import Document
from discern.data.problems import ProblemLog
from discern.data.streams import BLOCK_BYTES, Readable


@dataclass(frozen=True)
class Limits:
    """Bounds on what is held at once, in characters."""

    sentence: int = 1 << 16
    document: int = 1 << 24
    record_bytes: int = 1 << 26


@dataclass(frozen=True)
class Cut:
    """Where documents end, apart from the end of a file."""

    at_record: bool = False
    at_blank: bool = False
    at_line: bool = False


@dataclass(frozen=True)
class Lines:
    """Some lines in a row.

    Attributes:
        lines: text without line ends, not stripped.
        continues: the last line goes on in the next batch.
        ends_record: a record (`<doc>`, JSON object, row) ends here.
    """

    lines: list[str]
    continues: bool = False
    ends_record: bool = False


_MANY_LINE_ENDS = 8
_SHORTEST = 8
# Of blank lines in a row the first says it all; a file of nothing else would take a minute for each compressed kilobyte.
_BLANK_LINES = re.compile(r"\n[ \t\r\f\v]*\n[ \t\r\f\v\n]*\n")


def text_lines(stream: Readable, name: str, problems: ProblemLog, *, squeeze: bool = True) -> Iterator[Lines]:
    """The lines of a UTF-8 stream. What is not UTF-8 is replaced by U+FFFD and reported with its place in bytes.

    Args:
        squeeze: two blank lines in a row, or more of them, may be one, where there are many.
    """
    rest, offset = b"", 0
    while block := stream.read(BLOCK_BYTES):
        data = rest + block
        cut = data.rfind(b"\n") + 1
        continues = cut == 0 and len(data) >= BLOCK_BYTES
        if continues:
            cut = _place_to_cut(data)
        if cut:
            # The newline itself goes, so that no empty line is made of it.
            piece = data[:cut] if continues else data[: cut - 1]
            text = _decode(piece, name, offset, problems)
            if squeeze and piece.count(b"\n") * _MANY_LINE_ENDS > len(piece):
                text = _BLANK_LINES.sub("\n\n", text)
            yield Lines(text.split("\n"), continues)
            offset += cut
        rest = data[cut:]
    if rest:
        yield Lines(_decode(rest, name, offset, problems).split("\n"))


def wiki_records(batches: Iterable[Lines]) -> Iterator[Lines]:
    """The `<doc ...>` records of WikiExtractor; text outside of them is a record too. Entities are unescaped."""
    for batch in batches:
        lines: list[str] = []
        for line in batch.lines:
            if line.startswith("<") and _is_tag(line):
                yield Lines(lines, ends_record=True)
                lines = []
            else:
                lines.append(html.unescape(line).replace("\n", " ") if "&" in line else line)
        yield Lines(lines, continues=batch.continues)


def documents(batches: Iterable[Lines], cut: Cut, name: str, limits: Limits, problems: ProblemLog) -> Iterator[Document]:
    """Documents of stripped, non-empty sentences. A sentence is a line, and weighs `_SHORTEST` characters at least.

    A line or document beyond the limits is split, and reported.
    """
    sentences: Document = []
    size, continued, full = 0, False, False
    for batch in batches:
        for index, raw in enumerate(batch.lines):
            goes_on = batch.continues and index == len(batch.lines) - 1
            if len(raw) > limits.sentence or goes_on:
                if not continued:
                    problems.add("line split, being too long", f"{name}: {raw[:40].strip()!r}...")
                pieces = _split_line(raw, limits.sentence)
            else:
                pieces = [line] if (line := raw.strip()) else []
            for piece in pieces:
                if full:
                    problems.add("document split, being too long", f"{name}: before {piece[:40]!r}")
                sentences.append(piece)
                size += len(piece)
                if full := size >= limits.document or len(sentences) >= limits.document // _SHORTEST:
                    yield sentences
                    sentences, size = [], 0
            blank = not pieces and not continued and not goes_on
            continued = goes_on
            if (cut.at_blank and blank) or (cut.at_line and not goes_on):
                if sentences:
                    yield sentences
                sentences, size, full = [], 0, False
        if batch.ends_record and cut.at_record:
            if sentences:
                yield sentences
            sentences, size, full = [], 0, False
    if sentences:
        yield sentences


def _decode(data: bytes, name: str, offset: int, problems: ProblemLog) -> str:
    if offset == 0 and data.startswith(codecs.BOM_UTF8):
        data = data[len(codecs.BOM_UTF8) :]
        offset = len(codecs.BOM_UTF8)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        text = data.decode("utf-8", errors="replace")
        replaced = text.count("\ufffd") - data.count("\ufffd".encode())
        problems.add("invalid UTF-8, replaced", f"{name}: byte {offset + error.start:,}", replaced)
        return text


def _place_to_cut(data: bytes) -> int:
    """Where to cut bytes without a newline: behind the last ASCII space, else before the last character's first byte."""
    space = max(data.rfind(b" "), data.rfind(b"\t")) + 1
    if space:
        return space
    cut = len(data)
    while cut > len(data) - 4 and data[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    return cut - 1 or len(data)


def _is_tag(line: str) -> bool:
    line = line.rstrip()
    return line == "</doc>" or (line.startswith("<doc ") and line.endswith(">"))


def _split_line(line: str, limit: int) -> list[str]:
    """Stripped pieces of at most `limit` characters, cut at white space where there is some."""
    pieces = []
    start = 0
    while start < len(line):
        stop = min(start + limit, len(line))
        if stop < len(line):
            space = max(line.rfind(" ", start, stop), line.rfind("\t", start, stop))
            stop = space + 1 if space > start else stop
        pieces.append(line[start:stop].strip())
        start = stop
    return [piece for piece in pieces if piece]
