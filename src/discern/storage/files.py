"""Locks for processes that share a folder.

All locks belong to open files: the system releases them when a process ends for any reason. On Windows, and on a file
system without locks, each process assumes that it is alone.
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
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from discern.errors import DataError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LOOK = 0.5  # seconds between two attempts to lock


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Hold the lock of a file; yields False if another process holds it. The file is kept.

    Raises:
        OSError: the file cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            _lock(file.fileno(), wait=False)
        except BlockingIOError:
            yield False
        else:
            yield True


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process is in this block for the folder; does not wait on a file system without folder locks."""
    if fcntl is None:
        yield
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        _lock(opened, wait=True)
        yield
    finally:
        os.close(opened)


def create_held(path: Path, target: Path, *, wait: bool) -> int:
    """Create a file, lock it, and open it for writing. The caller closes the descriptor, which releases the lock.

    A file of that name that a killed process left is removed first. Others may guess the name, so an existing file is never
    written to: it could be a link to something else.

    Args:
        path: the file, a name of our own beside `target`.
        target: what the lock protects, for the message.
        wait: wait for another process that holds it, instead of raising.

    Raises:
        DataError: another process holds it.
        OSError: the file cannot be created.
    """
    while True:
        try:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            _clear(path, target, wait=wait)
            continue
        _lock(opened, wait=True)  # held at most briefly, by a process that mistakes the new file for a left-over
        if _is_at(opened, path):
            return opened
        os.close(opened)


def release(opened: int, path: Path) -> None:
    """Close the descriptor that `create_held` returned, and remove the file if it has not been renamed."""
    if _is_at(opened, path):
        path.unlink(missing_ok=True)
    os.close(opened)


def _clear(path: Path, target: Path, *, wait: bool) -> None:
    """Remove a file that no process has locked.

    Raises:
        DataError: another process has locked it, and `wait` is False.
    """
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            path.unlink(missing_ok=True)
            return
        opened = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        _lock(opened, wait=wait)
        if _is_at(opened, path):
            path.unlink(missing_ok=True)
    except BlockingIOError as problem:
        raise DataError(
            f"another process is writing {target}", hint="wait until it has finished, or choose another --out"
        ) from problem
    finally:
        os.close(opened)


def _lock(opened: int, *, wait: bool) -> None:
    """Lock an open file.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is False.
    """
    if fcntl is None:
        return
    try:
        fcntl.flock(opened, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # this file system has no locks
        return


def _is_at(opened: int, path: Path) -> bool:
    """Whether an open file still has that name; its last holder may have renamed or removed it."""
    try:
        return os.path.samestat(os.fstat(opened), os.lstat(path))
    except FileNotFoundError:
        return False


def lock_folder(folder: Path, locked: dict[tuple[int, int], int], patience: float = 0.0) -> None:
    """Lock a folder itself, if it exists. On a file system without folder locks, each process assumes that it is alone.

    Args:
        locked: open descriptors of the folders that this process has locked, by device and inode; the folder is added. Closing
            a descriptor releases the lock.
        patience: seconds to wait for another process that holds the lock.

    Raises:
        DataError: another process has locked it.
    """
    if fcntl is None or not folder.is_dir():
        return
    try:
        opened = os.open(folder, os.O_RDONLY)
    except PermissionError:  # reported when the folder is read
        return
    deadline = time.monotonic() + patience
    with ExitStack() as unless_locked:
        unless_locked.callback(os.close, opened)
        status = os.fstat(opened)
        if (status.st_dev, status.st_ino) in locked:
            return
        while True:
            try:
                _lock(opened, wait=False)
                break
            except BlockingIOError as problem:
                if time.monotonic() >= deadline:
                    raise DataError(
                        f"another process is using {folder}", hint="wait until it has finished, or choose another --out"
                    ) from problem
            time.sleep(_LOOK)
        unless_locked.pop_all()
        locked[status.st_dev, status.st_ino] = opened


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
