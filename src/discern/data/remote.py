"""Files on servers and in object stores: `http://`, `https://`, `s3://`, `gs://` and `hf://`, by the file systems of fsspec.

A request that fails is repeated, and a file is read on at the byte where its connection broke. What an error means follows from
its class or its HTTP status. Messages contain neither queries nor the text of errors of the libraries, which may hold a key.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from discern.errors import ConfigError, DataError, DiscernError

_Result = TypeVar("_Result")
_WAITS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each try of a request."""
_TIMEOUT_SECONDS = 30
_BLOCK_BYTES = 1 << 23
_SIGNATURE = "the address may need a signature in its query, or may have expired"
_CREDENTIALS = {
    "http": _SIGNATURE,
    "https": _SIGNATURE,
    "s3": "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=..., or export AWS_PROFILE=NAME; for a server of your own also "
    "export AWS_ENDPOINT_URL=https://SERVER",
    "gs": "gcloud auth application-default login, or export GOOGLE_APPLICATION_CREDENTIALS=FILE.json",
    "hf": "hf auth login, or export HF_TOKEN=..., and accept the terms of the repository on its page",
}
"""How the credentials of each scheme are given."""
_STATUSES = {"FileNotFoundError": 404, "PermissionError": 403, "NoCredentialsError": 403, "DefaultCredentialsError": 403}
"""HTTP status that an error of a library stands for, by the name of its class: the libraries need not be installed."""
_VERSIONS = ("ETag", "Etag", "etag", "blob_id", "xet_hash", "Last-Modified", "mtime")
"""Keys under which servers and stores give what distinguishes the versions of a file."""


class AbsentError(DataError):
    """Nothing is at an address."""


def is_remote(text: str) -> bool:
    """Whether an input is the address of something on a server or in an object store."""
    return text.startswith(tuple(f"{scheme}://" for scheme in _CREDENTIALS))


def shown(text: str) -> str:
    """An input as messages and the manifest show it: without the query of an address, which may be a signature."""
    return text.partition("?")[0] if is_remote(text) else text


def remote_address(folder: Path | str) -> str | None:
    """The address that the path of a folder stands for; None if the folder is on this machine."""
    # `Path` joins the two slashes of an address.
    address = re.sub(r"^(\w+):/+", r"\1://", str(folder)).rstrip("/")
    return address if is_remote(address) else None


def joined(address: str, name: str) -> str:
    """The address of a file in a folder. A query stays behind the path."""
    path, mark, query = address.partition("?")
    return f"{path.rstrip('/')}/{name}{mark}{query}"


@dataclass(frozen=True)
class RemoteFile:
    """A file on a server or in an object store.

    Attributes:
        address: its address.
        size: size in bytes; None if unknown.
        version: ETag, hash or time of the last change, as the server gives it; None if it gives none.
    """

    address: str
    size: int | None
    version: str | None

    @classmethod
    def of(cls, address: str, info: dict[str, Any]) -> RemoteFile:
        """A file as a file system of fsspec describes it."""
        return cls(address, info.get("size"), next((str(info[key]) for key in _VERSIONS if info.get(key)), None))


def remote_files(address: str) -> list[RemoteFile]:
    """The files of an address: itself, or what is below it or matches its pattern.

    Raises:
        ConfigError: the address contains a password, or an optional package is missing.
        DataError: nothing is there, access is refused, or the server does not answer.
    """

    def find(system: Any, path: str) -> list[RemoteFile]:
        from fsspec.utils import glob_translate

        fixed = re.split(r"[*?\[]", path)[0]
        top = path if fixed == path else fixed.rpartition("/")[0]
        # `find` lists everything below in one go. `glob` leaves out folders that cannot be listed, without an error.
        return [
            RemoteFile.of(system.unstrip_protocol(name), info)
            for name, info in sorted(system.find(top, detail=True).items())
            # Without hidden files, and empty objects that stand for folders.
            if not re.search(r"/\.|/$", name.removeprefix(top)) and (fixed == path or re.match(glob_translate(path), name))
        ]

    files = [remote_file(address)] if address.startswith("http") else _retried(address, find)
    if not files:
        raise AbsentError(f"there is nothing at {shown(address)}", hint="check the address; quote a pattern for the shell")
    return files


def remote_file(address: str) -> RemoteFile:
    """Size and version of a file, as far as the server reports them. Raises as `remote_files`."""
    with closing(ResumingStream(address)) as stream:
        return _retried(address, stream.connect)


def read_whole(address: str) -> bytes:
    """The content of a small file. Raises as `remote_files`."""
    with closing(ResumingStream(address)) as stream:
        return b"".join(iter(stream.read, b""))


def write_remote(address: str, source: Path) -> None:
    """Write a file to an object store, whole or not at all. Raises as `remote_files`."""
    _retried(address, lambda system, path: system.put_file(str(source), path))


def remove_remote(address: str) -> None:
    """Remove a file from an object store, if it exists. Raises as `remote_files`."""
    with suppress(AbsentError):
        _retried(address, lambda system, path: system.rm_file(path))


class ResumingStream:
    """The bytes of an address, which is opened when it is first read, and read on where its connection broke."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._position = 0
        self._version: str | None = None
        self._file: Any = None

    def read(self, size: int = _BLOCK_BYTES, /) -> bytes:
        """Up to `size` bytes; empty only at the end.

        Raises:
            ConfigError, DataError: as `remote_files`, or the file has changed since its beginning was read.
        """

        def request(system: Any, path: str) -> bytes:
            if self._file is None:
                self.connect(system, path)
            file, self._file = self._file, None  # opened again after an error
            data: bytes = file.read(size)
            self._file = file
            if not data and not self._address.startswith("http"):
                self.connect(system, path)  # each block was a request of its own, and the last ones may be of another version
            return data

        data = _retried(self._address, request)
        self._position += len(data)
        return data

    def close(self) -> None:
        """End the connection."""
        if self._file is not None:
            self._file.close()

    def connect(self, system: Any, path: str) -> RemoteFile:
        """Open the file at the current position."""
        left = 0
        if self._address.startswith("http"):
            # A stream (`block_size=0`): the size may be unknown (1 avoids a request for it), and the server may have no ranges.
            headers = {"Range": f"bytes={self._position}-"} if self._position else {}
            file = system.open(path, block_size=0, size=1, headers=headers)
            info = {**file.r.headers, "size": file.r.content_length}
            left = 0 if file.r.status == 206 else self._position
        else:
            info = system.info(path)
            file = system.open(path, block_size=_BLOCK_BYTES, cache_type="readahead")
            file.seek(self._position)
        found = RemoteFile.of(self._address, info)
        if self._position and found.version != self._version:
            raise DataError(f"{shown(self._address)} changed while it was read", hint="run the same command again")
        while left and (data := file.read(left)):
            left -= len(data)
        self._file, self._version = file, found.version
        return found


def _retried(address: str, request: Callable[[Any, str], _Result]) -> _Result:
    """The result of a request to the file system of an address. It is repeated with growing waits while its error may pass."""
    scheme, _, server = address.split("/")[:3]
    scheme = scheme.rstrip(":")
    credentials = _CREDENTIALS[scheme]
    if "@" in server:
        raise ConfigError(
            f"an address of {scheme}:// contains a user name or a password, which the manifest would record", hint=credentials
        )
    system = _file_system(scheme)
    for wait in _WAITS:
        time.sleep(wait)
        try:
            system.invalidate_cache()
            return request(system, system._strip_protocol(address))
        except DiscernError:
            raise
        except Exception as problem:
            kind = type(problem).__name__
            response = getattr(problem, "response", None)  # of huggingface_hub; that of botocore is a dictionary
            status = getattr(problem, "status", None) or getattr(problem, "code", None) or getattr(response, "status_code", None)
            reason = f"status {status}" if status else kind
            status = status or _STATUSES.get(kind)
            if scheme == "gs" and kind == "OSError":  # how gcsfs reports status 403
                status = 403
        if status in (401, 403):
            system.clear_instance_cache()  # it remembers the credentials
            raise DataError(f"access to {shown(address)} is refused: credentials are missing or wrong", hint=credentials)
        if status in (404, 410):
            raise AbsentError(f"there is nothing at {shown(address)}", hint=f"check the address; if it is private: {credentials}")
    raise DataError(
        f"{shown(address)} cannot be reached: {reason}, {len(_WAITS)} times in a row",
        hint="check the address, the network and, for s3://, AWS_ENDPOINT_URL; then run the same command again",
    )


def _file_system(scheme: str) -> Any:
    try:
        import fsspec

        if scheme == "s3":
            return fsspec.filesystem(scheme, config_kwargs={"retries": {"total_max_attempts": 1}})  # requests are repeated here
        if not scheme.startswith("http"):
            return fsspec.filesystem(scheme)
        from aiohttp import ClientTimeout

        client = {
            "headers": {"Accept-Encoding": "identity"},
            "auto_decompress": False,
            "timeout": ClientTimeout(sock_connect=_TIMEOUT_SECONDS, sock_read=_TIMEOUT_SECONDS),
            "trust_env": True,
        }
        return fsspec.filesystem(scheme, client_kwargs=client)
    except ImportError:
        hint = "pip install 'discern-nlp[remote]', and for gs:// also gcsfs"
        raise ConfigError(f"{scheme}:// needs optional packages", hint=hint) from None
