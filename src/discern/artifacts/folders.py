"""Atomic folders.

A folder is made beside its place as `.NAME.partial` and renamed; one that it replaces waits as `.NAME.partial.previous` until
then. Whoever does so holds the lock of `.NAME.partial.lock`, so two processes never do it at once, and what is found under
these names was left by a process that was killed: the next one removes it, or puts back what was moved aside and not replaced.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from discern.artifacts.files import partial_name, sync_folder
from discern.artifacts.locks import create_held, release


class StagedFolder:
    """A folder that is being made.

    Attributes:
        path: where to write to.
        target: where it will be.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(partial_name(target.name))
        self._previous = self.path.with_name(f"{self.path.name}.previous")

    def publish(self, *, replace: bool) -> None:
        """Rename it to its place, once its files are on the disk.

        Args:
            replace: whether a filled folder makes way, which is put back if this fails; otherwise it is an error.
        """
        sync_folder(self.path)
        try:
            if replace and self.target.is_dir() and any(self.target.iterdir()):
                self.target.rename(self._previous)
            self.path.rename(self.target)
        except BaseException:
            self._restore()
            raise
        sync_folder(self.target.parent)
        shutil.rmtree(self._previous, ignore_errors=True)

    def replace_files(self, names: Iterable[str]) -> None:
        """Put single files in the place of those in the published folder."""
        for name in names:
            (self.path / name).replace(self.target / name)
        sync_folder(self.target)

    def clear(self) -> None:
        """Remove what a killed process left, and put back what it had moved aside and not replaced."""
        self._restore()
        for path in (self.path, self._previous):
            shutil.rmtree(path, ignore_errors=True)

    def _restore(self) -> None:
        if self._previous.is_dir() and not (self.target.is_dir() and any(self.target.iterdir())):
            self._previous.rename(self.target)  # an empty folder makes way


@contextmanager
def staged(out: Path) -> Iterator[StagedFolder]:
    """An empty folder to fill and publish, of this process alone; unless it is published, nothing has changed at the end.

    The folders above `out` are made, and removed again if they are of no use.

    Raises:
        DataError: another process is making the same folder.
        OSError: it cannot be made.
    """
    target = Path(os.path.realpath(out))
    absent = [parent for parent in target.parents if not parent.exists()]
    folder = StagedFolder(target)
    lock = folder.path.with_name(f"{folder.path.name}.lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        opened = create_held(lock, target, wait=False)
        try:
            folder.clear()
            folder.path.mkdir()
            yield folder
        finally:
            folder.clear()
            release(opened, lock)
    finally:
        for parent in absent:  # innermost first; those in use stay
            with suppress(OSError):
                parent.rmdir()
