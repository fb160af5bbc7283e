"""Object stores: `s3://` by pyarrow; `gs://` and `hf://` by the file systems of fsspec.

Messages contain neither credentials nor the text of errors of the libraries, which may.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from discern.errors import ConfigError, DataError

PACKAGES = {"s3": "pyarrow", "gs": "gcsfs", "hf": "huggingface_hub"}
"""The package that each scheme needs beside fsspec."""

_LOOKED_AT: dict[str, tuple[tuple[str, ...], tuple[str, str]]] = {
    "s3": (
        ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
    ),
    "gs": ((), ("GOOGLE_APPLICATION_CREDENTIALS", "~/.config/gcloud/application_default_credentials.json")),
    "hf": (("HF_TOKEN",), ("HF_TOKEN_PATH", "~/.cache/huggingface/token")),
}
"""Where the credentials of each scheme come from: variables, and the variable and the usual path of a file."""

_CREDENTIALS = {
    "s3": "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=..., or export AWS_PROFILE=NAME; for a server of your own also "
    "export AWS_ENDPOINT_URL=https://SERVER",
    "gs": "gcloud auth application-default login, or export GOOGLE_APPLICATION_CREDENTIALS=FILE.json",
    "hf": "hf auth login, or export HF_TOKEN=..., and accept the terms of the repository on its page",
    "http": "the address may need a signature in its query, or may have expired",
}
_BLOCK_BYTES = 1 << 23
_S3_ERROR = re.compile(r"AWS Error (UNKNOWN \(HTTP status \d+\)|[A-Z_]+)")
_REFUSALS = ("ACCESS_DENIED", "SIGNATURE", "ACCESS_KEY", "TOKEN", "CREDENTIAL", "AUTH", "HTTP status 401", "HTTP status 403")
_ABSENCES = ("NO_SUCH_", "NOT_FOUND", "HTTP status 404")
_IN_WORDS = {
    "NETWORK_CONNECTION": "the server does not answer",
    "REQUEST_TIMEOUT": "the server does not answer in time",
    "SLOW_DOWN": "the server is busy",
    "THROTTLING": "the server is busy",
    "SERVICE_UNAVAILABLE": "the server is not available",
    "INTERNAL_FAILURE": "the server failed",
    "REQUEST_TIME_TOO_SKEWED": "the clock of this machine and that of the server differ",
}


class AbsentError(DataError):
    """Nothing is at an address."""


class StoreError(ConnectionError):
    """A request that failed although it may succeed when it is repeated. The text is the kind of the error."""


def shown(text: str) -> str:
    """An input as messages and the manifest show it: without the query of an address, which may be a signature."""
    parts = urlsplit(text) if "://" in text else None
    is_address = parts is not None and parts.scheme.lower() in ("http", "https", *PACKAGES)
    return urlunsplit(parts._replace(query="", fragment="")) if parts is not None and is_address else text


def credentials_hint(address: str) -> str:
    """Where the credentials for an address were looked for, and how they are given. Shows no values."""
    scheme = urlsplit(address).scheme.lower()
    hint = _CREDENTIALS.get(scheme, _CREDENTIALS["http"])
    if scheme not in _LOOKED_AT:
        return hint
    variables, (elsewhere, usual) = _LOOKED_AT[scheme]
    file = Path(os.environ.get(elsewhere) or usual)
    found = [f"{name} is {'set' if os.environ.get(name) else 'not set'}" for name in variables]
    with suppress(RuntimeError):  # this user has no home
        file = file.expanduser()
    return f"{hint}. {', '.join(found)}{', ' if found else ''}{file} {'exists' if file.is_file() else 'does not exist'}"


def connection_hint(address: str) -> str:
    """What to check if the server of an address does not answer. Shows no password."""
    endpoint = _endpoint() if urlsplit(address).scheme.lower() == "s3" else None
    where = f", and AWS_ENDPOINT_URL, which is {shown(endpoint).rpartition('@')[2]}" if endpoint else ""
    return f"check the address and the network{where}; then run the same command again"


def refused(address: str) -> DataError:
    """The error of missing or wrong credentials."""
    return DataError(f"access to {shown(address)} is refused: credentials are missing or wrong", hint=credentials_hint(address))


def file_system(address: str) -> tuple[Any, str]:
    """The file system of an address, with the methods of fsspec, and the path in it.

    Raises:
        ConfigError: an optional package is missing.
        DataError: the file system cannot be used.
    """
    scheme = urlsplit(address).scheme.lower()
    try:
        with explaining(address):
            if scheme == "s3":
                path = address.partition("://")[2]
                return _s3(path.partition("/")[0]), path
            from fsspec.core import url_to_fs

            system, path = url_to_fs(address)
            return system, str(path)
    except ImportError:
        raise ConfigError(
            f"{scheme}:// needs the packages fsspec and {PACKAGES[scheme]}", hint="pip install 'discern-nlp[remote]'"
        ) from None


_VERSION_KEYS = ("ETag", "etag", "blob_id", "LastModified", "last_modified", "mtime", "updated", "created")


def version_of(info: dict[str, Any]) -> str | None:
    """What distinguishes the version of an object from others, as its store lists it: ETag, hash, or time of the last change."""
    found = next((info[key] for key in _VERSION_KEYS if info.get(key)), None)
    if isinstance(found, int | float):  # some libraries list a time as a number, and describe a single object with a date
        found = datetime.fromtimestamp(found, UTC)
    if isinstance(found, datetime):
        found = (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC).isoformat()
    return None if found is None else str(found)


def open_object(address: str) -> Callable[[int], tuple[Any, int | None]]:
    """A function that opens an object at an offset, and returns it with its size. An object that has changed is an error.

    Raises:
        ConfigError: an optional package is missing.
        DataError: the file system cannot be used.
    """
    system, path = file_system(address)
    version: str | None = None

    def open_at(offset: int) -> tuple[Any, int | None]:
        nonlocal version
        with explaining(address, passing=True):
            file = _Blocks(system, path, offset)
            found = file.version
        if offset and found != version:
            raise DataError(f"{shown(address)} changed while it was read", hint="run the same command again")
        version = found
        return file, file.size

    return open_at


def write_object(address: str, content: Path | bytes) -> int | None:
    """Write an object, whole or not at all; returns its size as the store reports it.

    Raises:
        StoreError: the store does not answer, or stops in the middle.
        DataError: access is refused.
    """
    system, path = file_system(address)
    with explaining(address, passing=True):
        if isinstance(content, bytes):
            system.pipe_file(path, content)
        else:
            # `put_file` also makes an object for the folder, which some stores refuse.
            with content.open("rb") as source, system.open(path, "wb") as target:
                shutil.copyfileobj(source, target, _BLOCK_BYTES)
        system.invalidate_cache()
        size = system.info(path)["size"]
        return None if size is None else int(size)


def remove_object(address: str) -> None:
    """Remove an object, if it exists.

    Raises:
        StoreError: the store does not answer.
        DataError: access is refused.
    """
    system, path = file_system(address)
    with explaining(address, passing=True):
        try:
            system.rm_file(path)
        except FileNotFoundError:
            return


class _Blocks:
    """An open object, read in blocks: each read of most libraries is a request."""

    def __init__(self, system: Any, path: str, offset: int) -> None:
        system.invalidate_cache()
        own: Any = getattr(system, "fs", None)
        if hasattr(own, "open_input_file"):  # an S3FileSystem of pyarrow
            self._file = own.open_input_file(path)
            self.size: int | None = self._file.size()
            self.version = str(sorted(self._file.metadata().items()))
        else:
            self._file = system.open(path, "rb", block_size=_BLOCK_BYTES, cache_type="readahead")
            self.size = self._file.size
            self.version = str(system.ukey(path))
        self._file.seek(offset)
        self._unread = memoryview(b"")

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes, or a block; empty only at the end."""
        if not self._unread:
            self._unread = memoryview(self._file.read(_BLOCK_BYTES))
        data = self._unread if size < 0 else self._unread[:size]
        self._unread = self._unread[len(data) :]
        return bytes(data)

    def close(self) -> None:
        """End the connection."""
        self._file.close()


@lru_cache(maxsize=8)
def _s3(bucket: str) -> Any:
    """The file system of a bucket. pyarrow reads the usual variables and files, and needs no botocore."""
    from fsspec.implementations.arrow import ArrowFSWrapper
    from pyarrow.fs import S3FileSystem, resolve_s3_region

    options: dict[str, str] = {}
    if endpoint := _endpoint():
        options["endpoint_override"] = endpoint
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if not region and not endpoint:
        region = resolve_s3_region(bucket)
    if region:
        options["region"] = region

    class Bucket(ArrowFSWrapper):  # type: ignore[misc]
        """Names below a folder. fsspec treats a folder that cannot be listed as empty, and would leave out its files."""

        def walk(
            self, path: str, maxdepth: int | None = None, topdown: bool = True, on_error: Any = "omit", **kwargs: Any
        ) -> Any:
            return super().walk(path, maxdepth, topdown, on_error=_unless_absent, **kwargs)

    # Folders are only prefixes of names; buckets are made by their owner.
    return Bucket(S3FileSystem(**options))


def _unless_absent(problem: OSError) -> None:
    if not isinstance(problem, FileNotFoundError | NotADirectoryError):
        raise problem


class explaining:  # noqa: N801 (used like a function)
    """Turns errors of the libraries of object stores into errors without the text of the original, which may hold a key.

    Args:
        address: the address for messages.
        passing: whether to raise `StoreError` where another try may succeed.
    """

    def __init__(self, address: str, *, passing: bool = False) -> None:
        self._address = address
        self._passing = passing

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: object) -> None:
        if not isinstance(problem, Exception) or isinstance(problem, DataError | ConfigError | ImportError):
            return
        name = _kind_of(problem)
        if "NO_SUCH_BUCKET" in name:
            raise DataError(
                f"there is no bucket {urlsplit(self._address).netloc}", hint="check the address, or create the bucket first"
            ) from None
        if isinstance(problem, FileNotFoundError) or any(each in name for each in _ABSENCES):
            is_hub = urlsplit(self._address).scheme.lower() == "hf"  # which does not show a private repository to others
            private = f"; if the repository is private: {credentials_hint(self._address)}" if is_hub else ""
            raise AbsentError(f"there is nothing at {shown(self._address)}", hint=f"check the address{private}") from None
        words = ("Credential", "Token", "Auth", "Gated", *_REFUSALS)
        if isinstance(problem, PermissionError) or any(word in name for word in words):
            raise refused(self._address) from None
        if self._passing:
            raise StoreError(reason_of(problem)) from None
        raise DataError(
            f"{shown(self._address)} cannot be read: {reason_of(problem)}", hint=connection_hint(self._address)
        ) from None


def reason_of(problem: Exception) -> str:
    """The kind of an error in words, without its text."""
    kind = _kind_of(problem)
    return _IN_WORDS.get(kind, kind)


def _kind_of(problem: Exception) -> str:
    if isinstance(problem, StoreError):
        return str(problem)
    code = _S3_ERROR.search(str(problem))
    return code[1] if code else type(problem).__name__


def _endpoint() -> str | None:
    """The address of an S3 server that is not Amazon's."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
