"""Checks of output paths: a command replaces nothing that it reads, and writes into no data set, run or model.

Paths are compared by the files that they refer to, so `..`, links and letter case don't matter.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from discern.errors import ConfigError, DataError
from discern.storage.files import cannot_write, create_held, is_stream, lock_folder, partial_name, release, sync_folder

_MARKS = (
    {"manifest.json", "tokenizer.json"},
    {"plan.json", "tokenizer.json"},
    {"run.json"},
    {"finetuned.json"},
    {"comparison.json"},
    {"model.safetensors"},
    {"model.safetensors.index.json"},
    {"pytorch_model.bin"},
)
"""Files that identify a data set, one that is being prepared in parts, a run, a fine-tuned model, a comparison or a model."""


def check_output(option: str, out: Path | None, example: str, *reads: Path | None, own: Collection[str] = ()) -> None:
    """Check, before any work, that a file of results may be written to `out`.

    Args:
        option: the option for the file, such as "--out".
        out: the file; None is accepted.
        example: a file name to suggest.
        reads: files and folders that the command reads; those that do not exist are ignored.
        own: names of files that the command may write into the folder of a run or a model.

    Raises:
        ConfigError: `out` is a folder, is write-protected, or is refused by `check_apart`.
    """
    if out is None:
        return
    if str(out) == "-":
        raise ConfigError(f"{option} - would create a file named '-'", hint=f"without {option} results go to standard output")
    if out.suffix in (".gz", ".xz", ".bz2", ".zst"):
        raise ConfigError(f"{out} would contain plain text", hint=f"leave out {out.suffix}, and compress the file afterwards")
    if os.path.isdir(out):
        raise ConfigError(f"{out} is a folder", hint=f"give a file: {option} {out / example}")
    elsewhere = f"write to another file: {option} {example}"
    check_apart(option, out, *reads, own=own, hint=elsewhere)
    if os.path.exists(out) and not os.access(out, os.W_OK):
        raise ConfigError(f"{out} is write-protected", hint=f"chmod u+w {out}, or {elsewhere}")


def check_apart(option: str, out: Path, *reads: Path | None, own: Collection[str] = (), hint: str | None = None) -> None:
    """Check that writing to `out` damages neither what the command reads, nor any data set, run or model.

    A new file or folder is allowed in an ordinary folder of the user, also beside a run or a data set.

    Args:
        option: the option for the output, such as "--out".
        out: file or folder, which need not exist.
        reads: files and folders that the command reads; those that do not exist are ignored.
        own: names of files that the command may write into the folder of a run or a model.
        hint: hint of the error; None: suggest a path beside the folder.

    Raises:
        ConfigError: `out` is an input or contains one, is inside a data set, run or model, or cannot be written to.
    """
    if is_stream(out) and not os.path.isdir(out):  # its content is not replaced
        return
    existing = [Path(os.path.realpath(read)) for read in reads if read is not None and os.path.exists(read)]
    owned = {read / name for read in existing for name in own}
    # A link is checked on both sides: it may be a file of a data set that is stored elsewhere.
    place, target = Path(os.path.normpath(Path(os.path.realpath(out.parent), out.name))), Path(os.path.realpath(out))

    def refuse(reason: str, folder: Path) -> NoReturn:
        name = "2" if place.name == folder.name else place.name
        raise ConfigError(f"{out} {reason}", hint=hint or f"choose another path: {option} {folder}-{name}")

    for path in {place, target} - owned:
        for folder in filter(is_kept_whole, reversed(path.parents)):  # the outermost one, beside which there is room
            # A comparison trains its models in `work`, and each has a folder of its own.
            if not (folder / "work" in path.parents and (folder / "comparison.json").exists()):
                refuse(f"lies inside {folder}, which is a data set, a run or a model", folder)
    for read in existing:
        if os.path.exists(out) and out.samefile(read):
            refuse("is read by the command, and cannot replace itself" if read.is_dir() else "is the input", read)
        if target in read.parents and os.path.isdir(out):
            refuse(f"holds {read}, which the command reads", read)


def is_kept_whole(folder: Path) -> bool:
    """Whether a folder is a data set, a run, a fine-tuned model, a comparison or a model."""
    return any(all(os.path.exists(folder / name) for name in mark) for mark in _MARKS)


_SHOWN = 4


class OutputFolder:
    """A folder that a command writes. As a context manager it releases its locks at the end of the block.

    The folder itself is locked: no lock file is left in it, and a folder that is moved aside stays locked.

    Attributes:
        path: the folder, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locked: list[int] = []

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, *_: object) -> None:
        while self._locked:
            os.close(self._locked.pop())

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
        if self._locked and self.path.exists() and os.path.samestat(os.fstat(self._locked[-1]), self.path.stat()):
            return
        opened = lock_folder(self.path, patience)
        if opened is not None:
            self._locked.append(opened)

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

        Missing parent folders are created.

        Raises:
            DataError: another process is writing the same folder, or the folder cannot be created.
        """
        folder = StagedFolder(Path(os.path.realpath(self.path)))
        target = folder.target
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
            if replace and self._is_filled:
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

    @property
    def _is_filled(self) -> bool:
        return self.target.is_dir() and any(self.target.iterdir())

    def _restore(self) -> None:
        if self._previous.is_dir() and not self._is_filled:
            self._previous.rename(self.target)  # replaces an empty folder


def listed(names: Collection[str]) -> str:
    """The first few names, and how many more there are: "a, b, c, d and 3 more"."""
    first = ", ".join(list(names)[:_SHOWN])
    return first + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
