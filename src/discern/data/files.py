"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from discern.errors import ConfigError, DataError


def sync_file(file: BinaryIO) -> None:
    """Push what was written through to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Push a folder's list of names through to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and push it through to the disk."""
    with path.open("xb") as file:
        file.write(content)
        sync_file(file)


def check_output(option: str, out: Path | None, example: str, *sources: Path | None) -> None:
    """Raise where results cannot be written to `out`, before any work.

    Args:
        option: that names it, such as "--out".
        example: a file name to suggest where it is a folder.
        sources: what is read; a name that is no file is nothing to spoil.

    Raises:
        ConfigError: it is a folder, or a file that is read, or has a name that promises something else.
    """
    if out is None:
        return
    if str(out) == "-":
        raise ConfigError(f"{option} - would make a file of that name", hint=f"without {option} results go to standard output")
    if out.suffix in (".gz", ".xz", ".bz2", ".zst"):
        raise ConfigError(f"{out} would hold plain text", hint=f"leave out the {out.suffix}, and compress it afterwards")
    if out.is_dir():
        raise ConfigError(f"{out} is a folder", hint=f"give a file: {option} {out / example}")
    if out.is_file() and any(source is not None and source.exists() and out.samefile(source) for source in sources):
        raise ConfigError(f"{out} is the input", hint=f"write to another file: {option} {out.with_name(example)}")


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text file to write, UTF-8, that appears under its name at the end of the block; on failure nothing has changed.

    A device or a pipe is written to as it is.

    Raises:
        DataError: it cannot be written.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            with path.open("w", encoding="utf-8") as file:
                yield file
            return
        path = path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.partial-{os.getpid()}")
        try:
            with aside.open("w", encoding="utf-8") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
            sync_folder(path.parent)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as problem:
        reason = problem.strerror or problem
        raise DataError(f"cannot write {path}: {reason}", hint="choose another --out, or free some space") from problem
