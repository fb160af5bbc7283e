"""SHA-256 checksums of the files that discern writes, compared when the files are read.

A folder stores the checksums of its files in `checksums.json`, which maps file names to hexadecimal digests; those of the shards
of a data set are in its manifest. The logs of a run get their entries when it ends. A file without an entry is not compared, nor
are those of a folder without `checksums.json`, which discern did not write.

While a file is replaced, its entry is `OLD|NEW`, and both contents are accepted; nothing before `|` stands for no file. Wherever
a process is killed, the folder is as good as before or after.

A small file is hashed each time it is read, from the bytes that were read. The digest of a large file is cached outside the
folder for as long as size, inode and times of the file stay the same: a data set of 100 GB is hashed once per machine, not at
every start.

`DISCERN_VERIFY=0` in the environment disables verification.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from discern.errors import DataError, DiscernError
from discern.parsing import json_value
from discern.storage.files import replacing_file, write_bytes, write_text

CHECKSUMS_NAME = "checksums.json"
VARIABLE = "DISCERN_VERIFY"
_LFS_POINTER = b"version https://git-lfs"
_ENTRY = re.compile(r"(\|?[0-9a-f]{64})+")
# Hashing this many bytes takes about 20 ms, so caching the result for smaller files is not worthwhile.
_WORTH_REMEMBERING = 1 << 24


def verification_is_on() -> bool:
    """Whether files are compared with their checksums."""
    return os.environ.get(VARIABLE) != "0"


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
    """Read the entries of a folder's `checksums.json`, by file name; empty if there is no such file.

    Raises:
        DataError: it is damaged.
    """
    path = folder / CHECKSUMS_NAME
    if not path.is_file():
        return {}
    with understood(path, hint=f"copy the folder again, or accept its files as they are: discern doctor --accept {folder}"):
        found = json_value(path.read_bytes())
        if not isinstance(found, dict) or not all(isinstance(each, str) and _ENTRY.fullmatch(each) for each in found.values()):
            raise ValueError("expected a JSON object of file names with their SHA-256 digests")
        return found


def known_checksums(folder: Path) -> dict[str, str]:
    """The entries of a folder's `checksums.json`; empty if it is damaged."""
    try:
        return read_checksums(folder)
    except DataError:
        return {}


def has_file(folder: Path, name: str) -> bool:
    """Whether a folder has a file, or has lost it: `checksums.json` lists the file."""
    return (folder / name).is_file() or not known_checksums(folder).get(name, "|").startswith("|")


def update_checksums(folder: Path, changes: Mapping[str, str | None], *, new: bool = False) -> None:
    """Change entries of a folder's `checksums.json`. Another process that does the same waits.

    Args:
        changes: hexadecimal SHA-256 by file name; None removes an entry, before the file is deleted or appended to.
        new: whether to leave out all other entries, which may be damaged.

    Raises:
        DataError: `checksums.json` is damaged.
        OSError: it cannot be read or written.
    """
    with replacing_file(folder / CHECKSUMS_NAME, wait=True) as file:
        entries = {**({} if new else read_checksums(folder)), **changes}
        kept = {name: entry for name, entry in entries.items() if entry is not None}
        file.write(f"{json.dumps(kept, indent=1, sort_keys=True)}\n".encode())


def record_checksums(folder: Path, names: Iterable[str]) -> None:
    """Add the current checksums of these files to a folder's `checksums.json`.

    Raises:
        DataError: `checksums.json` is damaged.
        OSError: a file cannot be read or written.
    """
    update_checksums(folder, {name: checksum(folder / name) for name in names})


@contextmanager
def recording(folder: Path, digests: Mapping[str, str]) -> Iterator[None]:
    """Files of a folder are replaced in the block, by contents with these checksums. Until its end, both contents are accepted.

    Raises:
        DataError: `checksums.json` is damaged.
        OSError: it cannot be written.
    """
    known = read_checksums(folder)
    update_checksums(folder, {name: f"{known.get(name, '')}|{digest}" for name, digest in digests.items()})
    yield
    update_checksums(folder, digests)


def write_recorded(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write or replace files of a folder, each whole or not at all, and record their checksums.

    Args:
        files: content by file name; text becomes UTF-8.

    Raises:
        DataError: `checksums.json` is damaged.
        OSError: a file cannot be written.
    """
    contents = {
        name: content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
        for name, content in files.items()
    }
    with recording(folder, {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}):
        for name, content in contents.items():
            write_bytes(folder / name, content)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all, and record its checksum."""
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    write_recorded(path.parent, {path.name: text})


def write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines, whole or not at all, and record its checksum."""
    text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write_recorded(path.parent, {path.name: text})


def remove_recorded(paths: Sequence[Path]) -> None:
    """Delete files of one folder, and their entries in its `checksums.json`; those that do not exist are skipped.

    Raises:
        DataError: `checksums.json` is damaged.
        OSError: a file cannot be deleted.
    """
    update_checksums(paths[0].parent, {path.name: None for path in paths})
    for path in paths:
        path.unlink(missing_ok=True)


def verify(path: Path, content: bytes | None = None, error: type[DiscernError] = DataError) -> None:
    """Compare a file with its checksum in `checksums.json`, if it has one.

    Args:
        content: the file's content, if it has been read already.
        error: class of the error to raise.

    Raises:
        DiscernError: the file cannot be read, has changed since it was written, or is the pointer that Git LFS leaves in place of
            a file; of class `error`.
    """
    hint = f"copy or create it again; if it was edited on purpose, accept it: discern doctor --accept {path.parent}"
    with understood(path, hint=hint, error=error):
        begin = content
        if begin is None:
            with path.open("rb") as file:
                begin = file.read(len(_LFS_POINTER))
        if begin.startswith(_LFS_POINTER):
            raise error(f"{path} is a Git LFS pointer, which stands for the file", hint="download the file: git lfs pull")
        expected = read_checksums(path.parent).get(path.name) if verification_is_on() else None
        if expected is None:
            return
        found = cached_checksum(path) if content is None else hashlib.sha256(content).hexdigest()
        if found not in expected.split("|"):
            raise error(
                f"{path} is damaged or was edited: its SHA-256 is {found[:12]}..., but {CHECKSUMS_NAME} has "
                f"{expected[-64:][:12]}...",
                hint=hint,
            )


def lost_files(folder: Path) -> list[str]:
    """The files in a folder's `checksums.json` that are missing; none if verification is off.

    Raises:
        DataError: `checksums.json` is damaged.
    """
    known = read_checksums(folder) if verification_is_on() else {}
    return [name for name, entry in known.items() if not (folder / name).is_file() and not entry.startswith("|")]


def verify_folder(folder: Path) -> None:
    """Compare every file in a folder's `checksums.json` with its checksum.

    Raises:
        DataError: a file has changed since it was written, or is missing.
    """
    for name in read_checksums(folder):
        if has_file(folder, name):
            verify(folder / name)


def cached_checksum(path: Path) -> str:
    """SHA-256 of a file, cached for as long as the file does not change.

    Raises:
        OSError: it cannot be read.
    """
    status = path.stat()
    if status.st_size < _WORTH_REMEMBERING:
        return checksum(path)

    # Device, inode, size and times change when the content does
    stamp = repr((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    name = hashlib.sha256(stamp.encode()).hexdigest()
    with suppress(OSError, ValueError, RuntimeError):
        if _ENTRY.fullmatch(found := (cache_folder() / "verified" / name).read_text()):
            return found
    found = checksum(path)
    with suppress(OSError, RuntimeError):  # the cache cannot be written
        write_text(make_cache_folder("verified") / name, found)
    return found


class Record(BaseModel):
    """The required keys of a JSON object. Other keys are kept and not checked."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


@contextmanager
def understood(path: Path | str, *, hint: str, error: type[DiscernError] = DataError) -> Iterator[None]:
    """Report errors in the block as damage of the file from which it builds something.

    Raises:
        DiscernError: the file cannot be read, or something in it is missing or invalid; of class `error`.
    """
    try:
        yield
    except OSError as problem:
        reason = "is missing" if isinstance(problem, FileNotFoundError) else f"cannot be read: {problem.strerror or problem}"
        raise error(f"{path} {reason}", hint=hint) from problem
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as problem:
        reason = " ".join(str(problem).split())
        if isinstance(problem, ValidationError):
            first = problem.errors(include_url=False)[0]
            place, said = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
            missing = first["type"] == "missing"
            reason = f"'{place}' is missing" if missing else f"'{place}': {said[:1].lower()}{said[1:]}" if place else said
        elif isinstance(problem, KeyError):
            reason = f"it has no {problem}"
        raise error(f"{path} is damaged: {reason}", hint=hint) from problem


def read_text(path: Path, *, hint: str, error: type[DiscernError] = DataError) -> str:
    """Read a text file, and compare it with its checksum if there is one.

    Raises:
        DiscernError: the file cannot be read, does not match its checksum, or is not UTF-8; of class `error`.
    """
    with understood(path, hint=hint, error=error):
        content = path.read_bytes()
        verify(path, content, error)
        return content.decode()


def read_lines(path: Path, *, hint: str) -> list[Any]:
    """Read a file of JSON lines.

    Raises:
        DataError: as for `read_text`, or a line is not JSON.
    """
    with understood(path, hint=hint):
        # Texts in a line may have other line breaks, such as U+2028.
        return [json_value(line) for line in read_text(path, hint=hint).split("\n") if line]


def read_json(
    path: Path, form: type[Record] = Record, *, hint: str, version: int | None = None, error: type[DiscernError] = DataError
) -> dict[str, Any]:
    """Read a JSON object, and check that it has the required keys.

    Args:
        form: the required keys.
        version: version of the format, under the key `format`; None if the file has no such key.

    Raises:
        DiscernError: the file is missing or damaged, of another version, or lacks a key; of class `error`.
    """
    with understood(path, hint=hint, error=error):
        found = json_value(read_text(path, hint=hint, error=error))
        if not isinstance(found, dict):
            raise TypeError("it is not a JSON object")
        if version is not None and found.get("format", version) != version:
            raise error(f"{path} has format {found['format']!r}; this version of discern reads {version}", hint=hint)
        form.model_validate(found)
    return found
