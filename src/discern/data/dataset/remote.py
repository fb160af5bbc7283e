"""Data sets on servers and object stores, read through a cache of limited size on this machine.

The cache is the folder `data` in `discern.storage.checksums.cache_folder()`, with a folder for each version of each data set. The
manifest, the tokenizer and the counts are fetched when a data set is opened, and a file of a shard when it is first read. It is
compared with its checksum before it gets its name. Before a file is fetched, those that were used least recently, of any data
set, are removed until it fits; the size limits all processes of this machine together. A file that is removed while another
process reads it stays readable for that process until it needs the next file.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from discern.data.dataset.manifest import COUNTS_NAME, MANIFEST_NAME, TOKENIZER_NAME, FileInfo, ShardInfo, read_manifest
from discern.data.object_stores import AbsentError, shown
from discern.data.remote import joined, open_remote, read_whole, refuse_password
from discern.errors import ConfigError, DataError
from discern.storage.checksums import CHECKSUMS_NAME, cached_checksum, make_cache_folder, verification_is_on
from discern.storage.files import alone_in, cannot_write, create_held, release, sync_file, write_bytes

VARIABLE = "DISCERN_DATA_CACHE"
DEFAULT_SIZE = "64GB"
_CACHE = "data"
_USED = ".used"
_BLOCK_BYTES = 1 << 20
_NOTED_SECONDS = 0.1
_TIMES = 2
_ABANDONED_SECONDS = 24 * 3600
_SHARDS = ("train-*", "heldout-*")
_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMGT]?)B?", re.IGNORECASE)


def cache_size() -> int:
    """Bytes that the cache may hold: `DISCERN_DATA_CACHE`, or 64 GB.

    Raises:
        ConfigError: the variable is not a size.
    """
    text = os.environ.get(VARIABLE) or DEFAULT_SIZE
    found = _SIZE.fullmatch(text.strip())
    size = float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " ") if found else 0
    if size < 1:
        raise ConfigError(f"{VARIABLE} is {text!r}, expected a size", hint=f"for example: export {VARIABLE}=200GB")
    return int(size)


class RemoteFolder:
    """The files of a data set on a server or in an object store.

    Attributes:
        address: address of the data set.
        folder: folder on this machine with its manifest, tokenizer and counts, and the files that are in the cache.
    """

    def __init__(self, address: str, folder: Path) -> None:
        self.address = address
        self.folder = folder
        self._noted: dict[str, float] = {}
        self._maps: dict[str, np.memmap] = {}
        self._known: set[str] = set()  # compared with their checksums by this process

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_maps": {}}  # another process maps the files itself

    @classmethod
    def open(cls, address: str) -> RemoteFolder:
        """Fetch the manifest of a data set.

        Raises:
            ConfigError: the address contains a password, an optional package is missing, or the size of the cache is wrong.
            DataError: there is no data set, access is refused, or the cache cannot be written.
        """
        refuse_password(address)
        size = cache_size()
        try:
            content = read_whole(joined(address, MANIFEST_NAME))
        except AbsentError:
            raise DataError(
                f"{shown(address)} is not a data set: {MANIFEST_NAME} is missing",
                hint="check the address; a data set that is still being written has no manifest yet",
            ) from None
        version = hashlib.sha256(shown(address).encode() + b"\0" + content).hexdigest()[:32]
        try:
            folder = make_cache_folder(_CACHE) / version
            folder.mkdir(exist_ok=True)
            for name, current in ((MANIFEST_NAME, content), (CHECKSUMS_NAME, read_whole(joined(address, CHECKSUMS_NAME)))):
                if not (folder / name).is_file() or (folder / name).read_bytes() != current:
                    write_bytes(folder / name, current)
            manifest = read_manifest(folder)
            found = cls(address, folder)
            found._fetch_small(TOKENIZER_NAME)
            found.fetch(COUNTS_NAME, manifest.token_counts)
        except OSError as problem:
            raise cannot_write(make_cache_folder(_CACHE), problem) from problem
        largest = max((file.size for split in manifest.splits.values() for file in _files_of(split.shards)), default=0)
        if largest > size:
            raise ConfigError(
                f"the largest file of {shown(address)} has {largest:,} bytes, more than the cache may hold ({size:,})",
                hint=f"allow a larger cache: export {VARIABLE}={-(-largest // 10**9) + 1}GB",
            )
        return found

    def fetch(self, name: str, expected: FileInfo) -> Path:
        """The path of a file in the cache, which is fetched if it is not there.

        Raises:
            DataError: the file cannot be read, is not the one in the manifest, or the cache cannot be written.
        """
        path = self.folder / name
        try:
            if not _has(path, expected.size):
                partial = path.with_name(f".{name}.partial")
                opened = create_held(partial, path, wait=True)  # another process may fetch the same file
                try:
                    if not _has(path, expected.size):
                        with alone_in(self.folder.parent):
                            _make_room(self.folder.parent, expected.size, path)
                            os.ftruncate(opened, expected.size)  # counted by others from now on
                        self._arrive(joined(self.address, name), partial, opened, expected)
                        partial.rename(path)
                        self._known.add(name)
                finally:
                    release(opened, partial)
            self.note(name)
        except OSError as problem:
            raise cannot_write(path, problem) from problem
        return path

    def array(self, name: str, expected: FileInfo, dtype: np.dtype) -> np.memmap:
        """A file of a shard as an array, valid for as long as it is referred to.

        Raises:
            DataError: as for `fetch`.
        """
        array = self._maps.get(name)
        if array is None:
            array = self._maps[name] = self._mapped(name, expected, dtype)
            # Training and evaluation read in threads of their own, so that the other one may change the maps meanwhile.
            for other in [each for each in list(self._maps) if not (self.folder / each).exists()]:
                self._maps.pop(other, None)  # frees the space
        self.note(name)
        return array

    def _mapped(self, name: str, expected: FileInfo, dtype: np.dtype) -> np.memmap:
        while True:
            path = self.fetch(name, expected)
            try:
                if name not in self._known and verification_is_on() and cached_checksum(path) != expected.sha256:
                    path.unlink()  # damaged in the cache
                    continue
                self._known.add(name)
                return np.memmap(path, dtype=dtype, mode="r")
            except FileNotFoundError:  # another process needed the space
                continue
            except OSError as problem:
                reason = problem.strerror or problem
                raise DataError(f"{path} cannot be read: {reason}", hint="check its permissions, or delete it") from problem

    def note(self, name: str) -> None:
        """Note that a file was used now."""
        now = time.monotonic()
        if now - self._noted.get(name, -_NOTED_SECONDS) >= _NOTED_SECONDS:
            self._noted[name] = now
            with suppress(OSError):  # its own times stay as they are: they tell whether it was verified
                (self.folder / (name + _USED)).touch()

    def _fetch_small(self, name: str) -> None:
        if not (self.folder / name).is_file():
            write_bytes(self.folder / name, read_whole(joined(self.address, name)))

    def _arrive(self, address: str, partial: Path, opened: int, expected: FileInfo) -> None:
        """Receive a file. What arrives damaged is asked for once more."""
        for _ in range(_TIMES):
            digest, size = hashlib.sha256(), 0
            stream = open_remote(address)
            try:
                with open(opened, "wb", closefd=False) as file:
                    file.seek(0)
                    while data := stream.read(_BLOCK_BYTES):
                        file.write(data)
                        digest.update(data)
                        size += len(data)
                        if size > expected.size:
                            break
                    file.truncate()
                    sync_file(file)
            finally:
                stream.close()
            if (size, digest.hexdigest()) == (expected.size, expected.sha256):
                return
        raise DataError(
            f"{shown(address)} is damaged: {size:,} bytes of SHA-256 {digest.hexdigest()[:12]}... arrived, but the manifest has "
            f"{expected.size:,} of {expected.sha256[:12]}...",
            hint="write the data set there again: discern prepare INPUT --out ADDRESS --overwrite",
        )


def _has(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:  # asked only once: another process may remove it at any time
        return False


def _files_of(shards: tuple[ShardInfo, ...]) -> Iterator[FileInfo]:
    """The files of some shards."""
    for shard in shards:
        yield from shard.files.values()


def _arriving(cache: Path) -> int:
    """Bytes of the files that are being fetched. Those that a killed process left are removed after a day."""
    total = 0
    for path in (path for pattern in _SHARDS for path in cache.glob(f"*/.{pattern}.partial")):
        with suppress(OSError):  # it has arrived
            status = path.stat()
            if time.time() - status.st_mtime > _ABANDONED_SECONDS:
                path.unlink()
            else:
                total += status.st_size
    return total


def _make_room(cache: Path, size: int, wanted: Path) -> None:
    """Remove the files used least recently until `size` bytes fit. What is not of a shard stays: it is small."""
    held: list[tuple[float, int, Path]] = []
    left = cache_size() - size - _arriving(cache)
    for path in (path for pattern in _SHARDS for path in cache.glob(f"*/{pattern}")):
        if path.suffix == _USED or path == wanted:
            continue
        with suppress(OSError):  # another process removed it
            used = path.with_name(path.name + _USED)
            held.append(((used if used.exists() else path).stat().st_mtime, path.stat().st_size, path))
    total = sum(each for _, each, _ in held)
    for _, each, path in sorted(held):
        if total <= left:
            return
        path.unlink(missing_ok=True)
        path.with_name(path.name + _USED).unlink(missing_ok=True)
        total -= each
