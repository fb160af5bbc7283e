"""How a file is read: recognized by its content, whatever its name, and turned into documents.

Another package can add formats of text: a `Format` under the entry point group `discern.sources`.
"""

from __future__ import annotations

import html
import io
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from itertools import chain
from typing import Any

import numpy as np

from discern.data.sources.documents import CorpusOptions, Cut, Document, Lines, ProblemLog, TokenIds, documents
from discern.data.sources.streams import (
    BLOCK_BYTES,
    HEAD_BYTES,
    Expansion,
    NotTextError,
    Readable,
    blocks,
    decompressed,
    detect_encoding,
    head_of,
    is_html,
    naming,
    other_content,
    text_pieces,
)
from discern.data.tables import (
    DELIMITERS,
    LABEL_NAMES,
    TEXT_NAMES,
    TOKEN_IDS,
    Dialect,
    Row,
    Table,
    array_table,
    arrow_table,
    delimited_table,
    dialect_of,
    excel_delimiter,
    fields_of,
    is_header,
    json_table,
    one_object,
    split_lines,
    suffix_of,
    text_column,
)
from discern.errors import ConfigError, DataError, DiscernError
from discern.parsing import json_value
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
        expansion: limits how much data may come out of the file.
        depth: number of archives and compressions around the content.
    """

    name: str
    explicit: bool
    options: CorpusOptions
    problems: ProblemLog
    expansion: Expansion
    depth: int = 0

    def cut_records(self, lines: Iterable[Lines]) -> Iterator[Document]:
        """Documents of an input that consists of records."""
        rule = self.options.documents
        cut = Cut(at_record=rule != "file", at_blank=rule == "blank-line", at_line=rule == "line")
        return documents(lines, cut, self.name, self.options.limits, self.problems)

    def cut_text(self, lines: Iterable[Lines]) -> Iterator[Document]:
        """Documents of running text."""
        rule = self.options.documents
        cut = Cut(at_blank=rule in ("auto", "blank-line"), at_line=rule == "line")
        return documents(lines, cut, self.name, self.options.limits, self.problems)

    def read_member(self, file: Readable, name: str) -> Iterator[Document]:
        """Documents of a file in an archive, unless it is hidden or excluded."""
        if any(part[:1] == "." and part.strip(".") for part in name.split("/")) or self.options.excludes(name):
            return
        inner = replace(self, name=f"{self.name}!{name}", explicit=False, depth=self.depth + 1)
        yield from read_stream(self.expansion.made(blocks(file), inner.depth), inner)


@dataclass(frozen=True)
class Format:
    """A format of text.

    Attributes:
        recognizes: whether a file is of this format, by its name, which should decide only if the content cannot, and by the
            beginning of its text.
        documents: the documents of a file, from its text in pieces; usually made by `context.cut_records` or `cut_text`.
    """

    recognizes: Callable[[str, str], bool]
    documents: Callable[[Iterator[str], ReadContext], Iterator[Document]]


@cache
def added_formats() -> tuple[Format, ...]:
    """The formats of other packages."""
    return tuple(entry.load() for entry in entry_points(group="discern.sources"))


def read_stream(stream: io.BufferedReader, context: ReadContext) -> Iterator[Document]:
    """The documents of a file of unknown content.

    Raises:
        DataError: it is damaged, expands beyond the limits, or is not text although the user named it.
        ConfigError: its records have no such field, or an optional package is missing.
    """
    with naming(context.name):
        stream, depth = decompressed(stream, context.name, context.expansion, context.depth)
        context = replace(context, depth=depth)
        try:
            yield from _read_content(stream, context)
        except NotTextError as problem:
            for _ in blocks(stream) if depth else ():
                pass  # checksums come last: a damaged archive must be an error rather than a file left out
            if context.explicit:
                raise
            context.problems.add("file skipped, as it is not text", f"{context.name} ({problem.reason})")
            context.problems.note(f"skipped: {problem.reason}; {problem.hint}")


def _read_content(stream: io.BufferedReader, context: ReadContext) -> Iterator[Document]:
    head = head_of(stream)
    for is_of_format, read in _BINARY:
        if is_of_format(context.name, head):
            yield from read(stream, context)
            return
    pieces = text_pieces(stream, context.name, context.options.encoding, context.problems)
    text = next(pieces, "").removeprefix("\ufeff")
    formats = (format.documents for format in (*added_formats(), *_MARKED) if format.recognizes(context.name, text))
    if (read_text := next(formats, None)) is None:
        if content := other_content(text):
            raise NotTextError(context.name, *content)
        read_text = _delimited if table_dialect(context.name, text) else _text
    yield from read_text(chain([text], pieces), context)


# Archives


def is_tar(name: str, head: bytes) -> bool:
    """Whether a stream begins with a tar header: the magic number, or a valid checksum in archives of older formats."""
    if len(head) < 512 or head[:1] == b"\x00":
        return False
    try:
        return head[257:262] == b"ustar" or bool(tarfile.TarInfo.frombuf(head[:512], "utf-8", "surrogateescape"))
    except tarfile.TarError:
        return False


class _StrictHeader(tarfile.TarInfo):
    """A header that reports an archive that is cut short, which the library mistakes for the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _StrictHeader:
        if buf and len(buf) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError("the archive ends inside a header")
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.InvalidHeaderError as problem:  # type: ignore[attr-defined]
            raise tarfile.ReadError(f"a header has a {problem}") from problem


def _tar(stream: io.BufferedReader, context: ReadContext) -> Iterator[Document]:
    """The files of an archive, in order. Links, devices and folders are skipped."""
    options: dict[str, Any] = {"bufsize": BLOCK_BYTES, "tarinfo": _StrictHeader, "errors": "replace"}
    with tarfile.open(fileobj=stream, mode="r|", **options) as archive:
        while (member := archive.next()) is not None:
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
    with _seekable(stream) as file, zipfile.ZipFile(file) as archive:
        if content := next((_DOCUMENTS[name] for name in archive.namelist() if name in _DOCUMENTS), None):
            raise NotTextError(context.name, *content)
        for member in archive.infolist():
            if member.flag_bits & 1:
                raise DataError(f"{context.name} is encrypted", hint="unpack it with its password")
            if not member.is_dir():
                with archive.open(member) as content_of:
                    yield from context.read_member(content_of, member.filename)


# Records


def record_documents(table: Table, context: ReadContext) -> Iterator[Document]:
    """The text or the token ids of each row.

    Raises:
        ConfigError: there is no such field, or it is not clear which one holds the text.
    """
    field, problems = context.options.text_field(context.name), context.problems
    tabular = table.format in ("csv", "tsv")
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
    if field is not None:
        column: str | None = table.require(field, "--text-field")
    else:
        column = text_column(table, required=context.explicit or not tabular)
    if column is None:
        problems.add("table skipped, as no column looks like text (choose one with --text-field NAME)", context.name)
        return
    ignored = [name for name in table.columns if name != column]
    if ignored and (tabular or column not in ("text", field)):
        kind = "tables" if tabular else "records"
        problems.note(f"{kind}: the text is read from the column '{column}'; ignored: {', '.join(ignored)}")
    yield from context.cut_records(_texts(table, column, problems))


def _ids_of(row: Row) -> TokenIds | None:
    value = row.values.get(TOKEN_IDS)
    if not isinstance(value, list) or not value or not all(type(number) is int for number in value):
        return None
    return np.array(value, dtype=np.int64)


def _texts(table: Table, column: str, problems: ProblemLog) -> Iterator[Lines]:
    for row in table.rows:
        text = row.values.get(column)
        if not isinstance(text, str) or not text.strip():
            problems.add(f"record skipped, as it has no text in '{column}'", row.where)
            continue
        if not text.isascii():
            clean = text.encode("utf-8", errors="replace").decode("utf-8")
            if clean != text:  # half of a surrogate pair, which is valid in JSON but not in UTF-8
                problems.add("half of a surrogate pair, replaced", row.where)
                text = clean
        yield Lines(text.split("\n"), ends_record=True)


def _arrow(stream: io.BufferedReader, context: ReadContext) -> Iterator[Document]:
    """The rows of a Parquet or Arrow file."""
    with _seekable(stream) as file:
        columns = []
        if field := context.options.text_field(context.name):
            columns = [arrow_table(file, context.name).require(field, "--text-field")]
            file.seek(0)
        table = arrow_table(file, context.name, columns, only_text=not columns, expansion=context.expansion)
        yield from record_documents(table, context)


_LONG_HEAD = HEAD_BYTES // 4  # characters at the beginning of a text that may go on


def is_json_lines(text: str) -> bool:
    """Whether the first line of text is a JSON object. If it is longer than the head, its beginning decides."""
    line, newline, _ = text.lstrip("\ufeff \t\r\n").partition("\n")
    if not line.startswith("{"):
        return False
    if not newline and len(line) >= _LONG_HEAD:
        return line[1:].lstrip().startswith('"')
    try:
        return isinstance(json_value(line), dict)
    except ValueError:
        return False


def _is_json(name: str, text: str) -> bool:
    named = suffix_of(name) in (".json", ".jsonl", ".ndjson") and bool(text.strip())
    return named or is_json_lines(text) or re.match(r'\s*(\[\s*)?\{\s*"[^"\n]*"\s*:', text) is not None


def _json(pieces: Iterator[str], context: ReadContext) -> Iterator[Document]:
    """The objects of JSON lines or of an array."""
    name, problems, limit = context.name, context.problems, context.options.limits.record
    text = next(pieces)
    pieces = chain([text], pieces)
    # The first line of a file that was cut into parts may be the end of a record.
    if is_json_lines(text) or (suffix_of(name) and is_json_lines(text.partition("\n")[2])):
        table = json_table(split_lines(pieces, name, limit), name, problems)
        is_whole = suffix_of(name) == ".json" and len(table.sample()) == 1
        if is_whole and context.options.text_field(name) is None and "text" not in table.columns:
            raise one_object(name)
    elif text.lstrip().startswith("["):
        table = array_table(pieces, name, problems, limit)
    elif text.lstrip().startswith("{"):
        raise one_object(name)
    else:
        raise NotTextError(name, "it is named JSON, but begins with neither an object nor an array", "give it another name")
    yield from record_documents(table, context)


_OTHER_NAMES = (*LABEL_NAMES, *"id idx index language lang date author url source split tags".split())


def table_dialect(name: str, head: str) -> Dialect | None:
    """The format of a CSV or TSV file; None if it is no table.

    A file is a table if its name ends in .csv, .tsv or .tab, or if its first lines have the same number of fields and the
    first one looks like a header.
    """
    lines = head.split("\n")
    if len(head) >= _LONG_HEAD:
        lines = lines[:-1] or lines
    lines = [line.rstrip("\r") for line in lines if line.strip()]
    if not lines:
        return None
    marks = {".csv": DELIMITERS, ".tsv": "\t", ".tab": "\t"}.get(suffix_of(name))
    if marks is not None or excel_delimiter(lines[0]) is not None:
        return dialect_of(lines, marks or DELIMITERS)
    for mark in "\t,;|":
        header = fields_of(lines[0], mark)
        widths = {len(fields_of(line, mark)) for line in lines}
        named = {field.strip().lower() for field in header} & {*TEXT_NAMES, *_OTHER_NAMES}
        if len(widths) == 1 and widths != {1} and len(lines) > 2 and named and is_header(header):
            return Dialect(mark, mark == "\t")
    return None


def _delimited(pieces: Iterator[str], context: ReadContext) -> Iterator[Document]:
    """The rows of a CSV or TSV file. Labels and headers are never read as text."""
    name, problems = context.name, context.problems
    head = next(pieces)
    dialect = table_dialect(name, head)
    assert dialect is not None
    lines = split_lines(chain([head], pieces), name, context.options.limits.record)
    table = delimited_table(lines, name, dialect, None, problems)
    if len(table.columns) == 1 and table.columns != ("column 1",):
        # A short first line of text looks like a name, so the user must be able to notice.
        problems.note(f"tables: the first line, '{table.columns[0]}', is taken as the header")
    return record_documents(table, context)


def hub_documents(context: ReadContext) -> Iterator[Document]:
    """The rows of a data set `hf:NAME[:CONFIGURATION[:SPLIT]]` on the hub, streamed. The default split is `train`.

    Raises:
        ConfigError: there is no name, the extra `hf` is not installed, or the rows have no such field.
        DataError: the data set cannot be loaded.
    """
    form = "the form is hf:NAME[:CONFIGURATION[:SPLIT]]"
    path, configuration, split, *_ = (*context.name.split(":", 3)[1:], "", "")
    if not path:
        raise ConfigError(f"{context.name} names no data set", hint=form)
    try:
        import datasets
    except ImportError as problem:
        raise ConfigError(f"{context.name} needs the package datasets", hint="pip install 'discern-nlp[hf]'") from problem
    try:
        rows = datasets.load_dataset(path, configuration or None, split=split or "train", streaming=True)
        numbered = (Row(f"{context.name}: row {number}", row, number) for number, row in enumerate(rows, start=1))
        yield from record_documents(Table(context.name, "json", (), numbered), context)
    except DiscernError:
        raise
    except Exception as problem:  # the library passes on any error of its many back ends
        raise DataError(f"{context.name} cannot be read: {problem}", hint=form) from problem


# Pages

_TEXT_TYPES = ("conversion", "resource")
_LONGEST_HEADER = 1 << 16


def _warc(stream: io.BufferedReader, context: ReadContext) -> Iterator[Document]:
    """The text of the pages of a web archive, such as the WET files of Common Crawl; each page is a record.

    Reference: ISO 28500:2017, the WARC format 1.1.
    """
    return context.cut_records(_warc_pages(stream, context))


def _warc_pages(stream: io.BufferedReader, context: ReadContext) -> Iterator[Lines]:
    number = 0
    while fields := _warc_header(stream, context.name):
        number += 1
        where = f"{context.name}: record {number:,}"
        length = fields.get("content-length", "")
        if not length.isdecimal():
            raise DataError(f"{where} has no Content-Length", hint="fetch the file again, or leave it out of the input")
        size = int(length)
        content = stream.read(size if size <= context.options.limits.record else 0)
        left = size - len(content)
        while left > 0 and (skipped := stream.read(min(left, BLOCK_BYTES))):
            left -= len(skipped)
        if left:
            raise DataError(f"{where} is cut short", hint="fetch the file again, or leave it out of the input")
        kind, media = fields.get("warc-type", ""), fields.get("content-type", "").partition(";")[0].strip().lower()
        is_text = kind in _TEXT_TYPES and media == "text/plain"
        text = ""
        if len(content) < size:
            context.problems.add("record skipped, as it is too long", where)
        elif is_text:
            text = content.decode("utf-8", errors="replace")
            if (replaced := text.count("\ufffd") - content.count("\ufffd".encode())) > 0:
                context.problems.add("invalid UTF-8, replaced", where, replaced)
        elif kind in (*_TEXT_TYPES, "response"):
            header, _, page = content.partition(b"\r\n\r\n")
            try:
                if kind != "response" or not re.search(rb"(?i)\ncontent-type: *(text/html|application/xhtml)", header):
                    raise NotTextError(where, "it is not plain text", "")
                text = page_text(page.decode(detect_encoding(page[:HEAD_BYTES]) or "utf-8", errors="replace"), where)
            except NotTextError:
                context.problems.add("record skipped, as it is not plain text; WET files have the text of pages", where)
        if text:
            yield Lines(text.split("\n"), ends_record=True)


def _warc_header(stream: io.BufferedReader, name: str) -> dict[str, str]:
    """The fields of the next record, with names in lower case; empty at the end.

    Raises:
        DataError: no record begins here.
    """
    line = b"\n"
    while line in (b"\r\n", b"\n"):
        line = stream.readline(_LONGEST_HEADER)
    if line and not line.startswith(b"WARC/"):
        raise DataError(f"{name} is damaged: expected a WARC record, found {line[:40]!r}", hint="fetch it again, or leave it out")
    fields: dict[str, str] = {}
    size = 0
    while line and (line := stream.readline(_LONGEST_HEADER)) not in (b"\r\n", b"\n", b""):
        key, _, value = line.decode("utf-8", errors="replace").partition(":")
        fields[key.strip().lower()] = value.strip()
        size += len(line)
        if size > _LONGEST_HEADER:
            raise DataError(f"{name} is damaged: a WARC header of more than {_LONGEST_HEADER:,} bytes", hint="fetch it again")
    return fields


def page_text(page: str, name: str) -> str:
    """The main text of an HTML page, one paragraph per line.

    Raises:
        NotTextError: the extra `web` is not installed.
    """
    try:
        import trafilatura
    except ImportError:
        raise NotTextError(name, "it is HTML", "pip install 'discern-nlp[web]', with which prepare extracts its text") from None
    return trafilatura.extract(page) or ""


def _is_html(name: str, text: str) -> bool:
    return is_html(text) or (suffix_of(name) in (".html", ".htm", ".xhtml") and "<" in text)


def _html(pieces: Iterator[str], context: ReadContext) -> Iterator[Document]:
    """The main text of a page, which is a record."""
    page, limit = "", context.options.limits.record
    for piece in pieces:
        page += piece
        if len(page) > limit:
            raise NotTextError(context.name, f"it is an HTML page of more than {limit:,} characters", "divide it")
    text = page_text(page, context.name)
    if not text:
        context.problems.add("page skipped, as it has no running text", context.name)
    return context.cut_records([Lines(text.split("\n"), ends_record=True)])


# Token ids

_STREAM_IDS = 1 << 20


def _npy(stream: io.BufferedReader, context: ReadContext) -> Iterator[Document]:
    """The token ids in an array: a stream, or a document in each row."""
    read_header = np.lib.format.read_array_header_1_0
    if np.lib.format.read_magic(stream) != (1, 0):
        read_header = np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read_header(stream)
    if dtype.kind not in "iu" or len(shape) not in (1, 2) or (is_fortran and len(shape) == 2):
        raise NotTextError(
            context.name,
            f"it is an array of {dtype} and shape {shape}",
            "expected integers: one dimension for a stream of token ids, or two, with a document in each row",
        )
    return _read_ids(stream, dtype, shape[1] if len(shape) == 2 else _STREAM_IDS, context.name)


def _is_ids(name: str, head: bytes) -> bool:
    """Whether a file holds token ids of two bytes, as nanoGPT writes them: with a NUL byte, and not a pickled object."""
    return suffix_of(name) == ".bin" and b"\0" in head and not head.startswith((b"\x80", b"\x7fELF", b"MZ", b"GGUF"))


def _read_ids(stream: io.BufferedReader, dtype: np.dtype[Any], count: int, name: str) -> Iterator[Document]:
    for block in blocks(stream, count * dtype.itemsize):
        if len(block) % dtype.itemsize:
            raise DataError(f"{name} is cut short: its size is no multiple of {dtype.itemsize} bytes", hint="fetch it again")
        yield np.frombuffer(block, dtype).astype(np.int64)


# Running text

_MANY_LINE_ENDS = 8
# One blank line is enough to end a document, and a file of blank lines alone would take a minute per compressed kilobyte.
_BLANK_LINES = re.compile(r"\n[ \t\r\f\v]*\n[ \t\r\f\v\n]*\n")


def text_lines(pieces: Iterable[str]) -> Iterator[Lines]:
    """The lines of text that comes in pieces. Runs of blank lines may be shortened to one."""
    rest = ""
    for piece in pieces:
        text = rest + piece
        cut = text.rfind("\n") + 1
        continues = cut == 0 and len(text) >= BLOCK_BYTES
        if continues:
            cut = max(text.rfind(" "), text.rfind("\t")) + 1 or len(text) - 1
        if cut:
            # The newline itself is removed, so that it does not become an empty line.
            whole = text[:cut] if continues else text[: cut - 1]
            if whole.count("\n") * _MANY_LINE_ENDS > len(whole):
                whole = _BLANK_LINES.sub("\n\n", whole)
            yield Lines(whole.split("\n"), continues)
        rest = text[cut:]
    if rest:
        yield Lines(rest.split("\n"))


def _text(pieces: Iterator[str], context: ReadContext) -> Iterator[Document]:
    """Plain text, one sentence per line."""
    if context.options.documents == "record":
        raise DataError(f"{context.name} has no records: it is plain text", hint="use --documents blank-line, file or line")
    return context.cut_text(text_lines(pieces))


def _wiki(pieces: Iterator[str], context: ReadContext) -> Iterator[Document]:
    """The articles that WikiExtractor took out of a dump of Wikipedia: records between `<doc ...>` and `</doc>`."""
    return context.cut_records(_articles(text_lines(pieces)))


def _articles(batches: Iterable[Lines]) -> Iterator[Lines]:
    """The `<doc ...>` records, HTML entities unescaped. Text outside of them is a record, too."""
    for batch in batches:
        lines: list[str] = []
        for line in batch.lines:
            tag = line.rstrip() if line.startswith("<") else ""
            if tag == "</doc>" or (tag.startswith("<doc ") and tag.endswith(">")):
                yield Lines(lines, ends_record=True)
                lines = []
            else:
                lines.append(html.unescape(line).replace("\n", " ") if "&" in line else line)
        yield Lines(lines, continues=batch.continues)


_BINARY: tuple[tuple[Callable[[str, bytes], bool], Callable[[io.BufferedReader, ReadContext], Iterator[Document]]], ...] = (
    # First, because an archive begins with a file's name, which may look like a magic number.
    (is_tar, _tar),
    (lambda name, head: head.startswith((b"PK\x03\x04", b"PK\x05\x06")), _zip),
    (lambda name, head: head.startswith((b"WARC/1.", b"WARC/0.1")), _warc),
    (lambda name, head: head.startswith(b"PAR1"), _arrow),
    (lambda name, head: head.startswith(b"\xff\xff\xff\xff") and suffix_of(name) == ".arrow", _arrow),
    (lambda name, head: head.startswith(b"\x93NUMPY"), _npy),
    (_is_ids, lambda stream, context: _read_ids(stream, np.dtype("<u2"), _STREAM_IDS, context.name)),
)
# Before other formats of text: their content is more reliable than a name that ends in .csv.
_MARKED = (
    Format(_is_json, _json),
    Format(lambda name, text: text.lstrip().startswith("<doc "), _wiki),
    Format(_is_html, _html),
)
