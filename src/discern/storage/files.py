"""Atomic files; all files of discern are written here.

A file is written in the same folder as `.NAME.partial`, flushed to the disk and renamed. As usual for Unix tools:


- A symbolic link is kept: the file that it points to is replaced.
- A file that is replaced keeps its permissions.
- A device or a pipe (`/dev/null`, a FIFO) is written to directly; `/dev/stdout` and `/dev/fd/N` are the open descriptors.
- A block device, a socket or a folder is an error.

The partial file is locked while it is written. If a process is killed, the next process
that writes the same file removes its partial file.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from discern.errors import DataError
from discern.storage.locks import create_held, release

_LONGEST_NAME = 60
"""In characters: even with four bytes each, they fit into the 255 bytes of a file name, with room for what is added."""

_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
_STANDARD = {"/dev/stdout": 1, "/dev/stderr": 2}


def sync_file(file: BinaryIO) -> None:
    """Flush a file to the disk (fsync)."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to the disk (fsync)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file in a folder that is not published yet, and flush it to the disk.

    Raises:
        FileExistsError: a file of that name exists.
    """
    with path.open("xb") as file:
        file.write(content)
        sync_file(file)


def write_text(path: Path, text: str) -> None:
    """Write or replace a UTF-8 text file; see `write_bytes`.

    A byte of a file name that is not UTF-8 becomes an escape, which JSON reads back as that byte.
    """
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write or replace a file, after waiting for any other process that is writing it.

    Raises:
        OSError: the file cannot be written. An existing file is unchanged, and no partial file is left.
    """
    with replacing_file(path, wait=True) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A UTF-8 text file to write, which appears under its name at the end of the block. On failure nothing changes.

    Raises:
        DataError: it cannot be written, or another process is writing it.
    """
    with whole_binary_file(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="\n")
        try:
            yield text
        finally:
            text.detach()  # flushes the buffer, and leaves the file open


@contextmanager
def whole_binary_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file to write; see `whole_file`. Missing parent folders are created.

    Raises:
        DataError: it cannot be written, or another process is writing it.
    """
    try:
        if not path.exists():
            Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(path, wait=False) as file:
            yield file
    except OSError as problem:
        raise cannot_write(path, problem) from problem


def cannot_write(path: Path, problem: Exception) -> DataError:
    """The error for a failed write, with a hint."""
    reason = getattr(problem, "strerror", None) or problem
    full = getattr(problem, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(problem)
    return DataError(
        f"cannot write {path}: {reason}", hint="free some space, or choose another --out" if full else "choose another --out"
    )


@contextmanager
def writing_temporary_files() -> Iterator[None]:
    """Name the folder for temporary files if one cannot be written there.

    Raises:
        DataError: in place of an OSError.
    """
    try:
        yield
    except OSError as problem:
        raise DataError(
            f"cannot write a temporary file in {tempfile.tempdir or 'the folder for temporary files'}: "
            f"{problem.strerror or problem}",
            hint="free some space there, or choose another folder: export TMPDIR=FOLDER",
        ) from problem


@contextmanager
def utf8_name(path: Path) -> Iterator[Path]:
    """A path to the same file for libraries that, like safetensors, only open files with UTF-8 names; valid until the block ends.

    A file that was opened or mapped into memory under this path stays open afterwards.
    """
    if os.fsencode(path).decode("utf-8", "replace") == str(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="discern-") as folder:
        link = Path(folder) / "file"
        link.symlink_to(path.absolute())
        yield link


def partial_name(name: str) -> str:
    """The temporary name under which a file or folder of that name is written; short enough for every file system."""
    if len(name) > _LONGEST_NAME:
        digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:12]
        name = f"{name[: _LONGEST_NAME - 13]}-{digest}"
    return f".{name}.partial"


@contextmanager
def replacing_file(path: Path, *, wait: bool) -> Iterator[BinaryIO]:
    """A file that replaces `path` at the end of the block, or `path` itself if it is a device or a pipe.

    Args:
        wait: wait for another process that is writing it, instead of raising.
    """
    opened = _open_as_it_is(path)
    if opened is not None:
        with os.fdopen(opened, "wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))  # follows every link
    partial = target.with_name(partial_name(target.name))
    opened = create_held(partial, target, wait=wait)
    try:
        if target.exists():
            os.fchmod(opened, target.stat().st_mode & 0o777)
        with os.fdopen(opened, "wb", closefd=False) as file:
            yield file
            sync_file(file)
        partial.replace(target)
        sync_folder(target.parent)
    finally:
        release(opened, partial)


def is_stream(path: Path) -> bool:
    """Whether writing to a path replaces nothing: it is a device, a pipe or an open descriptor.

    Raises:
        OSError: it is a block device, a socket or a folder, which cannot be written to.
    """
    if _descriptor(path) is not None:
        return True
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    for is_kind, kind in ((stat.S_ISDIR, "a folder"), (stat.S_ISBLK, "a block device"), (stat.S_ISSOCK, "a socket")):
        if is_kind(mode):
            raise OSError(f"it is {kind}, expected a file")
    return not stat.S_ISREG(mode)


def _open_as_it_is(path: Path) -> int | None:
    """Open a device, a pipe or a descriptor; None if the path is a file or does not exist."""
    if not is_stream(path):
        return None
    descriptor = _descriptor(path)
    if descriptor is None:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # there is none, or it is closed
            stream.flush()
    return os.dup(descriptor)


def _descriptor(path: Path) -> int | None:
    """The open descriptor that a path refers to. Opening the path again would write at the start of a file opened by `> FILE`."""
    name = os.path.abspath(path)
    found = _DESCRIPTOR.fullmatch(name)
    return int(found.group(1)) if found else _STANDARD.get(name)
