"""Who works on what, among processes of one machine that share a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
