"""Articles that WikiExtractor took out of a dump of Wikipedia."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator
from typing import final

from discern.data.sources.base import FileSource, ReadContext
from discern.data.sources.documents import Document, Lines
from discern.data.sources.streams import HeadStream
from discern.data.sources.text import text_lines


@final
class WikiExtractorSource(FileSource):
    """Articles between `<doc ...>` and `</doc>`; each article is a record. HTML entities are unescaped."""

    def recognizes(self, name: str, head: bytes) -> bool:
        return head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<doc ")

    def documents(self, stream: HeadStream, context: ReadContext) -> Iterator[Document]:
        return context.cut_records(wiki_records(text_lines(stream, context.name, context.problems)))


def wiki_records(batches: Iterable[Lines]) -> Iterator[Lines]:
    """The `<doc ...>` records of WikiExtractor, entities unescaped. Text outside of them is a record, too."""
    for batch in batches:
        lines: list[str] = []
        for line in batch.lines:
            if line.startswith("<") and _is_tag(line):
                yield Lines(lines, ends_record=True)
                lines = []
            else:
                lines.append(html.unescape(line).replace("\n", " ") if "&" in line else line)
        yield Lines(lines, continues=batch.continues)


def _is_tag(line: str) -> bool:
    line = line.rstrip()
    return line == "</doc>" or (line.startswith("<doc ") and line.endswith(">"))
