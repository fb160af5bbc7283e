"""SHA-256 checksums of the files that discern writes, compared when the files are read.

A folder stores the checksums of its files in `checksums.json`, which maps file names to hexadecimal digests; those of the shards
of a data set are in its manifest. Every file that is read again has an entry. Only the logs of a run have none while it writes
them; they get one when it ends. A folder that discern did not write has no `checksums.json`, and its files are not compared.

While a file is replaced, its entry is `OLD|NEW`, and both contents are accepted; an empty digest stands for no file. Wherever a
process is killed, the folder is as good as before or after.

A small file is hashed each time it is read, from the bytes that were read. A large file is hashed at its first use in a process,
and the result is cached outside the folder for as long as size, inode and times of the file stay the same: a data set of 100 GB
is hashed once per machine, not at every start.

`DISCERN_VERIFY=0` in the environment disables verification.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from discern.errors import DataError, DiscernError
from discern.parsing import json_value
from discern.storage.files import replacing_file, write_bytes, write_text

CHECKSUMS_NAME = "checksums.json"
VARIABLE = "DISCERN_VERIFY"
_NOTES = "verified"
_LFS_POINTER = b"version https://git-lfs"
_ENTRY = re.compile(r"(|[0-9a-f]{64})(\|(|[0-9a-f]{64}))*")
_RECORDS = {
    "run.json": b"",
    "finetuned.json": b"",
    "scores.json": b"",
    "pretraining.json": b"",
    "comparison.json": b"",
    "manifest.json": b'"discern-data"',
    "config.json": b'"discern"',
}
"""Files that only a folder of discern contains, or contains with these bytes."""
# Hashing this many bytes takes about 20 ms, so caching the result for smaller files is not worthwhile.
_WORTH_REMEMBERING = 1 << 24
# A file that is written twice within one tick of the file system's clock has the same times before and after.
_SETTLED_NS = 2_000_000_000
_hashed: dict[tuple[int, ...], str] = {}


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
    hint = f"copy the folder again, or accept its files as they are: discern doctor --accept {folder}"
    try:
        found = json_value(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as problem:
        raise DataError(f"{path} cannot be read: {problem.strerror or problem}", hint=hint) from problem
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(isinstance(each, str) and _ENTRY.fullmatch(each) for each in found.values()):
        raise DataError(f"{path} is damaged: expected a JSON object of file names with their SHA-256 digests", hint=hint)
    return found


def known_checksums(folder: Path) -> dict[str, str]:
    """The entries of a folder's `checksums.json`; empty if it is damaged."""
    try:
        return read_checksums(folder)
    except DataError:
        return {}


def has_file(folder: Path, name: str) -> bool:
    """Whether a folder has a file, or has lost it: `checksums.json` lists the file."""
    return (folder / name).is_file() or "" not in known_checksums(folder).get(name, "").split("|")


def write_checksums(folder: Path, digests: Mapping[str, str]) -> None:
    """Write a folder's `checksums.json`, whole or not at all.

    Args:
        digests: hexadecimal SHA-256 by file name.

    Raises:
        OSError: the file cannot be written.
    """
    write_text(folder / CHECKSUMS_NAME, json.dumps(digests, indent=1, sort_keys=True) + "\n")


def record_checksums(folder: Path, names: Iterable[str]) -> None:
    """Add the current checksums of these files to a folder's `checksums.json`.

    Raises:
        DataError: `checksums.json` is damaged.
        OSError: a file cannot be read or written.
    """
    _update(folder, {name: checksum(folder / name) for name in names})


@contextmanager
def recording(folder: Path, digests: Mapping[str, str]) -> Iterator[None]:
    """Files of a folder are replaced in the block, by contents with these checksums. Until its end, both contents are accepted.

    Raises:
        DataError: `checksums.json` is damaged.
        OSError: it cannot be written.
    """

    known = read_checksums(folder)
    both = {name: "|".join(dict.fromkeys([*known.get(name, "").split("|"), new])) for name, new in digests.items()}
    _update(folder, both)
    yield
    _update(folder, digests)


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
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
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
    forget_checksums(paths[0].parent, [path.name for path in paths])
    for path in paths:
        path.unlink(missing_ok=True)


def forget_checksums(folder: Path, names: Iterable[str]) -> None:
    """Remove names from a folder's `checksums.json`, before the files are deleted or appended to.

    Raises:
        DataError: `checksums.json` is damaged.
        OSError: it cannot be written.
    """
    gone = set(names) & read_checksums(folder).keys()
    if gone:
        _update(folder, dict.fromkeys(gone))


def _update(folder: Path, changes: Mapping[str, str | None]) -> None:
    """Change entries of `checksums.json`; None removes one. Another process that does the same waits."""
    with replacing_file(folder / CHECKSUMS_NAME, wait=True) as file:
        entries = {**read_checksums(folder), **changes}
        kept = {name: entry for name, entry in entries.items() if entry is not None}
        file.write(f"{json.dumps(kept, indent=1, sort_keys=True)}\n".encode())


def verify(path: Path, content: bytes | None = None, error: type[DiscernError] = DataError, *, log: bool = False) -> None:
    """Compare a file with its checksum in `checksums.json`, unless discern did not write the folder.

    Args:
        content: the file's content, if it has been read already.
        error: class of the error to raise.
        log: whether the file may have no checksum yet, because it is appended to.

    Raises:
        DiscernError: the file has changed since it was written, or its checksum is missing, or it is the pointer that Git LFS
            leaves in place of a file; of class `error`.
    """
    begin = content or b""
    if content is None:
        with suppress(OSError), path.open("rb") as file:  # what cannot be read is an error of the reader
            begin = file.read(len(_LFS_POINTER))
    if begin.startswith(_LFS_POINTER):
        raise error(f"{path} is a Git LFS pointer, which stands for the file", hint="download the file: git lfs pull")
    if not verification_is_on():
        return
    folder = path.parent
    hint = f"copy or create it again; if it was edited on purpose, accept it: discern doctor --accept {folder}"
    known = read_checksums(folder)
    if path.name in known:
        expected = known[path.name].split("|")
        found = hashlib.sha256(content).hexdigest() if content is not None else digest_of(path, error)
        if found not in expected:
            raise error(
                f"{path} is damaged or was edited: its SHA-256 is {found[:12]}..., but {CHECKSUMS_NAME} has "
                f"{expected[-1][:12]}...",
                hint=hint,
            )
    elif not log and (known or is_recorded(folder)):
        raise error(f"{path} has no checksum in {folder / CHECKSUMS_NAME}, which is missing or incomplete", hint=hint)


def lost_files(folder: Path) -> list[str]:
    """The files in a folder's `checksums.json` that are missing; none if verification is off.

    Raises:
        DataError: `checksums.json` is damaged.
    """
    if not verification_is_on():
        return []
    return [name for name in read_checksums(folder) if not (folder / name).is_file() and has_file(folder, name)]


def verify_folder(folder: Path) -> None:
    """Compare every file in a folder's `checksums.json` with its checksum.

    Raises:
        DataError: a file has changed since it was written, or is missing.
    """
    for name in lost_files(folder):
        hint = f"copy it back, or remove {folder} to make it again"
        raise DataError(f"{folder / name} is missing, which {CHECKSUMS_NAME} lists", hint=hint)
    for name in read_checksums(folder):
        if (folder / name).is_file():
            verify(folder / name)


def is_recorded(folder: Path) -> bool:
    """Whether discern wrote a folder, which lacks its `checksums.json`."""
    for name, mark in _RECORDS.items():
        with suppress(OSError):
            content = (folder / name).read_bytes()
            if mark in content and b'"transformers_version"' not in content:  # transformers keeps our entry in what it saves
                return True
    return f"{folder.name}/{CHECKSUMS_NAME}" in known_checksums(folder.parent)


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
    # Device, inode, size and times change when the content does
    status = path.stat()
    stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if stamp in _hashed:
        return _hashed[stamp]

    # Read the digest that an earlier process found, or compute it
    digest = None
    if status.st_size >= _WORTH_REMEMBERING:
        with suppress(OSError, ValueError, TypeError, RuntimeError):
            *known, found = json_value(_note(path).read_bytes())
            digest = str(found) if known == list(stamp) else None
    is_new = digest is None
    digest = digest or checksum(path)
    if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
        _hashed[stamp] = digest
        if is_new and status.st_size >= _WORTH_REMEMBERING:
            with suppress(OSError, RuntimeError):  # the cache cannot be written
                make_cache_folder(_NOTES)
                write_text(_note(path), json.dumps([*stamp, digest]))
    return digest


def _note(path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    return cache_folder() / _NOTES / f"{name[:32]}.json"


class Record(BaseModel):
    """The required keys of a JSON object. Other keys are kept and not checked."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


def read_text(path: Path, *, hint: str, error: type[DiscernError] = DataError) -> str:
    """Read a text file, and compare it with its checksum if there is one.

    Raises:
        DiscernError: the file cannot be read, does not match its checksum, or is not UTF-8; of class `error`.
    """
    try:
        content = path.read_bytes()
    except OSError as problem:
        reason = "is missing" if isinstance(problem, FileNotFoundError) else f"cannot be read: {problem.strerror or problem}"
        raise error(f"{path} {reason}", hint=hint) from problem
    verify(path, content, error)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{path} is damaged: it is not UTF-8 text (byte {problem.start})", hint=hint) from problem


def read_lines(path: Path, *, hint: str) -> list[str]:
    """The lines of JSON lines, as `read_text` reads them. Texts in them may have other line breaks, such as U+2028.

    Raises:
        DataError: as for `read_text`.
    """
    text = read_text(path, hint=hint)
    return text.removesuffix("\n").split("\n") if text else []


def parse_json(text: str, path: Path, *, hint: str, error: type[DiscernError] = DataError) -> Any:
    """Parse a JSON text.

    Args:
        path: file that the text comes from, for messages.

    Raises:
        DiscernError: the text is not valid JSON; of class `error`.
    """
    try:
        return json_value(text)
    except JSONDecodeError as problem:
        where = f"line {problem.lineno}, column {problem.colno}"
        raise error(f"{path} is damaged: it is not valid JSON ({problem.msg} at {where})", hint=hint) from problem


def read_object(path: Path, *, hint: str, error: type[DiscernError] = DataError) -> dict[str, Any]:
    """Read a JSON object with any keys.

    Raises:
        DiscernError: the file is missing or damaged, or is not a JSON object; of class `error`.
    """
    return read_record(path, Record, hint=hint, error=error)


def read_record(
    path: Path, form: type[Record], *, hint: str, version: int | None = None, error: type[DiscernError] = DataError
) -> dict[str, Any]:
    """Read a JSON object, and check that it has the required keys.

    Args:
        form: the required keys.
        version: version of the format, under the key `format`; None if the file has no such key.

    Raises:
        DiscernError: the file is missing or damaged, of another version, or lacks a key; of class `error`.
    """
    found: Any = parse_json(read_text(path, hint=hint, error=error), path, hint=hint, error=error)
    if not isinstance(found, dict):
        raise error(f"{path} is damaged: it is not a JSON object", hint=hint)
    if version is not None and "format" in found and found["format"] != version:
        raise error(f"{path} has format {found['format']!r}; this version of discern reads {version}", hint=hint)
    with understood(path, hint=hint, error=error):
        form.model_validate(found)
    return found


@contextmanager
def understood(path: Path | str, *, hint: str, error: type[DiscernError] = DataError) -> Iterator[None]:
    """Report errors in the block as damage of the file from which it builds something.

    Raises:
        DiscernError: something in the file is missing or invalid; of class `error`.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as problem:
        if isinstance(problem, ValidationError):
            reason = reasons(problem)
        else:
            reason = f"it has no {problem}" if isinstance(problem, KeyError) else " ".join(str(problem).split())
        raise error(f"{path} is damaged: {reason}", hint=hint) from problem


def reasons(problem: ValidationError) -> str:
    """The first error of pydantic, on one line."""
    first = problem.errors(include_url=False)[0]
    place, said = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"'{place}' is missing"
    return f"'{place}': {said[:1].lower()}{said[1:]}" if place else said
