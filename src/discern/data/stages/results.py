"""Results of tasks: folders that are whole or absent, with the checksums of their files.

A task writes its files aside, in a folder of a name that no other attempt has, notes their checksums and what else it found in
`done.json`, and renames the folder. A task that is run twice, because its machine was believed dead, does no harm: the bytes are
the same, and the first folder stays.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from discern.errors import DataError
from discern.parsing import json_value
from discern.storage.checksums import checksum, digest_of
from discern.storage.files import cannot_write, sync_folder, write_file

DONE_NAME = "done.json"
RUN_AGAIN = "run the same command again, which makes the damaged part again"

Stage = Literal["pieces", "buckets", "clusters", "placed", "shards"]


def result_of(work: Path, stage: Stage, index: int = 0) -> Path:
    """The folder of a task's result.

    Args:
        work: the folder of the plan.
        index: number of the task in its stage; two stages have only one.
    """
    return work / stage / f"{index:06d}"


class Aside:
    """The folder that a task fills.

    Attributes:
        path: where to write the files.
        values: what else the task found, as JSON; to be set before the end of the block.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = {}

    def write(self, name: str, array: np.ndarray) -> None:
        """Write an array as a file, flushed to the disk."""
        write_file(self.path / name, np.ascontiguousarray(array).tobytes())


@contextmanager
def result_folder(folder: Path) -> Iterator[Aside]:
    """A folder to fill, which appears under its name, with checksums, at the end of the block; after an error, nothing does.

    Raises:
        DataError: it cannot be written, for example because the disk is full.
    """
    aside = Aside(folder.with_name(f".{folder.name}.{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"))
    try:
        aside.path.mkdir(parents=True)
        yield aside
        files = {path.name: [path.stat().st_size, checksum(path)] for path in sorted(aside.path.iterdir())}
        write_file(aside.path / DONE_NAME, json.dumps({"files": files, "values": aside.values}, indent=1).encode())
        sync_folder(aside.path)
        try:
            aside.path.rename(folder)
        except OSError:
            if not (folder / DONE_NAME).is_file():  # otherwise another attempt was faster
                raise
        sync_folder(folder.parent)
    except OSError as problem:
        raise cannot_write(folder, problem) from problem
    finally:
        shutil.rmtree(aside.path, ignore_errors=True)


def finished(folder: Path) -> dict[str, Any] | None:
    """What the task of this folder found; None if it has not finished, or a file is damaged. What is damaged is removed."""
    if not folder.exists():
        return None
    try:
        files, values = _done(folder)
        for name, (_, digest) in files.items():
            if digest_of(folder / name) != digest:
                raise DataError(name)
    except DataError:
        shutil.rmtree(folder, ignore_errors=True)
        return None
    return values


def values_of(folder: Path) -> dict[str, Any]:
    """What a finished task found, without reading its files.

    Raises:
        DataError: it has not finished, or `done.json` is damaged.
    """
    return _done(folder)[1]


def checked(folder: Path, name: str) -> Path:
    """A file of a finished task, after a comparison with its checksum.

    Raises:
        DataError: it is missing or damaged.
    """
    size, digest = _done(folder)[0].get(name, (0, ""))
    found = digest_of(folder / name)
    if found != digest:
        raise DataError(
            f"{folder / name} is damaged: its SHA-256 is {found[:12]}..., expected {digest[:12]}... and {size:,} bytes",
            hint=RUN_AGAIN,
        )
    return folder / name


def read_array(folder: Path, name: str, dtype: str | np.dtype, columns: int | None = None) -> np.ndarray:
    """A file of a finished task, mapped into memory, after a comparison with its checksum.

    Args:
        dtype: type of the numbers, with the byte order.
        columns: numbers per row, for a result of two dimensions.

    Raises:
        DataError: it is missing or damaged.
    """
    path = checked(folder, name)
    flat = np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype=dtype)
    return flat if columns is None else flat.reshape(-1, columns)


def _done(folder: Path) -> tuple[dict[str, tuple[int, str]], dict[str, Any]]:
    path = folder / DONE_NAME
    try:
        found = json_value(path.read_bytes())
        return {name: (int(size), str(digest)) for name, (size, digest) in found["files"].items()}, dict(found["values"])
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror or problem}", hint=RUN_AGAIN) from problem
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise DataError(f"{path} is damaged", hint=RUN_AGAIN) from problem
