"""`OutputFolder`: the folder that a command writes, from the checks before any work to the finished folder.

All commands that write a folder follow the same steps:

1. `check`: reject a folder that overlaps with what the command reads or is inside another result, before any work is done.
2. `foreign` or `refuse_others`: reject a folder that contains something else.
3. Claim it, so that no other process writes it at the same time. A data set or an export is `staged`: written under a temporary
   name and published as a whole. A run or a fine-tuned model grows in place: `acquire` and `make` lock the folder. A
   comparison also grows in place, but several processes may share it, so they lock its parts.
4. `StagedFolder.publish`; in a folder that grows, each file is written by `discern.storage.files`, whole or not at all.

A staged folder is written as `.NAME.partial` and then renamed; the folder that it replaces is kept as `.NAME.partial.previous`
until then. Meanwhile the process holds the lock of `.NAME.partial.lock`. Anything under these names without that lock was
left by a process that was killed: the next process removes it, or restores a folder that was moved aside but not replaced.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from discern.errors import DataError
from discern.storage.files import cannot_write, partial_name, sync_folder
from discern.storage.guard import check_apart
from discern.storage.locks import create_held, lock_folder, release

_SHOWN = 4


class OutputFolder:
    """A folder that a command writes. As a context manager it releases its locks at the end of the block.

    The folder itself is locked: no lock file is left in it, and a folder that is moved aside stays locked.

    Attributes:
        path: the folder, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locked: dict[tuple[int, int], int] = {}

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, *_: object) -> None:
        for opened in self._locked.values():
            os.close(opened)
        self._locked.clear()

    def check(self, *reads: Path | None, option: str = "--out") -> None:
        """Raise if the folder overlaps with what the command reads, or is inside a data set, run or model; see `check_apart`.

        Args:
            reads: files and folders; those that do not exist are skipped.
            option: the option that names the folder, for messages.

        Raises:
            ConfigError: the folder is an input or contains one, is inside a data set, run or model, or cannot be written to.
        """
        check_apart(option, self.path, *reads)

    @property
    def is_free(self) -> bool:
        """Whether the folder does not exist or is empty."""
        return not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir()))

    def foreign(self, is_own: Callable[[str], bool]) -> list[str]:
        """Names in the folder that are not the command's own, sorted.

        Args:
            is_own: whether the command, or one like it, writes a file or folder of this name.
        """
        return sorted(path.name for path in self.path.iterdir() if not is_own(path.name)) if self.path.is_dir() else []

    def refuse_others(self, own: Collection[str], kind: str) -> None:
        """Raise an error if the folder contains files other than those that a process killed at its start leaves behind.

        Args:
            own: names of the files that are written first.
            kind: kind of folder for the message, such as "run".

        Raises:
            DataError: the folder contains other files.
        """
        is_other = self.path.exists() and not self.path.is_dir()
        if is_other or self.foreign(lambda name: name.removeprefix(".").removesuffix(".partial") in own):
            raise DataError(f"{self.path} is not empty and holds no {kind}", hint="choose another --out, or empty the folder")

    def acquire(self, patience: float = 0.0) -> None:
        """Lock the folder, if it exists. On a file system without folder locks, each process assumes that it is alone.

        Args:
            patience: seconds to wait for another process that is using it.

        Raises:
            DataError: another process is using it.
        """
        lock_folder(self.path, self._locked, patience)

    def make(self, *, shared: bool = False) -> None:
        """Create the folder with its parents, and lock it.

        Args:
            shared: whether several processes may work in it at the same time; then it is not locked.

        Raises:
            DataError: another process is using it, or it cannot be created.
        """
        try:
            self.path.resolve().mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise cannot_write(self.path, problem) from problem
        if not shared:
            self.acquire()

    def move_aside(self) -> Path:
        """Rename the folder to the first free name of NAME.1, NAME.2 and so on, and return the new path.

        Raises:
            DataError: it cannot be renamed.
        """
        place = self.path.resolve()
        numbered = (place.with_name(f"{place.name}.{number}") for number in itertools.count(1))
        aside = next(path for path in numbered if not path.exists())
        try:
            return place.rename(aside)
        except OSError as problem:
            raise cannot_write(self.path, problem) from problem

    @contextmanager
    def staged(self) -> Iterator[StagedFolder]:
        """An empty folder for this process to fill and publish. If it is not published, it is removed at the end.

        Missing parent folders are created, and removed again if nothing is published.

        Raises:
            DataError: another process is writing the same folder, or the folder cannot be created.
        """
        folder = StagedFolder(Path(os.path.realpath(self.path)))
        target = folder.target
        absent = [parent for parent in target.parents if not parent.exists()]
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
        except OSError as problem:
            raise cannot_write(self.path, problem) from problem
        finally:
            for parent in absent:  # innermost first; those in use stay
                with suppress(OSError):
                    parent.rmdir()


class StagedFolder:
    """A folder that is being written.

    Attributes:
        path: temporary path to write to.
        target: final path.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(partial_name(target.name))
        self._previous = self.path.with_name(f"{self.path.name}.previous")

    def publish(self, *, replace: bool) -> None:
        """Move the folder to its final path, after its files were flushed to the disk.

        Args:
            replace: whether to replace an existing folder with files, which is restored on failure; otherwise it is an error.
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
        """Replace single files in the published folder."""
        for name in names:
            (self.path / name).replace(self.target / name)
        sync_folder(self.target)

    def clear(self) -> None:
        """Remove the files of a killed process, and restore a folder that it had moved aside but not replaced."""
        self._restore()
        for path in (self.path, self._previous):
            shutil.rmtree(path, ignore_errors=True)

    def _restore(self) -> None:
        if self._previous.is_dir() and not (self.target.is_dir() and any(self.target.iterdir())):
            self._previous.rename(self.target)  # replaces an empty folder


def listed(names: Collection[str]) -> str:
    """The first few names, and how many more there are: "a, b, c, d and 3 more"."""
    first = ", ".join(list(names)[:_SHOWN])
    return first + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
