"""Cache of compiled kernels. Loading one runs its code, so only this user may be able to write them.

A folder or a library is used only if it belongs to this user, is not a symbolic link, and nobody else can write to it. A library
ends with the digest of its content, so that a damaged one is never loaded.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from discern.storage.checksums import cache_folder

_KEPT_SECONDS = 90 * 24 * 3600
_DIGEST_BYTES = 32


def private_folders() -> Iterator[Path]:
    """Folders for libraries, the preferred one first, created if missing, without those that others could write to.

    The first is the user's cache. The second, used if the first is not writable or not private, has a fixed name among the
    temporary files, and serves every run until the machine restarts.
    """
    with suppress(RuntimeError):  # this user has no home
        if _is_usable(folder := cache_folder().absolute()):
            yield folder
    if _is_usable(folder := Path(tempfile.gettempdir()).resolve() / f"discern-kernels-{os.geteuid()}"):
        yield folder


def is_sound(library: Path) -> bool:
    """Whether a library belongs to this user, cannot be written by others, and is complete."""
    try:
        if not _is_own(library, stat.S_ISREG):
            return False
        content = library.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def keep(made: Path, target: Path) -> None:
    """Move a new library into place, with its digest appended."""
    content = made.read_bytes()
    made.write_bytes(content + hashlib.sha256(content).digest())
    made.chmod(0o700)  # regardless of the umask
    # Renamed into place: of ranks that start together, each writes a complete file.
    made.replace(target)


def forget_old(folder: Path) -> None:
    """Remove old libraries, which most likely belong to other versions; they are rebuilt if needed."""
    for path in folder.glob("kernels-*.so"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _KEPT_SECONDS:
                path.unlink()


def _is_usable(folder: Path) -> bool:
    """Whether a folder exists or could be created, and is private to this user."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        return _is_own(folder, stat.S_ISDIR)
    except OSError:
        return False


def _is_own(path: Path, kind: Callable[[int], bool]) -> bool:
    """Whether `path` itself, not the target of a link, is of this kind, belongs to this user, and is not writable by others."""
    found = path.lstat()
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return kind(found.st_mode) and found.st_uid == os.geteuid() and not others_write
