"""Files on servers and in object stores: connections that break, changes, refusals."""

from __future__ import annotations

import gzip
import random
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat
from typing import Any, ClassVar

import pytest

from discern.data import remote
from discern.data.remote import ResumingStream, is_remote, joined, read_whole, remote_address, remote_file, remote_files, shown
from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import CorpusOptions
from discern.errors import ConfigError, DataError, DiscernError
from tests.data.small_text import made_up, plain, read

CONTENT = random.Random(0).randbytes(3_000_000)
DOCUMENTS = made_up(40)


class _Fragile(BaseHTTPRequestHandler):
    """A server that breaks off after 1 MB, and refuses some paths."""

    requests: ClassVar[list[tuple[str, int]]] = []
    ranges = True
    versions: Iterator[str] = repeat("one")
    statuses: Iterator[int] = repeat(200)

    def do_GET(self) -> None:
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        self.requests.append((self.path, begin))
        name = self.path[1:].partition("?")[0]
        status = {"secret": 403, "none": 404, "busy": 503}.get(name) or next(self.statuses)
        content = {"text.gz": gzip.compress(plain(DOCUMENTS).encode())}.get(name, CONTENT)[begin if self.ranges else 0 :]
        self.send_response(206 if begin and self.ranges else status)
        self.send_header("Content-Length", str(len(content) if status == 200 else 0))
        self.send_header("ETag", next(self.versions))
        self.end_headers()
        if status == 200:
            self.wfile.write(content[: 1_000_000 if self.ranges or not begin else None])

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(remote, "_WAITS", [0.0] * 6)
    monkeypatch.setattr(_Fragile, "requests", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), _Fragile) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_that_breaks_is_resumed(server: str, monkeypatch: pytest.MonkeyPatch, ranges: bool) -> None:
    monkeypatch.setattr(_Fragile, "ranges", ranges)
    assert read_whole(f"{server}/file") == CONTENT
    begins = [begin for _, begin in _Fragile.requests]
    assert begins[0] == 0
    assert begins == sorted(set(begins))


def test_a_file_that_changes_is_not_mixed(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Fragile, "versions", iter(["first", "second"]))
    with pytest.raises(DataError, match="changed while it was read"):
        read_whole(f"{server}/file")


def test_text_on_a_server(server: str) -> None:
    address = f"{server}/text.gz?Signature=s3cr3t a"
    assert read(address) == DOCUMENTS
    assert _Fragile.requests[-1][0] == "/text.gz?Signature=s3cr3t+a"
    (found,) = Corpus([address], CorpusOptions()).inputs
    assert (found.name, found.version, found.now()) == (f"{server}/text.gz", "one", found)
    assert remote_file(f"{server}/file").size == len(CONTENT)


def test_a_server_that_is_busy_is_asked_again(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Fragile, "statuses", iter([503, 429, 200]))
    assert remote_file(f"{server}/file").version == "one"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("{server}/secret?Signature=s3cr3t", r"access to http://\S+/secret is refused: credentials are missing or wrong"),
        ("{server}/none?Signature=s3cr3t", r"there is nothing at http://\S+/none"),
        ("{server}/busy?Signature=s3cr3t", r"http://\S+/busy cannot be reached: status 503, 6 times in a row"),
        ("http://127.0.0.1:1/text?Signature=s3cr3t", "cannot be reached: ClientConnectorError, 6 times in a row"),
        ("http://example:port/text", "cannot be reached: ValueError"),
        ("http://me:s3cr3t@example.org/text", "contains a user name or a password"),
    ],
)
def test_refusals_show_no_secret(server: str, address: str, says: str) -> None:
    with pytest.raises(DiscernError, match=says) as raised:
        read(address.format(server=server))
    assert "s3cr3t" not in f"{raised.value} {raised.value.__cause__}"
    assert raised.value.hint


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(ConfigError, match=r"https:// needs optional packages\n.*discern-nlp\[remote\]"):
        read("https://example.org/text")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An object store in memory in place of Google's."""
    memory = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem

    class Store(memory):
        protocol = "gs"
        store: ClassVar[dict[str, Any]] = {}

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return memory._strip_protocol(path.removeprefix("gs:/"))

    monkeypatch.setattr(remote, "_WAITS", [0.0] * 6)
    monkeypatch.setattr("fsspec.filesystem", lambda *_, **__: Store())
    return Store()


def test_an_object_store(store: Any) -> None:
    for name in ("b.txt", "a.txt", ".hidden", "more/c.txt", "more/.d/e.txt"):
        store.pipe(f"/bucket/{name}", name.encode())
    everything = ["a.txt", "b.txt", "more/c.txt"]
    for pattern, expected in (("", everything), ("*.txt", everything[:2]), ("*/?.txt", everything[2:]), (".hidden", [".hidden"])):
        assert [file.address.partition("/bucket/")[2] for file in remote_files(f"gs://bucket/{pattern}")] == expected
    stream = ResumingStream("gs://bucket/a.txt")
    assert stream.read(2) + stream.read() == b"a.txt"
    stream.close()


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (PermissionError("AKIAS3CR3T"), "export GOOGLE_APPLICATION_CREDENTIALS=FILE.json"),
        (OSError("Forbidden: AKIAS3CR3T"), "credentials are missing or wrong"),
        (type("HttpError", (Exception,), {"code": 401})("AKIAS3CR3T"), "credentials are missing or wrong"),
        (type("DefaultCredentialsError", (Exception,), {})("AKIAS3CR3T"), "credentials are missing or wrong"),
        (FileNotFoundError("AKIAS3CR3T"), r"nothing at gs://+bucket/x"),
        (RuntimeError("AKIAS3CR3T"), "cannot be reached: RuntimeError, 6 times in a row"),
    ],
)
def test_errors_of_the_libraries_are_not_shown(
    problem: Exception, says: str, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise problem

    store.pipe("/bucket/x", b"0123456789")
    for step in ("find", "info", "open"):
        with monkeypatch.context() as patched:
            patched.setattr(type(store), step, fail)
            with pytest.raises(DataError, match=says) as raised:
                read("gs://bucket/x")
        assert "AKIA" not in f"{raised.value} {raised.value.__cause__}"


def test_addresses() -> None:
    assert shown("https://a.org/b?token=c#d") == "https://a.org/b"
    assert shown("text?.txt") == "text?.txt"
    assert joined("https://a.org/b/?token=c", "d") == "https://a.org/b/d?token=c"
    assert remote_address("s3:/bucket/a/") == "s3://bucket/a"
    assert remote_address("/tmp") is None
    assert not is_remote("s3")
