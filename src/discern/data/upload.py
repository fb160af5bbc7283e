"""Data sets that are written to an object store: made on this machine, then uploaded, the manifest last."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from discern.data.dataset.manifest import MANIFEST_NAME, TOKENIZER_NAME, Manifest, read_manifest
from discern.data.dataset.publish import files_of, is_own_name
from discern.data.object_stores import shown
from discern.data.remote import joined, read_whole, refuse_password, remote_files, remove_remote, write_remote
from discern.data.reports import PrepareReport
from discern.errors import ConfigError, DataError, DiscernError
from discern.progress import Progress
from discern.storage.checksums import CHECKSUMS_NAME, make_cache_folder
from discern.storage.files import cannot_write, write_bytes
from discern.storage.output import listed

UNFINISHED = "unfinished"
"""An object that exists while a data set is written: creating it shows at the beginning whether this account may write."""

_OUTGOING = "outgoing"


def uploaded(address: str, make: Callable[[Path], PrepareReport], *, overwrite: bool, progress: Progress) -> PrepareReport:
    """Make a data set on this machine, and upload it. No command accepts it before its manifest is there, which comes last.

    Args:
        address: address of the data set: `s3://`, `gs://` or `hf://`.
        make: prepares the data set in a folder, in which an existing data set has its manifest.
        overwrite: replace another data set.

    Raises:
        ConfigError: the address cannot be written to, or holds something else.
        DataError: access is refused or the connection breaks again and again, after which the data set stays on this machine.
    """
    refuse_password(address)
    if urlsplit(address).scheme in ("http", "https"):
        raise ConfigError(
            f"{shown(address)} cannot be written: web servers are read only",
            hint="give a folder, or an address of an object store: s3://, gs:// or hf://",
        )
    there = _names(address)
    if foreign := sorted(name for name in there if name != UNFINISHED and not is_own_name(name)):
        raise ConfigError(f"{address} contains {listed(foreign)}, which do not belong to a data set", hint="give another --out")
    existing = read_whole(joined(address, MANIFEST_NAME)) if MANIFEST_NAME in there else None
    try:
        folder = make_cache_folder(_OUTGOING) / hashlib.sha256(address.encode()).hexdigest()[:32] / PurePosixPath(address).name
        shutil.rmtree(folder, ignore_errors=True)
        if existing is not None and not overwrite:
            write_bytes(_made(folder) / MANIFEST_NAME, existing)
            if CHECKSUMS_NAME in there:
                write_bytes(folder / CHECKSUMS_NAME, read_whole(joined(address, CHECKSUMS_NAME)))
            before = read_manifest(folder)
    except OSError as problem:
        raise cannot_write(make_cache_folder(_OUTGOING), problem) from problem
    write_remote(joined(address, UNFINISHED), b"")  # refused before any work if credentials do not suffice
    try:
        try:
            report = make(folder)
        except DiscernError as problem:
            if existing is not None or not there:
                with suppress(DiscernError):
                    remove_remote(joined(address, UNFINISHED))
            raise type(problem)(
                problem.message.replace(str(folder), address),
                hint=problem.hint.replace(str(folder), address) if problem.hint else problem.hint,
            ) from problem
        own = [*files_of(report.manifest), TOKENIZER_NAME, CHECKSUMS_NAME, MANIFEST_NAME]
        differing = _differing(report.manifest, before, there) if existing is not None and not overwrite else own
        _upload(address, folder, differing, [name for name in there if name not in own], progress)
    except DataError as problem:
        if (folder / MANIFEST_NAME).is_file() and (folder / TOKENIZER_NAME).is_file():
            progress.note(f"the data set is complete in {folder}: you can copy it by hand, {MANIFEST_NAME} last")
        raise problem
    shutil.rmtree(folder.parent, ignore_errors=True)
    # A manifest that is written again records a new overlap; nothing was damaged.
    repaired = (
        () if existing is None or overwrite else tuple(name for name in differing if name not in (CHECKSUMS_NAME, MANIFEST_NAME))
    )
    return replace(report, folder=address, unchanged=existing is not None and not overwrite and not repaired, repaired=repaired)


def _names(address: str) -> dict[str, int | None]:
    """Names and sizes of what is below an address; empty if there is nothing."""
    try:
        found = list(remote_files(joined(address, "")))
    except DataError as problem:
        if not problem.message.startswith("there is nothing at"):
            raise
        return {}
    top = f"{address}/"
    return {each.address.removeprefix(top): each.size for each in found}


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _differing(made: Manifest, before: Manifest, there: dict[str, int | None]) -> list[str]:
    """The files of an existing data set that are missing or of the wrong size, or record something new."""
    names = [name for name, file in files_of(made).items() if there.get(name) != file.size]
    names += [TOKENIZER_NAME] if TOKENIZER_NAME not in there else []
    names += [MANIFEST_NAME] if before.overlap != made.overlap else []
    return [*names, *([CHECKSUMS_NAME] if names else [])]


def _upload(address: str, folder: Path, names: list[str], foreign: list[str], progress: Progress) -> None:
    """Upload files of a data set. What is there is no data set while its files are replaced.

    Args:
        foreign: names of what is there and does not belong to the data set. It is removed if the manifest is replaced.
    """
    if MANIFEST_NAME in names:
        remove_remote(joined(address, MANIFEST_NAME))
        for name in foreign:
            if name != UNFINISHED:
                remove_remote(joined(address, name))
    sizes = {name: (folder / name).stat().st_size for name in names}
    progress.start("uploading", sum(sizes.values()), "bytes")
    try:
        for name in sorted(names, key=lambda name: name == MANIFEST_NAME):
            write_remote(joined(address, name), folder / name)
            progress.advance(sizes[name])
    finally:
        progress.finish()
    remove_remote(joined(address, UNFINISHED))
