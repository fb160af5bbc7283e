"""Who works on what, among processes that share a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from discern.errors import DataError

try:
    import fcntl
except ImportError:  # Windows has none: there each process believes that it is alone
    fcntl = None  # type: ignore[assignment]


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Hold the lock that a file stands for; False where another process holds it. The system lets go when a process ends.

    Raises:
        OSError: the file cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process is in this block for the folder; on a disk that locks no folders there is no waiting."""
    if fcntl is None:
        yield
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


class Claim:
    """The folders that this process alone may write to while the block lasts.

    The folders themselves are locked: nothing is left in them, and one that is moved aside stays locked.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], int] = {}

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in self._held.values():
            os.close(opened)
        self._held.clear()

    def take(self, folder: Path) -> None:
        """Claim a folder, if it is there; on a disk that locks no folders each process believes that it is alone.

        Raises:
            DataError: another process is at work in it.
        """
        if fcntl is None or not folder.is_dir():
            return
        try:
            opened = os.open(folder, os.O_RDONLY)
        except PermissionError:  # whoever looks into it next says so
            return
        status = os.fstat(opened)
        if (status.st_dev, status.st_ino) in self._held:
            os.close(opened)
            return
        self._held[status.st_dev, status.st_ino] = opened
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as problem:
            raise DataError(
                f"another process is at work in {folder}", hint="wait until it has ended, or choose another --out"
            ) from problem
        except OSError:  # this disk locks no folders
            return
