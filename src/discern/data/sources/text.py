"""Plain UTF-8 text: the source of every file that no other source recognizes."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import final

from discern.data.sources.base import FileSource, ReadContext
from discern.data.sources.documents import Document, Lines
from discern.data.sources.jsonl import named_json, not_json_lines
from discern.data.sources.problems import ProblemLog
from discern.data.sources.streams import BLOCK_BYTES, HeadStream, Readable, likely_encoding
from discern.errors import DataError

_MANY_LINE_ENDS = 8
# One blank line is enough to end a document, and a file of blank lines alone would take a minute per compressed kilobyte.
_BLANK_LINES = re.compile(r"\n[ \t\r\f\v]*\n[ \t\r\f\v\n]*\n")


@final
class TextSource(FileSource):
    """UTF-8 text, one sentence per line."""

    priority = -2  # after all other sources, because it recognizes any text

    def recognizes(self, name: str, head: bytes) -> bool:
        return True

    def documents(self, stream: HeadStream, context: ReadContext) -> Iterator[Document]:
        if context.options.documents == "record":
            raise DataError(f"{context.name} has no records: it is plain text", hint="use --documents blank-line, file or line")
        if named_json(context.name) and stream.head.strip():
            raise not_json_lines(context.name)
        return context.cut_text(text_lines(stream, context.name, context.problems))


def text_lines(stream: Readable, name: str, problems: ProblemLog, *, squeeze: bool = True) -> Iterator[Lines]:
    """The lines of a UTF-8 stream. Invalid bytes are replaced by U+FFFD and reported with their position.

    Args:
        squeeze: whether runs of blank lines may be shortened to one.
    """
    rest, offset = b"", 0
    while block := stream.read(BLOCK_BYTES):
        data = rest + block
        cut = data.rfind(b"\n") + 1
        continues = cut == 0 and len(data) >= BLOCK_BYTES
        if continues:
            cut = _place_to_cut(data)
        if cut:
            # The newline itself is removed, so that it does not become an empty line.
            piece = data[:cut] if continues else data[: cut - 1]
            text = _decode(piece, name, offset, problems)
            if squeeze and piece.count(b"\n") * _MANY_LINE_ENDS > len(piece):
                text = _BLANK_LINES.sub("\n\n", text)
            yield Lines(text.split("\n"), continues)
            offset += cut
        rest = data[cut:]
    if rest:
        yield Lines(_decode(rest, name, offset, problems).split("\n"))


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
        valid = len(re.findall(r"[^\x00-\x7f\ufffd]", text))
        if replaced > valid and (encoding := likely_encoding(data)) is not None:
            problems.note(
                f"bytes that are not UTF-8 are replaced; the file may be {encoding}: iconv -f {encoding} -t UTF-8 FILE > NEW"
            )
        return text


def _place_to_cut(data: bytes) -> int:
    """Where to cut bytes without a newline: after the last space or tab, otherwise before the last character."""
    space = max(data.rfind(b" "), data.rfind(b"\t")) + 1
    if space:
        return space
    cut = len(data)
    while cut > len(data) - 4 and data[cut - 1] & 0xC0 == 0x80:
        cut -= 1
    return cut - 1 or len(data)
