"""Data sets on servers and in object stores: read through a cache of limited size on this machine, and uploaded.

The cache is the folder `data` in `discern.storage.checksums.cache_folder()`, with a folder for each version of each data set. A
file of a shard is fetched when it is first used, and compared with its checksum before it gets its name. Its folder `NAME.used`
is the lock of the processes that fetch it, holds what has arrived, and tells when the file was last used. Before a file is
fetched, those that were used least recently, of any data set, are removed until it fits. A file that is removed while another
process reads it stays readable for that process until it needs the next file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import ByteSize, TypeAdapter, ValidationError

from discern.data.dataset.manifest import COUNTS_NAME, MANIFEST_NAME, TOKENIZER_NAME, FileInfo
from discern.data.dataset.publish import is_own_name
from discern.data.remote import (
    AbsentError,
    ResumingStream,
    joined,
    read_whole,
    remote_files,
    remove_remote,
    shown,
    write_remote,
)
from discern.errors import ConfigError, DataError, DiscernError
from discern.progress import Progress
from discern.storage.checksums import CHECKSUMS_NAME, cached_checksum, make_cache_folder
from discern.storage.files import alone_in, sync_file, write_bytes

if TYPE_CHECKING:
    from discern.data.prepare import PrepareReport

_VARIABLE = "DISCERN_DATA_CACHE"


def cache_size() -> int:
    """Bytes that the cache may hold: `DISCERN_DATA_CACHE`, or 64 GB.

    Raises:
        ConfigError: the variable is not a size.
    """
    text = os.environ.get(_VARIABLE) or "64GB"
    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        raise ConfigError(f"{_VARIABLE} is {text!r}, expected a size", hint=f"for example: export {_VARIABLE}=200GB") from None


@dataclass(frozen=True)
class RemoteFolder:
    """The files of a data set on a server or in an object store.

    Attributes:
        address: address of the data set.
        folder: folder on this machine with its manifest, tokenizer and counts, and the files that are in the cache.
    """

    address: str
    folder: Path

    @classmethod
    def open(cls, address: str) -> RemoteFolder:
        """Fetch the manifest, the tokenizer and the counts of a data set.

        Raises:
            ConfigError: the address contains a password, or an optional package is missing.
            DataError: there is no data set, or access is refused.
            OSError: the cache cannot be written.
        """
        manifest = read_whole(joined(address, MANIFEST_NAME))
        version = hashlib.sha256(shown(address).encode() + manifest).hexdigest()[:32]
        folder = make_cache_folder("data") / version
        folder.mkdir(exist_ok=True)
        write_bytes(folder / MANIFEST_NAME, manifest)
        for name in (CHECKSUMS_NAME, TOKENIZER_NAME, COUNTS_NAME):
            write_bytes(folder / name, read_whole(joined(address, name)))
        return cls(address, folder)

    def fetch(self, name: str, expected: FileInfo) -> Path:
        """The path of a file in the cache, which is fetched if it is not there or is damaged.

        Raises:
            ConfigError: `cache_size` is wrong.
            DataError: it cannot be read, or is not the one in the manifest.
            OSError: the cache cannot be written.
        """
        path, used, cache = self.folder / name, self.folder / f"{name}.used", self.folder.parent
        partial, address = used / "partial", joined(self.address, name)
        used.mkdir(exist_ok=True)
        os.utime(used)
        with alone_in(used):
            while True:
                with suppress(FileNotFoundError):
                    if cached_checksum(path) == expected.sha256:
                        return path

                # Keep the files used last that fit beside this one. Those that are arriving or were abandoned count.
                RemoteFolder.array.cache_clear()  # removed files keep their space while they are mapped
                with alone_in(cache):
                    left = cache_size() - expected.size
                    for other in sorted(cache.glob("*/*.used"), key=os.path.getmtime, reverse=True):
                        for file in (other.with_suffix(""), other / "partial"):
                            with suppress(FileNotFoundError):
                                left -= file.stat().st_size
                                if left < 0:
                                    file.unlink()
                    target = partial.open("wb")
                    target.truncate(expected.size)

                with target, closing(ResumingStream(address)) as source:
                    shutil.copyfileobj(source, target, 1 << 20)
                    sync_file(target)
                with suppress(FileNotFoundError):  # another process needed the space
                    if (found := cached_checksum(partial)) != expected.sha256:
                        raise DataError(
                            f"{shown(address)} is damaged: its SHA-256 is {found[:12]}..., but the manifest has "
                            f"{expected.sha256[:12]}...",
                            hint="write the data set there again: discern prepare INPUT --out ADDRESS --overwrite",
                        )
                    partial.rename(path)
                    return path

    @cache  # noqa: B019 (a process opens few data sets)
    def array(self, name: str, expected: FileInfo, dtype: np.dtype) -> np.memmap:
        """A file of a shard as an array, valid for as long as it is referred to. Raises as `fetch`."""
        while True:
            with suppress(FileNotFoundError):  # another process needed the space
                return np.memmap(self.fetch(name, expected), dtype=dtype, mode="r")


def uploaded(address: str, make: Callable[[Path], PrepareReport], *, overwrite: bool, progress: Progress) -> PrepareReport:
    """Make a data set on this machine, and upload it. The remote data set is invalid until its manifest arrives, which is last.

    Args:
        address: address of the data set: `s3://`, `gs://` or `hf://`.
        make: prepares the data set in a folder, in which an existing data set has its manifest.
        overwrite: replace another data set.

    Raises:
        ConfigError: the address cannot be written to, or holds something else.
        DataError: access is refused or the connection breaks again and again, after which the data set stays on this machine.
    """
    if address.startswith("http"):
        raise ConfigError(
            f"{shown(address)} cannot be written: web servers are read only",
            hint="give a folder, or an address of an object store: s3://, gs:// or hf://",
        )
    there = set[str]()
    with suppress(AbsentError):
        there = {file.address.removeprefix(f"{address}/") for file in remote_files(address)}
    if foreign := sorted(name for name in there if name != "unfinished" and not is_own_name(name)):
        raise ConfigError(
            f"{address} contains {', '.join(foreign)}, which do not belong to a data set", hint="give another --out"
        )

    # An existing data set is represented by its manifest: `make` refuses other settings and other text.
    outgoing = make_cache_folder("outgoing")
    folder = outgoing / hashlib.sha256(address.encode()).hexdigest()
    shutil.rmtree(folder, ignore_errors=True)
    exists = MANIFEST_NAME in there and not overwrite
    if exists:
        folder.mkdir()
        for name in (MANIFEST_NAME, CHECKSUMS_NAME):
            write_bytes(folder / name, read_whole(f"{address}/{name}"))

    # Refused before any work if the credentials do not suffice.
    write_bytes(outgoing / "unfinished", b"")
    write_remote(f"{address}/unfinished", outgoing / "unfinished")
    remove_remote(f"{address}/unfinished")
    try:
        report = make(folder)
    except DiscernError as problem:
        problem.message = problem.message.replace(str(folder), address)
        raise

    # An existing data set gets the files that are missing, and the record of what was found in it.
    if not exists:
        for name in (MANIFEST_NAME, *there):
            remove_remote(f"{address}/{name}")
        there.clear()
    missing = tuple(name for name in (*report.manifest.files, TOKENIZER_NAME) if name not in there)
    progress.note(f"the data set is complete in {folder}, and is now uploaded to {address}")
    progress.start("uploading", len(missing) + 2, "files")
    for name in (*missing, CHECKSUMS_NAME, MANIFEST_NAME):
        write_remote(f"{address}/{name}", folder / name)
        progress.advance(1)
    progress.finish()
    shutil.rmtree(folder, ignore_errors=True)
    return replace(report, folder=address, unchanged=exists and not missing, repaired=missing if exists else ())
