"""Checks of output paths: a command replaces nothing that it reads, and writes into no data set, run or model.

Paths are compared after links are resolved.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from discern.errors import ConfigError, DataError
from discern.storage.files import alone_in, cannot_write, create_held, is_stream, partial_name, release, sync_folder

_MARKS = (
    {"manifest.json", "tokenizer.json"},
    {"run.json"},
    {"finetuned.json"},
    {"model.safetensors"},
    {"model.safetensors.index.json"},
    {"pytorch_model.bin"},
)
"""Files that identify a data set, a run, a fine-tuned model, or a model."""


def check_output(option: str, out: Path | None, example: str, *reads: Path | None, own: Collection[str] = ()) -> None:
    """Check, before any work, that a file of results may be written to `out`.

    Args:
        option: the option for the file, such as "--out".
        out: the file; None is accepted.
        example: a file name to suggest.
        reads: files and folders that the command reads; those that do not exist are ignored.
        own: names of files that the command may write into the folder of a run or a model.

    Raises:
        ConfigError: `out` is a folder, or is refused by `check_apart`.
    """
    if out is None:
        return
    if str(out) == "-":
        raise ConfigError(f"{option} - would create a file named '-'", hint=f"without {option} results go to standard output")
    if os.path.isdir(out):
        raise ConfigError(f"{out} is a folder", hint=f"give a file: {option} {out / example}")
    check_apart(out, *reads, option=option, own=own)


def check_apart(out: Path, *reads: Path | None, option: str = "--out", own: Collection[str] = ()) -> None:
    """Check that writing to `out` damages neither what the command reads, nor any data set, run or model.

    A new file or folder is allowed in an ordinary folder of the user, also beside a run or a data set.

    Args:
        out: file or folder, which need not exist.
        reads: files and folders that the command reads; those that do not exist are ignored.
        option: the option for the output, for the hint.
        own: names of files that the command may write into the folder of a run or a model.

    Raises:
        ConfigError: `out` is an input or contains one, or is inside a data set, run or model.
    """
    if is_stream(out):  # its content is not replaced
        return
    target = Path(os.path.realpath(out))
    existing = [Path(os.path.realpath(read)) for read in reads if read is not None and os.path.exists(read)]
    for read in existing:
        if target in (read, *read.parents):
            reason = "is the input, and cannot replace itself" if target == read else f"holds {read}, which the command reads"
            raise ConfigError(f"{out} {reason}", hint=f"choose another path: {option} {target}-2")
    # The outermost folder, beside which there is room
    folder = next(filter(is_kept_whole, reversed(target.parents)), None)
    if folder is not None and target not in {read / name for read in existing for name in own}:
        hint = f"choose another path: {option} {folder}-{target.name}"
        raise ConfigError(f"{out} lies inside {folder}, which is a data set, a run or a model", hint=hint)


def is_kept_whole(folder: Path) -> bool:
    """Whether a folder is a data set, a run, a fine-tuned model or a model."""
    return any(all(os.path.exists(folder / name) for name in mark) for mark in _MARKS)


_SHOWN = 4


class OutputFolder(ExitStack):
    """A folder that a command writes. As a context manager it releases its lock at the end of the block.

    The folder itself is locked: no lock file is left in it.

    Attributes:
        path: the folder, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def is_free(self) -> bool:
        """Whether the folder does not exist or is empty."""
        return not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir()))

    def refuse_others(self, own: Collection[str], kind: str) -> None:
        """Raise an error if the folder contains files other than those that a process killed at its start leaves behind.

        Args:
            own: names of the files that are written first.
            kind: kind of folder for the message, such as "run".

        Raises:
            DataError: the folder contains other files.
        """
        allowed = {*own, *map(partial_name, own)}
        if self.path.exists() and (not self.path.is_dir() or any(path.name not in allowed for path in self.path.iterdir())):
            raise DataError(f"{self.path} is not empty and holds no {kind}", hint="choose another --out, or empty the folder")

    def acquire(self, patience: float = 0.0) -> None:
        """Lock the folder, if it exists. On a file system without folder locks, each process assumes that it is alone.

        Args:
            patience: seconds to wait for another process that is using it.

        Raises:
            DataError: another process is using it.
        """
        self.close()
        self.enter_context(alone_in(self.path, patience))

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
        aside = next(path for number in count(1) if not (path := place.with_name(f"{place.name}.{number}")).exists())
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
            replace: whether to replace an existing folder with files, which `clear` restores on failure.
        """
        sync_folder(self.path)
        if replace and self._is_filled:
            self.target.rename(self._previous)
        self.path.rename(self.target)
        sync_folder(self.target.parent)

    def replace_files(self, names: Iterable[str]) -> None:
        """Replace single files in the published folder."""
        for name in names:
            (self.path / name).replace(self.target / name)
        sync_folder(self.target)

    def clear(self) -> None:
        """Remove the files of a killed process, and restore a folder that it had moved aside but not replaced."""
        if self._previous.is_dir() and not self._is_filled:
            self._previous.rename(self.target)  # replaces an empty folder
        for path in (self.path, self._previous):
            shutil.rmtree(path, ignore_errors=True)

    @property
    def _is_filled(self) -> bool:
        return self.target.is_dir() and any(self.target.iterdir())


def listed(names: Collection[str]) -> str:
    """The first few names, and how many more there are: "a, b, c, d and 3 more"."""
    first = ", ".join(list(names)[:_SHOWN])
    return first + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
