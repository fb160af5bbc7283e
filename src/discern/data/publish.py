"""An output folder that appears whole or not at all."""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from discern.data.files import sync_folder
from discern.data.manifest import Manifest, Setting, is_data_set
from discern.data.shards import TokenData
from discern.errors import ConfigError, DataError

_MARK = ".discern-part-"
_LOCK = ".lock"


def standing(out: Path, configuration: dict[str, Setting], overwrite: bool) -> Manifest | None:
    """The manifest of the data set that `out` holds already and that may be the one asked for; None if there is none.

    Raises:
        ConfigError: `out` is something else, or holds a data set made with other settings, and `overwrite` is not given.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not out.is_dir() or not is_data_set(out):
        raise ConfigError(
            f"{out} exists and is {'not a data set' if out.is_dir() else 'a file'}; it is left as it is",
            hint="give another --out",
        )
    if overwrite:
        return None
    manifest = TokenData.open(out).manifest
    before = manifest.configuration
    differing = sorted(key for key in before.keys() | configuration.keys() if before.get(key) != configuration.get(key))
    if differing:
        changes = ", ".join(f"{key}: {before.get(key)} -> {configuration.get(key)}" for key in differing)
        raise another(out, f"made with other settings ({changes})")
    return manifest


def another(out: Path, what: str) -> ConfigError:
    """The refusal to replace a data set."""
    return ConfigError(f"{out} holds a data set {what}", hint="add --overwrite to replace it, or give another --out")


@contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A hidden folder beside `out` to write into; gone when the block ends, whatever happens.

    What an earlier run left when it was killed is removed as well; a run that still lives holds a lock on its folder.

    Raises:
        DataError: the folder cannot be made or written (read-only, disk full).
    """
    folder: Path | None = None
    absent = [parent for parent in out.parents if not parent.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(out)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}{_MARK}", dir=out.parent))
        folder.chmod(0o777 & ~_umask())
        with (folder / _LOCK).open("xb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    except OSError as problem:
        raise DataError(
            f"{out} cannot be written: {problem.strerror or problem}",
            hint="nothing was left behind; free some space or give another --out",
        ) from problem
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        for parent in absent:  # innermost first; those in use stay
            with suppress(OSError):
                parent.rmdir()


def publish(folder: Path, out: Path, replace: bool) -> None:
    """Rename a finished staging folder to `out`.

    Args:
        folder: from `staging`, all its files synced.
        out: where it belongs: absent, empty, or replaced if `replace`.
        replace: whether a filled `out` makes way.
    """
    (folder / _LOCK).unlink()
    sync_folder(folder)
    if replace and out.exists() and any(out.iterdir()):
        old = Path(tempfile.mkdtemp(prefix=f".{out.name}{_MARK}", dir=out.parent))
        try:
            os.rename(out, old)  # onto an empty folder
            os.rename(folder, out)
        except BaseException:
            if not out.exists():
                os.rename(old, out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(folder, out)
    sync_folder(out.parent)


def _remove_leftovers(out: Path) -> None:
    """Clean up after a killed run; a data set that it had moved aside and not replaced yet comes back."""
    for folder in out.parent.glob(f".{glob.escape(out.name)}{_MARK}*"):
        if not (folder / _LOCK).exists() and is_data_set(folder):
            if not out.exists():
                os.rename(folder, out)
            continue
        try:
            with (folder / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # another run is at work in it


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
