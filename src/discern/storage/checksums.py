"""SHA-256 checksums of the files that discern writes, compared when the files are read.

A folder stores the checksums of its files in `checksums.json`, which maps file names to hexadecimal digests; a data set stores
them in its manifest. A small file is hashed each time it is read, from the bytes that were read. A large file is hashed at its
first use in a process, and the result is cached outside the folder for as long as size, inode and times of the file stay the
same: a data set of 100 GB is hashed once per machine, not at every start.

`DISCERN_VERIFY=0` in the environment disables verification.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from discern.errors import DataError, DiscernError
from discern.parsing import json_value
from discern.storage.files import write_bytes, write_text

CHECKSUMS_NAME = "checksums.json"
VARIABLE = "DISCERN_VERIFY"
_NOTES = "verified"
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Hashing this many bytes takes about 20 ms, so caching the result for smaller files is not worthwhile.
_WORTH_REMEMBERING = 1 << 24
# A file that is written twice within one tick of the file system's clock has the same times before and after.
_TICK_NS, _SETTLED_NS = 20_000_000, 2_000_000_000
_hashed: dict[tuple[int, ...], str] = {}


def verification_is_on() -> bool:
    """Whether files are compared with their checksums."""
    return os.environ.get(VARIABLE, "1").strip().lower() not in ("0", "off", "no", "false")


def cache_folder() -> Path:
    """Cache folder of discern: `DISCERN_CACHE`, or `discern` in the user's cache folder."""
    root = os.environ.get("DISCERN_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "discern"
    return Path(root)


def make_cache_folder(name: str) -> Path:
    """A folder in the cache, created if missing.

    The cache is created with access for this user only, whatever the umask: it also contains compiled kernels, which are never
    loaded from a folder that others may write to.

    Raises:
        OSError, RuntimeError: the folder cannot be created, or this user has no home.
    """
    cache_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = cache_folder() / name
    folder.mkdir(exist_ok=True)
    return folder


def checksum(path: Path) -> str:
    """SHA-256 of a file's content, read now.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_checksums(folder: Path) -> dict[str, str]:
    """Read the digests of a folder's `checksums.json`, by file name; empty if there is no such file.

    Raises:
        DataError: it is damaged.
    """
    path = folder / CHECKSUMS_NAME
    hint = f"copy the folder again, or accept its files as they are: discern doctor --accept {folder}"
    try:
        found = json_value(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror or problem}", hint=hint) from problem
    except (ValueError, RecursionError) as problem:
        raise DataError(f"{path} is damaged: it is not valid JSON", hint=hint) from problem
    sound = (
        isinstance(found, dict) and found and all(isinstance(each, str) and _DIGEST.fullmatch(each) for each in found.values())
    )
    if not sound:
        raise DataError(f"{path} is damaged: expected file names with their SHA-256 digests", hint=hint)
    return dict(found)


def known_checksums(folder: Path) -> dict[str, str]:
    """The digests of a folder's `checksums.json`; empty if it is damaged, so that it is replaced."""
    try:
        return read_checksums(folder)
    except DataError:
        return {}


def write_checksums(folder: Path, digests: Mapping[str, str]) -> None:
    """Write a folder's `checksums.json`, whole or not at all.

    Args:
        digests: hexadecimal SHA-256 by file name.

    Raises:
        OSError: the file cannot be written.
    """
    write_text(folder / CHECKSUMS_NAME, json.dumps(dict(sorted(digests.items())), indent=1) + "\n")


def record_checksums(folder: Path, names: Iterable[str]) -> None:
    """Add the current checksums of these files to a folder's `checksums.json`.

    Raises:
        OSError: a file cannot be read or written.
    """
    write_checksums(folder, known_checksums(folder) | {name: checksum(folder / name) for name in names})


def write_recorded(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write or replace files of a folder, each whole or not at all, and add them to its `checksums.json`.

    The old checksums are removed first: a process that is killed in between leaves files without a checksum rather than files
    that appear damaged.

    Args:
        files: content by file name; text becomes UTF-8.

    Raises:
        OSError: the file cannot be written.
    """
    contents = {
        name: content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
        for name, content in files.items()
    }
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    known = known_checksums(folder)
    forget_checksums(folder, [name for name, digest in digests.items() if known.get(name, digest) != digest])
    for name, content in contents.items():
        write_bytes(folder / name, content)
    write_checksums(folder, known | digests)


def forget_checksums(folder: Path, names: Iterable[str]) -> None:
    """Remove names from a folder's `checksums.json`, before the files are changed or deleted.

    Raises:
        OSError: the file cannot be written.
    """
    known = known_checksums(folder)
    rest = {name: digest for name, digest in known.items() if name not in set(names)}
    if rest == known:
        return
    if rest:
        write_checksums(folder, rest)
    else:  # an empty file would be reported as damaged
        (folder / CHECKSUMS_NAME).unlink(missing_ok=True)


def verify(path: Path, content: bytes | None = None, error: type[DiscernError] = DataError) -> None:
    """Compare a file with its checksum in `checksums.json`, if it has one.

    Args:
        content: the file's content, if it has been read already.
        error: class of the error to raise.

    Raises:
        DiscernError: the file has changed since it was written; of class `error`.
    """
    if not verification_is_on():
        return
    expected = read_checksums(path.parent).get(path.name)
    if expected is None:
        return
    found = hashlib.sha256(content).hexdigest() if content is not None else digest_of(path, error)
    if found != expected:
        raise error(
            f"{path} is damaged or was edited: its SHA-256 is {found[:12]}..., but {CHECKSUMS_NAME} has {expected[:12]}...",
            hint=f"copy or create it again; if it was edited on purpose, accept it: discern doctor --accept {path.parent}",
        )


def digest_of(path: Path, error: type[DiscernError] = DataError) -> str:
    """SHA-256 of a file, cached for as long as the file does not change.

    Raises:
        DiscernError: it cannot be read; of class `error`.
    """
    try:
        return cached_checksum(path)
    except OSError as problem:
        raise error(
            f"{path} cannot be read: {problem.strerror or problem}", hint="check the path and its permissions"
        ) from problem


def cached_checksum(path: Path) -> str:
    """SHA-256 of a file, cached as that of `digest_of`.

    Raises:
        OSError: it cannot be read.
    """
    before = _stamp(path)
    if before not in _hashed:
        kept = _recall(path, before)
        found = kept or checksum(path)
        if _settled(before, _TICK_NS):
            _hashed[before] = found
        if kept is None and before[2] >= _WORTH_REMEMBERING and _settled(before, _SETTLED_NS):
            _remember(path, before, found)
        return found
    return _hashed[before]


def _stamp(path: Path) -> tuple[int, ...]:
    """Device, inode, size and times of a file, which change when its content does."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _settled(stamp: tuple[int, ...], age: int) -> bool:
    """Whether a file was last written at least `age` nanoseconds ago, so that a later version has other times."""
    return time.time_ns() - max(stamp[3:]) > age


def _note(path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    return cache_folder() / _NOTES / f"{name[:32]}.json"


def _recall(path: Path, stamp: tuple[int, ...]) -> str | None:
    """The digest that was found in an earlier process, if the file is still the same."""
    if stamp[2] < _WORTH_REMEMBERING:
        return None
    with suppress(OSError, ValueError, TypeError, RuntimeError):
        kept = json_value(_note(path).read_bytes())
        if kept["stamp"] == list(stamp) and _DIGEST.fullmatch(kept["sha256"]):
            return str(kept["sha256"])
    return None


def _remember(path: Path, stamp: tuple[int, ...], digest: str) -> None:
    """Store the digest for later processes; failure to write it is ignored."""
    with suppress(OSError, RuntimeError):
        make_cache_folder(_NOTES)
        write_text(_note(path), json.dumps({"file": str(path.resolve()), "stamp": list(stamp), "sha256": digest}))
