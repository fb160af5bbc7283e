"""Inputs on servers and object stores: `http://`, `https://`, `s3://`, `gs://` and `hf://`.

A connection that breaks is opened again at the byte where it broke. An object that changes meanwhile is an error, because the
rest would not belong to the beginning. Messages contain neither credentials nor the text of errors of the libraries, which may.
"""

from __future__ import annotations

import glob
import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from discern.data.object_stores import (
    PACKAGES,
    AbsentError,
    StoreError,
    connection_hint,
    credentials_hint,
    explaining,
    file_system,
    open_object,
    reason_of,
    refused,
    remove_object,
    shown,
    version_of,
    write_object,
)
from discern.errors import ConfigError, DataError, DiscernError

_TRIES = 6
_FIRST_WAIT_SECONDS = 0.25
_TIMEOUT_SECONDS = 30
_PASSING = (408, 425, 429, 500, 502, 503, 504)
_HEADERS = {"User-Agent": "discern", "Accept-Encoding": "identity"}
_AS_THEY_ARE = "%/:?#[]@!$&'()*+,;=~"
"""Characters of an address that are not percent-encoded: those with a meaning, and `%`, which begins what is encoded already."""
_ADDRESS = re.compile(rf"(https?|{'|'.join(PACKAGES)}):/+(.+)", re.IGNORECASE | re.DOTALL)


def is_remote(text: str) -> bool:
    """Whether an input is the address of something on a server or in an object store."""
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme.lower() in ("http", "https", *PACKAGES)


def remote_address(folder: Path | str) -> str | None:
    """The address that the path of a folder stands for; None if the folder is on this machine.

    `Path` joins the two slashes of an address, which are restored here.
    """
    found = _ADDRESS.fullmatch(str(folder))
    if found is None or Path(folder).exists():
        return None
    return f"{found[1].lower()}://{found[2].rstrip('/')}"


def joined(address: str, name: str) -> str:
    """The address of a file in a folder. A query stays behind the path."""
    parts = urlsplit(address)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


def refuse_password(address: str) -> None:
    """Check that an address contains no user name and no password, which manifests and records of runs would keep.

    Raises:
        ConfigError: it does, or the name of its server is not valid.
    """
    try:
        parts = urlsplit(address)
    except ValueError:
        scheme = address.partition("://")[0]
        raise ConfigError(
            f"an input that begins with {scheme}:// is not an address: its server name has an unpaired bracket",
            hint=f"the form is {scheme}://SERVER/PATH",
        ) from None
    if parts.username or parts.password:
        raise ConfigError(
            f"the address of an input at {parts.hostname} contains a user name or a password, which the manifest would record",
            hint=credentials_hint(address),
        )


@dataclass(frozen=True)
class RemoteFile:
    """A file on a server or in an object store.

    Attributes:
        address: its address.
        size: size in bytes; None if unknown.
        version: ETag or time of the last change, as the server gives it; None if it gives neither.
    """

    address: str
    size: int | None
    version: str | None


def remote_files(address: str) -> Iterator[RemoteFile]:
    """The files of an address: itself, or what is below it or matches its pattern.

    Raises:
        ConfigError: the address contains a password, or an optional package is missing.
        DataError: nothing is there, access is refused, or the server does not answer.
    """
    refuse_password(address)
    parts = urlsplit(address)
    if parts.scheme.lower() in ("http", "https"):
        yield remote_file(address)
        return
    system, path = file_system(address)
    with explaining(address):
        if glob.has_magic(path):
            found = {name: info for name, info in system.glob(path, detail=True).items() if info["type"] == "file"}
        else:
            found = system.find(path, detail=True)
        files = [
            RemoteFile(f"{parts.scheme}://{name}", info.get("size"), version_of(info))
            # Of a single object, some libraries list the name only.
            for name, info in ((name, found[name] or system.info(name)) for name in sorted(found))
            if _is_visible(name, path)
        ]
    if not files:
        raise AbsentError(f"there is nothing at {shown(address)}", hint="check the address; quote a pattern for the shell")
    yield from files


def remote_file(address: str) -> RemoteFile:
    """Size and version of a file, as far as the server reports them.

    Raises:
        ConfigError, DataError: as for `remote_files`.
    """
    if urlsplit(address).scheme.lower() in ("http", "https"):
        return _file_on_server(address)
    system, path = file_system(address)
    with explaining(address):
        system.invalidate_cache()
        info = system.info(path)
    return RemoteFile(address, info.get("size"), version_of(info))


def open_remote(address: str) -> ResumingStream:
    """The bytes of an address.

    Raises:
        DataError: it does not exist, access is refused, or the server does not answer.
        ConfigError: an optional package is missing.
    """
    if urlsplit(address).scheme.lower() in ("http", "https"):
        return ResumingStream(shown(address), _Server(address).open)
    return ResumingStream(shown(address), open_object(address))


def read_whole(address: str) -> bytes:
    """The content of a small file.

    Raises:
        ConfigError, DataError: as for `open_remote`.
    """
    stream, content = open_remote(address), bytearray()
    try:
        while data := stream.read(1 << 20):
            content += data
    finally:
        stream.close()
    return bytes(content)


def write_remote(address: str, content: Path | bytes) -> None:
    """Write a file to an object store, whole or not at all; tried again if the connection breaks.

    Raises:
        ConfigError: an optional package is missing.
        DataError: access is refused, or the connection breaks again and again.
    """
    expected = len(content) if isinstance(content, bytes) else content.stat().st_size

    def write() -> None:
        found = write_object(address, content)
        if found not in (None, expected):
            raise StoreError(f"it has {found:,} bytes of {expected:,}")

    _repeated(address, "written", write)


def remove_remote(address: str) -> None:
    """Remove a file from an object store, if it exists.

    Raises:
        ConfigError, DataError: as for `write_remote`.
    """
    _repeated(address, "removed", lambda: remove_object(address))


def _repeated(address: str, done: str, act: Callable[[], None]) -> None:
    for _ in _tries():
        try:
            act()
            return
        except StoreError as problem:
            reason = str(problem)
    raise DataError(f"{shown(address)} cannot be {done}: {reason}, {_TRIES} times in a row", hint=connection_hint(address))


def _tries() -> Iterator[None]:
    """Six tries, with growing waits between them."""
    for failures in range(_TRIES):
        if failures:
            time.sleep(_FIRST_WAIT_SECONDS * 2 ** (failures - 1))
        yield


class ResumingStream:
    """A stream that continues where a broken connection ended.

    Args:
        name: name for messages.
        open_at: opens a connection at an offset; returns it with the size of the whole, or None if that is unknown.
    """

    def __init__(self, name: str, open_at: Callable[[int], tuple[Any, int | None]]) -> None:
        self._name = name
        self._open_at = open_at
        self._position = 0
        self._failures = 0
        self._connection: Any = None
        self._size: int | None = None

    def read(self, size: int = -1, /) -> bytes:
        """Up to `size` bytes; empty only at the end.

        Raises:
            DataError: the connection breaks again and again.
        """
        while True:
            try:
                if self._connection is None:
                    self._connection, self._size = self._open_at(self._position)
                data: bytes = self._connection.read(size)
                if data or self._size is None or self._position >= self._size:
                    self._position += len(data)
                    self._failures = 0
                    return data
                reason = "the connection ended early"
            except http.client.IncompleteRead as problem:
                if problem.partial:
                    self._position += len(problem.partial)
                    self.close()
                    return problem.partial
                reason = "the connection ended early"
            except DiscernError:
                raise
            except Exception as problem:  # the libraries of object stores have errors of their own, which may hold a key
                reason = reason_of(problem)
            self._wait(reason)

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            with suppress(Exception):
                self._connection.close()
        self._connection = None

    def _wait(self, reason: str) -> None:
        self.close()
        self._failures += 1
        if self._failures >= _TRIES:
            of = f" of {self._size:,}" if self._size is not None else ""
            raise DataError(
                f"{self._name} cannot be read beyond byte {self._position:,}{of}: {reason}, {_TRIES} times in a row",
                hint=connection_hint(self._name),
            )
        time.sleep(_FIRST_WAIT_SECONDS * 2 ** (self._failures - 1))


class _Server:
    """A file on a web server."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._version: str | None = None

    def open(self, offset: int) -> tuple[Any, int | None]:
        headers = _HEADERS | ({"Range": f"bytes={offset}-"} if offset else {})
        response = _answer(self._address, "GET", headers)
        version = _version_in(response.headers)
        if offset and version != self._version:
            raise DataError(f"{shown(self._address)} changed while it was read", hint="run the same command again")
        self._version = version
        length = response.headers.get("Content-Length")
        size = int(length) if length is not None and length.isdecimal() else None
        if response.status == 206:
            return response, None if size is None else offset + size
        left = offset  # the server knows no ranges
        try:
            while left and (skipped := response.read(min(left, 1 << 20))):
                left -= len(skipped)
        except http.client.IncompleteRead:
            pass  # its bytes come before the offset
        if left:
            response.close()
            raise ConnectionError("the connection ended early")
        return response, size


def _version_in(headers: Message) -> str | None:
    """What tells the version of a file from others: its ETag, or when it was modified."""
    return headers.get("ETag") or headers.get("Last-Modified")


def _answer(address: str, method: str, headers: dict[str, str]) -> Any:
    """The response of a server.

    Raises:
        DataError: the file does not exist, or access is refused.
        OSError: the server does not answer, or asks to come again later.
    """
    try:
        request = urllib.request.Request(_quoted(address), headers=headers, method=method)
        return urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as problem:
        problem.close()
        code = problem.code
    except (ValueError, http.client.InvalidURL):
        raise ConfigError(f"{shown(address)} is not an address", hint="the form is https://SERVER/PATH") from None
    if code in _PASSING:
        raise StoreError(f"the server answers {code}")
    if code in (401, 403):
        raise refused(address)
    if code in (404, 410):
        raise AbsentError(f"{shown(address)} does not exist: the server answers {code}", hint="check the address")
    raise DataError(f"{shown(address)} cannot be read: the server answers {code}", hint="check the address")


def _quoted(address: str) -> str:
    """An address as it is sent: spaces and letters beyond ASCII are percent-encoded, except for what is encoded already.

    Raises:
        ValueError: the name of the server is not valid.
    """
    parts = urlsplit(address)
    server = parts.netloc if parts.netloc.isascii() else parts.netloc.encode("idna").decode()
    path, query = (quote(part, safe=_AS_THEY_ARE) for part in (parts.path, parts.query))
    return urlunsplit((parts.scheme, server, path, query, ""))


def _file_on_server(address: str) -> RemoteFile:
    """Size and version of a file, if the server tells them without sending the file."""
    # Tried again: without its version, the file would seem to be another one than when the server was less busy.
    for _ in _tries():
        try:
            with _answer(address, "HEAD", _HEADERS) as response:
                length = response.headers.get("Content-Length")
                size = int(length) if length is not None and length.isdecimal() else None
                return RemoteFile(address, size, _version_in(response.headers))
        except AbsentError:
            raise
        except DataError:
            break  # an address may be signed for reading only
        except StoreError:
            continue
        except (OSError, http.client.HTTPException) as problem:
            reason = getattr(problem, "reason", None) or problem
            raise DataError(
                f"{urlsplit(address).netloc} does not answer: {type(reason).__name__}", hint="check the address and the network"
            ) from None
    return RemoteFile(address, None, None)


def _is_visible(name: str, top: str) -> bool:
    """Whether no part of a path below the top begins with a dot."""
    below = name[len(top) :] if name.startswith(top) else name.rsplit("/", 1)[-1]
    return not any(part.startswith(".") for part in below.split("/"))
