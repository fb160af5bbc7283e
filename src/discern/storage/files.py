"""Files and folders that appear whole or not at all, locks for processes that share a folder, and checks of output paths.

All locks belong to open files: the system releases them when a process ends for any reason. On Windows, and on a file
system without locks, each process assumes that it is alone.
"""

from __future__ import annotations

import io
import math
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

from discern.errors import ConfigError, DataError

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
