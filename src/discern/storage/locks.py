"""Locks for processes that share a folder.

All locks belong to open files: the system releases them when a process ends for any reason. On Windows, and on a file
system without locks, each process assumes that it is alone.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

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
