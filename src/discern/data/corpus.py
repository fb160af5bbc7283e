"""Finds the input and turns it into documents. What a file is, its content decides, not its name.

Order: the inputs as given; within a folder or pattern, files sorted by path; within an archive, as archived. Files and
folders whose names begin with a dot are passed over. Archives are read as streams and never unpacked to disk, so the
names of their members matter to nobody.
"""

from __future__ import annotations

import glob
import os
import stat
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from discern.data.encoder import Document
from discern.data.expansion import CountingStream, Expansion
from discern.data.problems import ProblemLog
from discern.data.records import hub_records, json_records, parquet_records
from discern.data.streams import BLOCK_BYTES, HeadStream, PipeStream, Readable, decompressor, is_tar, naming
from discern.data.tables import table_dialect, table_records
from discern.data.text import Cut, Limits, Lines, documents, text_lines, wiki_records
from discern.errors import ConfigError, DataError, DiscernError
from discern.parsing import json_value

DocumentRule = Literal["auto", "blank-line", "file", "line", "record"]

MAX_NESTING = 8


@dataclass(frozen=True)
class CorpusOptions:
    """How input becomes documents.

    Attributes:
        documents: what ends a document. auto: `<doc>` and records as such, otherwise blank lines.
        text_field: name of the field or column that holds the text; None: 'text', and of CSV and TSV the one that is text.
        limits: bounds on what is held in memory at once.
    """

    documents: DocumentRule = "auto"
    text_field: str | None = None
    limits: Limits = field(default_factory=Limits)

    @property
    def record_field(self) -> str:
        """The field of JSON lines, parquet and hub rows."""
        return self.text_field or "text"


@dataclass(frozen=True)
class Source:
    """Something to read: a file, standard input, or a data set of the hub.

    Attributes:
        name: what messages call it.
        path: the file; None for standard input and the hub.
        explicit: named by the user rather than found in a folder: then it must be readable as text.
        size: bytes; None when unknown.
    """

    name: str
    path: Path | None
    explicit: bool
    size: int | None


class Corpus:
    """The documents of some inputs. Reading twice gives the same.

    Args:
        inputs: files, folders, glob patterns, `-` or `hf:NAME`.
        options: how they become documents.
        exclude: a folder that is not input, although it may lie in one: the output.

    Raises:
        DataError: an input does not exist, or holds no file.
    """

    def __init__(self, inputs: Sequence[str], options: CorpusOptions, exclude: Path | None = None) -> None:
        self.options = options
        excluded = exclude.resolve() if exclude is not None else None
        self.sources = [source for text in inputs for source in _sources(text, excluded)]
        if sum(source.name == "-" for source in self.sources) > 1:
            raise ConfigError("'-' (standard input) can be given once only")

    @property
    def total_bytes(self) -> int | None:
        """Size of the input as stored; None when a part is of unknown size."""
        sizes = [source.size for source in self.sources]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def rereadable(self) -> bool:
        """Whether the input can be read twice."""
        return all(source.path is None or source.path.is_file() for source in self.sources) and not any(
            source.name == "-" for source in self.sources
        )

    def documents(
        self,
        problems: ProblemLog,
        count_bytes: Callable[[int], None] = lambda _: None,
        errors: list[DiscernError] | None = None,
    ) -> Iterator[Document]:
        """Every document in order.

        Args:
            problems: gets what is wrong without stopping the work.
            count_bytes: called with the number of bytes read from an input, as they are read.
            errors: if given, takes what would be raised, and the next input is read.

        Raises:
            DataError: an input cannot be read, is damaged, or was named and is not text.
            ConfigError: the records have no such field, or an optional package is missing.
        """
        reader = _Reader(self.options, problems)
        for source in self.sources:
            try:
                if source.name.startswith("hf:"):
                    rows = hub_records(source.name.removeprefix("hf:"), self.options.record_field, problems)
                    yield from reader.cut_records(rows, source.name)
                else:
                    expansion = Expansion(source.name)
                    with naming(source.name), closing(_open(source)) as file:
                        counted = CountingStream(CountingStream(file, count_bytes), expansion.count_read)
                        yield from reader.read(counted, source.name, source.explicit, expansion)
            except DiscernError as error:
                if errors is None:
                    raise
                errors.append(error)


class _Reader:
    """Reads a stream of unknown content, going into archives."""

    def __init__(self, options: CorpusOptions, problems: ProblemLog) -> None:
        self._options = options
        self._problems = problems

    def read(self, stream: Readable, name: str, explicit: bool, expansion: Expansion, depth: int = 0) -> Iterator[Document]:
        if depth > MAX_NESTING:
            raise DataError(f"{name}: archives nested more than {MAX_NESTING} deep", hint="unpack the outer ones first")
        with naming(name):
            whole = HeadStream(stream)
            head = whole.head
            if decompress := decompressor(head):
                content = expansion.watched(decompress(whole), depth + 1)
                yield from self.read(content, name, explicit, expansion, depth + 1)
            elif is_tar(head):
                for member, content in _members(whole, name):
                    yield from self.read(expansion.watched(content, depth + 1), member, False, expansion, depth + 1)
            elif head.startswith(b"PAR1"):
                field = self._options.record_field
                yield from self.cut_records(parquet_records(whole, name, field, expansion, self._problems), name)
            elif reason := binary_reason(head):
                while depth and whole.read(BLOCK_BYTES):
                    pass  # checksums come last: a damaged archive shall be an error, not a file passed over
                if explicit:
                    raise DataError(
                        f"{name} is not text: {reason}",
                        hint="give UTF-8 text, CSV, TSV, JSON lines, parquet or a tar archive of them",
                    )
                self._problems.add("file left out, not being text", f"{name} ({reason})")
            elif is_json_lines(head):
                records = json_records(whole, name, self._options.record_field, self._options.limits, self._problems)
                yield from self.cut_records(records, name)
            elif head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<doc "):
                yield from self.cut_records(wiki_records(text_lines(whole, name, self._problems)), name)
            elif dialect := table_dialect(name, head):
                lines, column = text_lines(whole, name, self._problems, squeeze=False), self._options.text_field
                rows = table_records(lines, name, dialect, column, self._problems, required=explicit)
                yield from self.cut_records(rows, name)
            else:
                yield from self._cut_text(text_lines(whole, name, self._problems), name)

    def cut_records(self, lines: Iterator[Lines], name: str) -> Iterator[Document]:
        rule = self._options.documents
        cut = Cut(at_record=rule != "file", at_blank=rule == "blank-line", at_line=rule == "line")
        return documents(lines, cut, name, self._options.limits, self._problems)

    def _cut_text(self, lines: Iterator[Lines], name: str) -> Iterator[Document]:
        rule = self._options.documents
        if rule == "record":
            raise DataError(f"{name} has no records, being plain text", hint="use --documents blank-line, file or line")
        cut = Cut(at_blank=rule in ("auto", "blank-line"), at_line=rule == "line")
        return documents(lines, cut, name, self._options.limits, self._problems)


def binary_reason(head: bytes) -> str | None:
    """Why the beginning of a file shows that it is not UTF-8 text, or None if it may be."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "it looks like UTF-16; convert it: iconv -f UTF-16 -t UTF-8"
    if head.startswith(b"PK\x03\x04"):
        return "it is a zip archive; unpack it, or make it a tar"
    if b"\x00" in head:
        return "it holds NUL bytes"
    controls = len(head) - len(head.translate(None, bytes(set(range(32)) - set(b"\t\n\r\f\v\b\x1b"))))
    replaced = head.decode("utf-8", errors="replace").count("\ufffd") - head.count("\ufffd".encode())
    if controls + replaced > 0.1 * len(head) + 3:
        return f"{controls + replaced:,} of its first {len(head):,} bytes are no UTF-8; if it is text, convert it with iconv"
    return None


def is_json_lines(head: bytes) -> bool:
    """Whether the first line of text is a JSON object; one longer than the head is believed by its beginning."""
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


class _StrictHeader(tarfile.TarInfo):
    """A header that says when the archive breaks off in the middle, where the library takes it for the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _StrictHeader:
        if buf and len(buf) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError("the archive ends inside a header")
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as problem:
            if str(problem) == "bad checksum":
                raise tarfile.ReadError("a header has a bad checksum") from problem
            raise


def _members(stream: Readable, name: str) -> Iterator[tuple[str, Readable]]:
    """The regular files of a tar archive, in order. Links, devices and folders are passed over."""
    options: dict[str, Any] = {"bufsize": BLOCK_BYTES, "tarinfo": _StrictHeader, "errors": "replace"}
    with tarfile.open(fileobj=stream, mode="r|", **options) as archive:  # type: ignore[call-overload]
        while (member := archive.next()) is not None:
            archive.members = []  # the library keeps every header it has seen
            if member.isfile() and not os.path.basename(member.name).startswith("."):
                content = archive.extractfile(member)
                assert content is not None
                yield f"{name}!{member.name}", content


def _sources(text: str, excluded: Path | None) -> Iterator[Source]:
    if text == "-" or text.startswith("hf:"):
        yield Source(text, None, True, None)
        return
    path = Path(text)
    if path.is_dir():
        yield from _folder(path, excluded)
    elif path.exists():
        yield Source(text, path, True, path.stat().st_size if path.is_file() else None)
    elif glob.has_magic(text):
        matches = sorted(glob.glob(text, recursive=True))
        if not matches:
            raise DataError(f"nothing matches the pattern {text}", hint="quote the pattern if the shell should not expand it")
        for match in map(Path, matches):
            if match.is_dir():
                yield from _folder(match, excluded)
            else:
                yield Source(str(match), match, False, match.stat().st_size)
    else:
        raise DataError(f"input {text} does not exist", hint="give a file, a folder, a pattern in quotes, '-' or hf:NAME")


def _folder(folder: Path, excluded: Path | None) -> Iterator[Source]:
    """Every regular file below a folder, sorted; names that begin with a dot are passed over."""
    found = []
    for parent, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and (Path(parent) / name).resolve() != excluded]
        found += [Path(parent) / name for name in files if not name.startswith(".")]
    regular = sorted((path for path in found if path.is_file()), key=lambda path: path.parts)
    if not regular:
        raise DataError(f"folder {folder} holds no files", hint="give a folder with text files, or the files themselves")
    for path in regular:
        yield Source(str(path), path, False, path.stat().st_size)


def _refuse(problem: OSError) -> None:
    raise DataError(f"{problem.filename} cannot be read: {problem.strerror}") from problem


def _open(source: Source) -> BinaryIO | PipeStream:
    place = sys.stdin.fileno() if source.path is None else source.path
    file = open(place, "rb", closefd=source.path is not None)  # noqa: SIM115 (the caller closes it)
    return file if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else PipeStream(file)
