"""Tar archives, read as a stream and never unpacked to disk."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import Any, final

from discern.data.sources.base import FileSource, ReadContext
from discern.data.sources.documents import Document
from discern.data.sources.streams import BLOCK_BYTES, HeadStream, Readable


@final
class TarSource(FileSource):
    """The files of an archive, each read by the source that recognizes it."""

    is_binary = True
    priority = 1  # before other binary sources: an archive begins with a file's name, which may look like a magic number

    def recognizes(self, name: str, head: bytes) -> bool:
        return is_tar(head)

    def documents(self, stream: HeadStream, context: ReadContext) -> Iterator[Document]:
        for name, content in _members(stream, context.name):
            yield from context.read_member(content, name)


def is_tar(head: bytes) -> bool:
    """Whether a stream begins with a tar header: the magic number, or a valid checksum in archives of older formats."""
    if len(head) < 512 or head[:1] == b"\x00":
        return False
    if head[257:262] == b"ustar":
        return True
    try:
        tarfile.TarInfo.frombuf(head[:512], "utf-8", "surrogateescape")
    except tarfile.TarError:
        return False
    return True


class _StrictHeader(tarfile.TarInfo):
    """A header that reports an archive that is cut short, which the library mistakes for the end."""

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
    """Names and content of the regular files of an archive, in order. Links, devices and folders are skipped."""
    options: dict[str, Any] = {"bufsize": BLOCK_BYTES, "tarinfo": _StrictHeader, "errors": "replace"}
    with tarfile.open(fileobj=stream, mode="r|", **options) as archive:  # type: ignore[call-overload]
        while (member := archive.next()) is not None:
            archive.members = []  # the library keeps every header otherwise
            if member.isfile() and not any(part[:1] == "." and part.strip(".") for part in member.name.split("/")):
                content = archive.extractfile(member)
                assert content is not None
                yield f"{name}!{member.name}", content
