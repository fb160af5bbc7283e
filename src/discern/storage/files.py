"""Locks for processes that share a folder, and files that appear whole or not at all.

All locks belong to open files: the system releases them when a process ends for any reason. On Windows, and on a file
system without locks, each process assumes that it is alone.
"""

from __future__ import annotations

import io
import math
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from discern.errors import DataError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LOOK = 0.5  # seconds between two attempts to lock


def _lock(opened: int, *, wait: bool) -> bool:
    """Lock an open file; False if another process holds the lock, and `wait` is False."""
    try:
        if fcntl is not None:
            fcntl.flock(opened, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # this file system has no locks
        pass
    return True


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Hold the lock of a file; yields False if another process holds it. The file is kept.

    Raises:
        OSError: the file cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        yield _lock(file.fileno(), wait=False)


@contextmanager
def alone_in(folder: Path, patience: float = math.inf) -> Iterator[None]:
    """Hold the lock of a folder itself. If the folder does not exist or cannot be read, there is none.

    Args:
        patience: seconds to wait for another process that holds the lock.

    Raises:
        DataError: another process has locked it.
    """
    if fcntl is None or not os.access(folder, os.R_OK):
        yield
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + patience
        while not _lock(opened, wait=False):
            if time.monotonic() >= deadline:
                raise DataError(f"another process is using {folder}", hint="wait until it has finished, or choose another --out")
            time.sleep(_LOOK)
        yield
    finally:
        os.close(opened)


def create_held(path: Path, target: Path, *, wait: bool) -> int:
    """Create a file, lock it, and open it for writing. The caller closes the descriptor, which releases the lock.

    A file of that name that a killed process left is emptied. Others may guess the name, so a symbolic link is an error.

    Args:
        path: the file, a name of our own beside `target`.
        target: what the lock protects, for the message.
        wait: wait for another process that holds it, instead of raising.

    Raises:
        DataError: another process holds it.
        OSError: the file cannot be created.
    """
    while True:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        if not _lock(opened, wait=wait):
            os.close(opened)
            raise DataError(f"another process is writing {target}", hint="wait until it has finished, or choose another --out")
        if _is_at(opened, path):  # its last holder may have renamed or removed it
            os.ftruncate(opened, 0)
            return opened
        os.close(opened)


def release(opened: int, path: Path) -> None:
    """Close the descriptor that `create_held` returned, and remove the file if it has not been renamed."""
    if _is_at(opened, path):
        path.unlink(missing_ok=True)
    os.close(opened)


def _is_at(opened: int, path: Path) -> bool:
    """Whether an open file still has that name."""
    try:
        return os.path.samestat(os.fstat(opened), os.lstat(path))
    except FileNotFoundError:
        return False


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
def whole_file(path: Path) -> Iterator[io.TextIOWrapper]:
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
        Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(path, wait=False) as file:
            yield file
    except OSError as problem:
        raise cannot_write(path, problem) from problem


def cannot_write(path: Path, problem: Exception) -> DataError:
    """The error for a failed write, with a hint."""
    reason = getattr(problem, "strerror", None) or problem
    return DataError(f"cannot write {path}: {reason}", hint="free some space if the disk is full, or choose another --out")


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
            f"cannot write a temporary file in {tempfile.gettempdir()}: {problem.strerror or problem}",
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
    """The temporary name under which a file or folder of that name is written."""
    return f".{name}.partial"


@contextmanager
def replacing_file(path: Path, *, wait: bool) -> Iterator[BinaryIO]:
    """A file that replaces `path` at the end of the block, or `path` itself if it is a device or a pipe.

    Args:
        wait: wait for another process that is writing it, instead of raising.
    """
    if is_stream(path):
        with path.open("wb") as file:
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
    """Whether writing to a path replaces nothing: it is a device or a pipe."""
    with suppress(FileNotFoundError, NotADirectoryError):  # other errors, such as a name that is too long, are raised
        return stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR)
    return False
