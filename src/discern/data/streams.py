"""Byte streams of unknown content: looked into, decompressed; errors name the file."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import select
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

import zstandard

from discern.errors import DataError, nearest

BLOCK_BYTES = 1 << 20
HEAD_BYTES = 1 << 16


@runtime_checkable
class Readable(Protocol):
    """Anything that gives bytes in order."""

    def read(self, size: int = -1, /) -> bytes: ...


class HeadStream:
    """A stream whose first bytes can be looked at before they are read.

    Attributes:
        head: the first 64 KiB, or all when there is less.
    """

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self.head = read_fully(stream, HEAD_BYTES)
        self._unread = self.head

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes, as many as there are; empty only at the end."""
        if size < 0:
            data, self._unread = self._unread, b""
            return data + self._stream.read()
        if self._unread:
            data, self._unread = self._unread[:size], self._unread[size:]
            return data
        return self._stream.read(size)


class PipeStream:
    """Reads a pipe or terminal, and wakes up now and then.

    A signal that arrives just before a read blocks is heard of only when that read returns, which may be never.
    """

    _WAKE_SECONDS = 0.5

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def read(self, size: int = -1, /) -> bytes:
        """What is there now, at most `size` bytes; empty only at the end."""
        assert size >= 0
        while not select.select([self._file], [], [], self._WAKE_SECONDS)[0]:
            pass
        return os.read(self._file.fileno(), size)

    def close(self) -> None:
        self._file.close()


class ZstdStream:
    """Decompresses zstd frames, and unlike the library's own reader notices when the last one is cut short."""

    # A block of 4 compressed bytes may hold 128 KiB, so small bites bound what one call can give.
    _BITE = 2048

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._input = b""
        self._output = bytearray()

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes.

        Raises:
            EOFError: the stream ends inside a frame.
        """
        while size < 0 or len(self._output) < size:
            if not self._input:
                self._input = self._stream.read(self._BITE)
                if not self._input:
                    if self._frame is not None:
                        raise EOFError("zstd stream ends inside a frame")
                    break
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            self._output += self._frame.decompress(self._input)
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        size = len(self._output) if size < 0 else size
        data = bytes(self._output[:size])
        del self._output[:size]
        return data


_COMPRESSIONS: dict[bytes, Callable[[Readable], Readable]] = {
    b"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=_as_file(stream), mode="rb"),
    b"\xfd7zXZ\x00": lambda stream: lzma.LZMAFile(_as_file(stream)),  # noqa: SIM115 (closed with the file beneath)
    b"BZh": lambda stream: bz2.BZ2File(_as_file(stream)),
    b"\x28\xb5\x2f\xfd": ZstdStream,
}


def decompressor(head: bytes) -> Callable[[Readable], Readable] | None:
    """What decompresses a stream that begins with `head`, or None for a plain one."""
    return next((open_ for magic, open_ in _COMPRESSIONS.items() if head.startswith(magic)), None)


def is_tar(head: bytes) -> bool:
    """Whether a stream begins with a tar header: the magic, or a right checksum as in archives before it."""
    if len(head) < 512 or head[:1] == b"\x00":
        return False
    if head[257:262] == b"ustar":
        return True
    try:
        tarfile.TarInfo.frombuf(head[:512], "utf-8", "surrogateescape")
    except tarfile.TarError:
        return False
    return True


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Turns the errors of reading and decompressing into a DataError that names the file."""
    try:
        yield
    except OSError as problem:
        if problem.errno is None:  # from a decompressor
            raise _damaged(name, problem) from problem
        raise DataError(f"{name} cannot be read: {problem.strerror}", hint=_other_path(name, problem)) from problem
    except (EOFError, lzma.LZMAError, zlib.error, zstandard.ZstdError, tarfile.TarError) as problem:
        raise _damaged(name, problem) from problem


def _other_path(name: str, problem: OSError) -> str | None:
    """What to try instead of a file that cannot be opened: the name beside it that looks most like it."""
    if isinstance(problem, PermissionError):
        return f"ls -l '{name}' shows who may read it"
    if not isinstance(problem, FileNotFoundError):
        return None
    path = Path(name)
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}; paths start at {Path.cwd()}"
    with suppress(OSError):
        if match := nearest(path.name, os.listdir(path.parent)):
            return f"did you mean {path.parent / match}?"
    return f"check the path; it starts at {Path.cwd()}"


def _damaged(name: str, problem: Exception) -> DataError:
    return DataError(f"{name} is damaged or cut short: {problem}", hint="fetch it again, or leave it out of the input")


def read_fully(stream: Readable, size: int) -> bytes:
    """`size` bytes, fewer only at the end: one read may give less."""
    parts = []
    while size > 0 and (data := stream.read(size)):
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


class _File(io.RawIOBase):
    """A stream in the clothes of a file, which the decompressors ask for."""

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
