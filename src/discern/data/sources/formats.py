"""How a file is read: recognized by its content, whatever its name, and turned into documents.

Another package can add a format of text: a module, under the entry point group `discern.sources`, with two functions:
`recognizes(name, text)`, which gets the beginning of a text, and `documents(pieces, context)`, which gets all of it in pieces.
"""

from __future__ import annotations

import html
import http.client
import io
import logging
import math
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from email.message import Message
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import chain, count
from typing import IO, Any

import numpy as np

from discern.data.sources.documents import CorpusOptions, Document, Lines, ProblemLog, TokenIds, documents
from discern.data.sources.streams import (
    BLOCK_BYTES,
    HEAD_BYTES,
    HTML,
    DamagedFileError,
    NotTextError,
    blocks,
    check_expansion,
    decompressed,
    detect_encoding,
    head_of,
    naming,
    opened,
    other_content,
    text_pieces,
)
from discern.data.tables import (
    EXCEL,
    LABEL_NAMES,
    TEXT_NAMES,
    TOKEN_IDS,
    Row,
    Table,
    TableFormat,
    arrow_table,
    clean_text,
    delimited_table,
    delimiter_of,
    is_header,
    json_table,
    number_of_fields,
    suffix_of,
    table_format,
    text_column,
)
from discern.errors import ConfigError, DataError, DiscernError
from discern.storage.files import writing_temporary_files


@dataclass(frozen=True)
class ReadContext:
    """The input being read, and how its text becomes documents.

    Attributes:
        name: path of the file, `ARCHIVE!MEMBER`, or the input as given. Messages use it.
        explicit: True if the user named the input itself rather than a folder, a pattern or an archive that contains it.
            Such an input must be readable as text.
        options: how text becomes documents.
        problems: collects problems that do not stop the work.
        depth: number of archives and compressions around the content.
    """

    name: str
    explicit: bool
    options: CorpusOptions
    problems: ProblemLog
    depth: int = 0

    def cut(self, lines: Iterable[Lines], *, are_records: bool) -> Iterator[Document]:
        """Documents of running text, or of an input that consists of records."""
        return documents(lines, self.options, self.name, self.problems, are_records=are_records)

    def read_member(self, file: IO[bytes], name: str) -> Iterator[Document]:
        """Documents of a file in an archive, unless it is hidden or excluded."""
        if any(part[:1] == "." and part.strip(".") for part in name.split("/")) or self.options.excludes(name):
            return
        inner = replace(self, name=f"{self.name}!{name}", explicit=False, depth=self.depth + 1)
        yield from read_stream(opened(blocks(file)), inner)


@cache
def added_formats() -> tuple[Any, ...]:
    """The formats of other packages."""
    return tuple(entry.load() for entry in entry_points(group="discern.sources"))


def read_stream(stream: io.BufferedReader, context: ReadContext) -> Iterator[Document]:
    """The documents of a file of unknown content.

    Raises:
        DataError: it is damaged, expands beyond the limits, or is not text although the user named it.
        ConfigError: its records have no such field, or an optional package is missing.
    """
    with naming(context.name):
        stream, depth = decompressed(stream, context.name, context.depth)
        context = replace(context, depth=depth)
        try:
            yield from _read_content(stream, context)
        except NotTextError as problem:
            if context.explicit:
                raise
            context.problems.add("file skipped, as it is not text", f"{context.name} ({problem.reason})")
            context.problems.note(f"skipped: {problem.reason}; {problem.hint}")


def _read_content(stream: io.BufferedReader, context: ReadContext) -> Iterator[Document]:
    name, head = context.name, head_of(stream)
    # First tar, because an archive begins with a file's name, which may look like a magic number.
    read = _tar if is_tar(head) else next((read for magic, read in _BY_MAGIC.items() if head.startswith(magic)), None)
    if read is not None:
        yield from read(stream, context)
        return
    if b"\0" in head and suffix_of(name) == ".bin":  # token ids of two bytes, as nanoGPT writes them
        yield from _ids(stream, np.dtype("<u2"))
        return
    pieces = text_pieces(stream, name, context.options.encoding, context.problems)
    text = EXCEL.sub("\n", next(pieces, "").removeprefix("\ufeff"))
    pieces = chain([text], pieces)
    kind, content = table_format(name, text), other_content(text, name)
    if added := [format.documents for format in added_formats() if format.recognizes(name, text)]:
        yield from added[0](pieces, context)
    elif kind in ("json", "jsonl"):
        yield from record_documents(json_table(pieces, name, context.problems, is_array=kind == "json"), context)
    elif text.lstrip().startswith("<doc "):
        yield from context.cut(_articles(text_lines(pieces)), are_records=True)
    elif content is not None and content != HTML:
        raise NotTextError(name, *content)
    elif (delimiter := table_delimiter(kind, text)) is not None:
        yield from _delimited(pieces, context, delimiter)
    elif content == HTML or len(_CLOSING_TAG.findall(text)) > max(2, len(text) // 200):
        yield from _html(pieces, context)
    elif context.options.documents == "record":
        raise DataError(f"{name} has no records: it is plain text", hint="use --documents blank-line, file or line")
    else:
        yield from context.cut(text_lines(pieces), are_records=False)


# Archives


def is_tar(head: bytes) -> bool:
    """Whether a stream begins with the header of a tar archive."""
    with suppress(tarfile.TarError):
        return bool(tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape"))
    return False


class _StrictHeader(tarfile.TarInfo):
    """A header that reports an archive that is damaged or cut short, which the library mistakes for the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _StrictHeader:
        try:
            return super().frombuf(buf, encoding, errors)
        except (tarfile.TruncatedHeaderError, tarfile.InvalidHeaderError) as problem:  # type: ignore[attr-defined]
            raise tarfile.ReadError(f"a header has a {problem}") from problem


def _tar(stream: io.BufferedReader, context: ReadContext) -> Iterator[Document]:
    """The files of an archive, in order. Links, devices and folders are skipped."""
    options: dict[str, Any] = {"bufsize": BLOCK_BYTES, "tarinfo": _StrictHeader, "errors": "replace"}
    with tarfile.open(fileobj=stream, mode="r|", **options) as archive:
        while member := archive.next():
            archive.members = []  # type: ignore[attr-defined]  # the library keeps every header otherwise
            if member.isfile() and (content := archive.extractfile(member)):
                yield from context.read_member(content, member.name)


@contextmanager
def _seekable(stream: io.BufferedReader) -> Iterator[Any]:
    """The content in a temporary file, for formats that are not read in order."""
    with tempfile.SpooledTemporaryFile(max_size=1 << 26) as spool:
        for block in blocks(stream):
            with writing_temporary_files():
                spool.write(block)
        spool.seek(0)
        yield spool


_DOCUMENTS = {
    "word/document.xml": ("it is a Word document", "extract its text: pandoc -t plain FILE -o FILE.txt"),
    "xl/workbook.xml": ("it is an Excel workbook", "save its sheet as CSV"),
    "ppt/presentation.xml": ("it is a PowerPoint presentation", "extract its text: pandoc -t plain FILE -o FILE.txt"),
    "mimetype": ("it is an OpenDocument file or an e-book", "extract its text: pandoc -t plain FILE -o FILE.txt"),
}
"""Documents that are zip archives, by the name of a member."""


def _zip(stream: io.BufferedReader, context: ReadContext) -> Iterator[Document]:
    """The files of an archive, in order."""
    with _seekable(stream) as content, zipfile.ZipFile(content) as archive:
        if refusals := [_DOCUMENTS[name] for name in archive.namelist() if name in _DOCUMENTS]:
            raise NotTextError(context.name, *refusals[0])
        for member in archive.infolist():
            check_expansion(f"{context.name}!{member.filename}", member.file_size, member.compress_size)
            if not member.is_dir():
                try:
                    file = archive.open(member)
                except RuntimeError as problem:  # encrypted, or an unknown compression
                    raise DamagedFileError(problem) from problem
                with file:
                    yield from context.read_member(file, member.filename)


# Records


def record_documents(table: Table, context: ReadContext) -> Iterator[Document]:
    """The text or the token ids of each row.

    Raises:
        ConfigError: there is no such field, or it is not clear which one holds the text.
    """
    field, problems = context.options.text_field(context.name), context.problems
    sample = table.sample()
    if not sample:
        return
    if field is None and "text" not in table.columns and _ids_of(sample[0]) is not None:
        for row in table.rows:
            if (ids := _ids_of(row)) is not None:
                yield ids
            else:
                problems.add(f"record skipped, as it has no list of integers in '{TOKEN_IDS}'", row.where)
        return
    column = table.require(field, "--text-field") if field else text_column(table, required=context.explicit)
    if column is None:
        problems.add("table skipped, as no column looks like text (choose one with --text-field NAME)", context.name)
        return
    ignored = ", ".join(name for name in table.columns if name != column)
    if ignored and column not in (field, "text" if table.format not in ("csv", "tsv") else None):
        problems.note(f"the text is read from the column '{column}'; ignored: {ignored}")
    yield from context.cut(_texts(table, column, problems), are_records=True)


def _ids_of(row: Row) -> TokenIds | None:
    value = row.values.get(TOKEN_IDS)
    is_list = isinstance(value, list) and bool(value) and all(type(number) is int for number in value)
    return np.array(value, dtype=np.int64) if is_list else None


def _texts(table: Table, column: str, problems: ProblemLog) -> Iterator[Lines]:
    for row in table.rows:
        text = row.values.get(column)
        if not isinstance(text, str) or not text.strip():
            problems.add(f"record skipped, as it has no text in '{column}'", row.where)
            continue
        clean = clean_text(text)
        if clean != text:
            problems.add("half of a surrogate pair, replaced", row.where)
        yield Lines(clean.split("\n"), ends_record=True)


def _arrow(stream: io.BufferedReader, context: ReadContext) -> Iterator[Document]:
    """The rows of a Parquet or Arrow file."""
    with _seekable(stream) as file:
        yield from record_documents(arrow_table(file, context.name, only_text=True), context)


_OTHER_NAMES = "id idx index language lang date author url source split tags".split()


def table_delimiter(kind: TableFormat, head: str) -> str | None:
    """The delimiter of a table; None if a file is no table.

    A file is a table if its name says so, or if its first lines have the same number of fields and the first one names columns.
    """
    lines = [line for line in head.split("\n")[: -1 if len(head) > HEAD_BYTES // 4 else None] if line.strip()]
    if lines and kind in ("csv", "tsv"):
        return delimiter_of(head, kind)
    for mark in "\t,;|" if len(lines) > 2 else "":
        header = lines[0].split(mark)
        named = {field.strip().lower() for field in header} & {*TEXT_NAMES, *LABEL_NAMES, *_OTHER_NAMES}
        if len(header) > 1 and {number_of_fields(line, mark) for line in lines} == {len(header)} and named and is_header(header):
            return mark
    return None


def _delimited(pieces: Iterator[str], context: ReadContext, delimiter: str) -> Iterator[Document]:
    """The rows of a CSV or TSV file. Labels and headers are never read as text."""
    table = delimited_table(pieces, context.name, delimiter, None, context.problems)
    if len(table.columns) == 1 and table.columns != ("column 1",):
        # A short first line of text looks like a name, so the user must be able to notice.
        context.problems.note(f"tables: the first line, '{table.columns[0]}', is taken as the header")
    return record_documents(table, context)


def hub_documents(context: ReadContext) -> Iterator[Document]:
    """The rows of a data set `hf:NAME[:CONFIGURATION[:SPLIT]]` on the hub, streamed. The default split is `train`.

    Raises:
        ConfigError: the extra `hf` is not installed, or the rows have no such field.
        DataError: the data set cannot be loaded.
    """
    try:
        import datasets
    except ImportError as problem:
        raise ConfigError(f"{context.name} needs the package datasets", hint="pip install 'discern-nlp[hf]'") from problem
    path, configuration, split = (*context.name.split(":")[1:], "", "")[:3]
    try:
        rows = datasets.load_dataset(path, configuration or None, split=split or "train", streaming=True)
        numbered = (Row(f"{context.name}: row {number}", row, number) for number, row in enumerate(rows, start=1))
        yield from record_documents(Table(context.name, "json", (), numbered), context)
    except DiscernError:
        raise
    except Exception as problem:  # the library passes on any error of its many back ends
        hint = "the form is hf:NAME[:CONFIGURATION[:SPLIT]]"
        raise DataError(f"{context.name} cannot be read: {problem}", hint=hint) from problem


# Pages


def _warc_pages(stream: io.BufferedReader, context: ReadContext) -> Iterator[Lines]:
    """The text of the pages of a web archive, such as the WET files of Common Crawl; each page is a record.

    Reference: ISO 28500:2017, the WARC format 1.1.
    """
    for number in count(1):
        where = f"{context.name}: record {number:,}"
        while (line := stream.readline(HEAD_BYTES)) in (b"\r\n", b"\n"):
            pass
        if not line:
            return
        fields = http.client.parse_headers(stream) if line.startswith(b"WARC/") else Message()
        length, kind, media = (fields.get(name, "").strip() for name in ("Content-Length", "WARC-Type", "Content-Type"))
        if not length.isdecimal():
            raise DamagedFileError(f"expected a WARC record with its Content-Length, found {line[:40]!r}")
        content, text = stream.read(int(length)), ""
        if len(content) < int(length):
            raise DamagedFileError(f"record {number} is cut short")
        if kind in ("conversion", "resource") and media.lower().startswith("text/plain"):
            text = content.decode("utf-8", errors="replace")
        elif kind in ("conversion", "resource", "response"):
            header, _, page = content.partition(b"\r\n\r\n")
            if has_extractor() and re.search(rb"(?i)\ncontent-type: *(text/html|application/xhtml)", header):
                text = page_text(page.decode(detect_encoding(page[:HEAD_BYTES]) or "utf-8", errors="replace"))
            else:
                context.problems.add("record skipped, as it is not plain text", where)
        yield Lines(text.split("\n"), ends_record=True)


def page_text(page: str) -> str:
    """The main text of an HTML page, one paragraph per line; empty if there is none."""
    import trafilatura

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    return trafilatura.extract(page) or ""


def _html(pieces: Iterator[str], context: ReadContext) -> Iterator[Document]:
    """The main text of a page, which is a record."""
    if not has_extractor():
        raise NotTextError(context.name, *HTML)
    text = page_text("".join(pieces))
    if not text:
        context.problems.add("page skipped, as it has no running text", context.name)
    return context.cut([Lines(text.split("\n"), ends_record=True)], are_records=True)


def has_extractor() -> bool:
    """Whether the text of HTML pages can be extracted: the extra `web` is installed."""
    return find_spec("trafilatura") is not None


# Token ids


def _npy(stream: io.BufferedReader, context: ReadContext) -> Iterator[Document]:
    """The token ids in an array: a stream, or a document in each row."""
    try:
        np.lib.format.read_magic(stream)
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    except ValueError as problem:
        raise DamagedFileError(problem) from problem
    if dtype.kind not in "iu" or len(shape) not in (1, 2) or (is_fortran and len(shape) == 2):
        reason = f"it is an array of {dtype} and shape {shape}"
        hint = "expected integers: one dimension for a stream of token ids, or two, with a document in each row"
        raise NotTextError(context.name, reason, hint)
    left = math.prod(shape)
    for ids in _ids(stream, dtype, *shape[1:]):
        left -= len(ids)
        yield ids
    if left:
        raise DamagedFileError(f"{left:,} token ids are missing")


def _ids(stream: io.BufferedReader, dtype: np.dtype[Any], count: int = 1 << 20) -> Iterator[Document]:
    while block := stream.read(count * dtype.itemsize):
        if len(block) % dtype.itemsize:
            raise DamagedFileError("it ends inside a token id")
        yield np.frombuffer(block, dtype).astype(np.int64)


# Running text


def text_lines(pieces: Iterable[str]) -> Iterator[Lines]:
    """The lines of text that comes in pieces. A line of more than a mebibyte becomes several."""
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        if len(rest) >= BLOCK_BYTES:
            cut = rest.rstrip().rfind(" ") + 1 or len(rest) - 1  # what is left is no blank line
            lines.append(rest[:cut])
            rest = rest[cut:]
        yield Lines(lines)
    yield Lines([rest] if rest else [])


def _articles(batches: Iterable[Lines]) -> Iterator[Lines]:
    """The `<doc ...>` records that WikiExtractor took out of a dump of Wikipedia, entities unescaped.

    Text outside of them is a record, too.
    """
    for batch in batches:
        lines: list[str] = []
        for line in batch.lines:
            tag = line.rstrip() if line.startswith("<") else ""
            if tag == "</doc>" or (tag.startswith("<doc ") and tag.endswith(">")):
                yield Lines(lines, ends_record=True)
                lines = []
            else:
                lines.append(html.unescape(line).replace("\n", " ") if "&" in line else line)
        yield Lines(lines)


_CLOSING_TAG = re.compile("</(?:p|div|span|a|li|tr|td|h[1-6]|script|style)>", re.IGNORECASE)
_BY_MAGIC: dict[bytes, Callable[[io.BufferedReader, ReadContext], Iterator[Document]]] = {
    b"PK\x03\x04": _zip,
    b"WARC/": lambda stream, context: context.cut(_warc_pages(stream, context), are_records=True),
    b"PAR1": _arrow,
    b"\xff\xff\xff\xff": _arrow,
    b"\x93NUMPY": _npy,
}
