"""Text on servers: connections that break, ranges, refusals, and object stores by fsspec."""

from __future__ import annotations

import gzip
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from discern.data.dataset.build import BuildOptions
from discern.data.object_stores import credentials_hint
from discern.data.prepare import prepare, prepare_part
from discern.data.remote import open_remote, remote_files, shown
from discern.data.sources import remote
from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import CorpusOptions
from discern.data.stages import plan as planning
from discern.data.stages.plan import read_plan
from discern.data.stages.tasks import perform
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import ConfigError, DataError, DiscernError
from discern.progress import Silent
from tests.data.small_text import made_up, plain, read, write_vocabulary

DOCUMENTS = made_up(400)
TEXT = plain(DOCUMENTS).encode()


class _Fragile(BaseHTTPRequestHandler):
    """A server that sends at most 30,000 bytes on a connection, and refuses some paths."""

    requests: list[tuple[str, str | None]] = []  # noqa: RUF012
    ranges = True
    versions: Iterator[str] | None = None

    def do_HEAD(self) -> None:
        self._head(len(TEXT))

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        type(self).requests.append((self.path, asked))
        first = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.ranges else 0
        body = gzip.compress(TEXT, mtime=0) if self.path.startswith("/text.gz") else TEXT
        if self._head(len(body) - first, 206 if first else 200):
            self.wfile.write(body[first : first + (30_000 if self.ranges else len(TEXT) - 5 * (asked is None))])
            self.wfile.flush()
            self.connection.close()

    def _head(self, length: int, status: int = 200) -> bool:
        codes = {"/secret": 403, "/none": 404, "/busy": 503}
        status = codes.get(self.path.partition("?")[0], status)
        self.send_response(status)
        self.send_header("Content-Length", str(length if status < 300 else 0))
        self.send_header("ETag", next(self.versions) if self.versions else "one")
        self.end_headers()
        return status < 300

    def log_message(self, *_: object) -> None: ...

    def handle(self) -> None:
        try:
            super().handle()
        except (OSError, ValueError):  # a connection that was closed on purpose
            return


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(remote, "_FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(_Fragile, "requests", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), _Fragile) as running:
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


@pytest.mark.parametrize("name", ["text", "text.gz"])
def test_a_connection_that_breaks_goes_on_where_it_broke(server: str, name: str) -> None:
    assert read(f"{server}/{name}") == DOCUMENTS
    if name == "text":
        assert len(_Fragile.requests) == -(-len(TEXT) // 30_000)
        assert _Fragile.requests[1] == ("/text", "bytes=30000-")


def test_addresses_are_sent_encoded_once(server: str) -> None:
    assert read(f"{server}/fünf texts%20more?part=a b") == DOCUMENTS
    assert _Fragile.requests[0][0] == "/f%C3%BCnf%20texts%20more?part=a%20b"


@pytest.mark.parametrize("address", ["http://exa mple/x", "http://example:port/x", "http://[example/x"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(ConfigError, match="is not an address") as raised:
        read(address)
    assert "http://SERVER/PATH" in (raised.value.hint or "").replace("https", "http")


def test_a_server_without_ranges(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Fragile, "ranges", False)
    assert read(f"{server}/text") == DOCUMENTS
    assert [asked for _, asked in _Fragile.requests] == [None, f"bytes={len(TEXT) - 5}-"]


def test_a_server_without_ranges_that_breaks_off_again(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read up to the place where the first connection broke is not text that follows it."""
    ends = iter([60_000, 20_000, len(TEXT)])

    def do_get(self: _Fragile) -> None:
        self.protocol_version = "HTTP/1.1"
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("ETag", "one")
        self.end_headers()
        end = next(ends)
        for first in range(0, end, 7_000):
            piece = TEXT[first : min(first + 7_000, end)]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        if end == len(TEXT):
            self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)

    monkeypatch.setattr(_Fragile, "do_GET", do_get)
    assert len(TEXT) > 60_000
    assert read(f"{server}/text") == DOCUMENTS


def test_a_file_that_changes_is_not_mixed(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Fragile, "versions", iter(["head", "first", "second"]))
    with pytest.raises(DataError, match="changed while it was read"):
        read(f"{server}/text")


@pytest.mark.parametrize(
    ("path", "says"), [("secret", "credentials are missing or wrong"), ("none", "does not exist"), ("busy", "6 times in a row")]
)
def test_refusals_do_not_show_the_query(server: str, path: str, says: str) -> None:
    with pytest.raises(DataError, match=says) as raised:
        read(f"{server}/{path}?Signature=s3cr3t")
    assert "s3cr3t" not in str(raised.value)
    assert raised.value.__cause__ is None or "s3cr3t" not in str(raised.value.__cause__)


def test_a_server_that_does_not_answer() -> None:
    with pytest.raises(DataError, match=r"127\.0\.0\.1:1 does not answer"):
        read("http://127.0.0.1:1/text")


def test_a_password_in_an_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="password") as raised:
        read("https://me:s3cr3t@example.org/text")
    assert "s3cr3t" not in str(raised.value)


def test_a_data_set_of_text_on_a_server(server: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(TEXT)
    choice, build = TokenizerChoice(write_vocabulary(tmp_path / "vocab.txt")), BuildOptions(workers=1)
    one, other = (
        prepare([item], out=tmp_path / out, tokenizer=choice, build=build, progress=Silent())
        for out, item in (("near", str(tmp_path / "text")), ("far", f"{server}/text?Signature=s3cr3t"))
    )
    assert one.manifest.fingerprint == other.manifest.fingerprint
    assert one.manifest.statistics == other.manifest.statistics
    assert other.manifest.inputs == (f"{server}/text",)
    assert "s3cr3t" not in (tmp_path / "far" / "manifest.json").read_text()


def test_a_file_on_a_server_that_has_changed(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SMALLEST_PIECE", 1)
    choice = TokenizerChoice(write_vocabulary(tmp_path / "vocab.txt"))
    asked: dict[str, Any] = {
        "out": tmp_path / "data",
        "tokenizer": choice,
        "build": BuildOptions(workers=1),
        "progress": Silent(),
    }
    inputs = [f"{server}/text?Signature=s3cr3t", f"{server}/text.gz"]
    prepare_part(inputs, part=0, parts=2, **asked)
    monkeypatch.setattr(_Fragile, "versions", cycle(["two"]))
    with pytest.raises(ConfigError, match=r"input http://127.*/text has changed since: version one -> two") as raised:
        prepare_part(inputs, part=1, parts=2, **asked)
    assert "s3cr3t" not in str(raised.value)
    work = tmp_path / ".data.parts"
    plan = read_plan(work)
    assert plan is not None
    with pytest.raises(DataError, match=r"input http://127.*/text.gz has changed since the work was started: version one -> two"):
        perform(str(work), plan.fingerprint, ("pieces", 1))


def test_a_server_that_is_busy_is_asked_again(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter([503, 429, 200])
    monkeypatch.setattr(_Fragile, "do_HEAD", lambda self: self._head(7, next(codes)))
    (found,) = remote_files(f"{server}/text")
    assert (found.size, found.version) == (7, "one")
    monkeypatch.setattr(_Fragile, "do_HEAD", lambda self: self._head(7, 503))
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    (found,) = remote_files(f"{server}/text")
    assert (found.size, found.version) == (None, None)
    assert len(waits) == 5  # between six tries, and not after the last one


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An object store in memory in place of S3."""
    memory = pytest.importorskip("fsspec.implementations.memory")
    system = memory.MemoryFileSystem()
    system.store.clear()
    monkeypatch.setattr("discern.data.object_stores._s3", lambda bucket: system)
    return system


def test_an_object_that_has_changed(store: Any) -> None:
    store.pipe("/bucket/a.txt", b"a cat")
    before = Corpus(["s3://bucket/a.txt"], CorpusOptions()).inputs
    (folder,) = Corpus(["s3://bucket"], CorpusOptions()).inputs
    assert [folder.version] == [item.version for item in before] == [item.now().version for item in before]
    assert (before[0].size, before[0].now()) == (5, before[0])
    store.pipe("/bucket/a.txt", b"a dog")
    assert before[0].now() != before[0]


def test_an_object_store(store: Any) -> None:
    for name in ("b.txt", "a.txt", ".hidden", "more/c.txt"):
        store.pipe(f"/bucket/{name}", plain(made_up(3, seed=len(name))).encode())
    found = [each.address for each in remote_files("s3://bucket")]
    assert found == ["s3:///bucket/a.txt", "s3:///bucket/b.txt", "s3:///bucket/more/c.txt"]
    assert [each.address for each in remote_files("s3://bucket/*.txt")] == found[:2]
    assert read("s3://bucket/a.txt") == made_up(3, seed=5)
    stream = open_remote("s3://bucket/a.txt")
    assert stream.read(3) + stream.read() == plain(made_up(3, seed=5)).encode()
    stream.close()


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (PermissionError("key AKIAS3CR3T"), "credentials are missing or wrong"),
        (type("NoCredentialsError", (Exception,), {})("AKIAS3CR3T"), "AWS_ACCESS_KEY_ID"),
        (FileNotFoundError("AKIAS3CR3T"), "nothing at s3://bucket/x"),
        (RuntimeError("AKIAS3CR3T"), "RuntimeError"),
        (ImportError("AKIAS3CR3T"), r"discern-nlp\[remote\]"),
    ],
)
def test_errors_of_the_libraries_are_not_shown(problem: Exception, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> None:
        raise problem

    monkeypatch.setattr("discern.data.object_stores._s3", fail)
    with pytest.raises(DiscernError, match=says) as raised:
        read("s3://bucket/x")
    assert "AKIA" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_errors_in_the_middle_of_an_object_are_not_shown(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        """A connection of a library whose errors are no OSErrors, as botocore's and aiohttp's."""

        size = 10

        def seek(self, _: int) -> None: ...

        def read(self, _: int) -> bytes:
            raise RuntimeError("AKIAS3CR3T")

        def close(self) -> None: ...

    store.pipe("/bucket/x", b"0123456789")
    monkeypatch.setattr(store, "open", lambda *_, **__: Broken())
    monkeypatch.setattr(remote, "_FIRST_WAIT_SECONDS", 0.0)
    with pytest.raises(DataError, match="beyond byte 0 of 10: RuntimeError, 6 times in a row") as raised:
        open_remote("s3://bucket/x").read(5)
    assert raised.value.__cause__ is None
    assert "AKIA" not in str(raised.value)


def test_where_credentials_were_looked_for_is_told_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "HF_TOKEN",
        "HF_TOKEN_PATH",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "AWS_ACCESS_KEY_ID",
        "AWS_SHARED_CREDENTIALS_FILE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t")
    hint = credentials_hint("s3://bucket/x")
    assert "AWS_ACCESS_KEY_ID is not set, AWS_SECRET_ACCESS_KEY is set" in hint
    assert f"{tmp_path}/.aws/credentials does not exist" in hint
    assert "s3cr3t" not in hint
    assert "HF_TOKEN is not set" in credentials_hint("hf://datasets/x")
    (tmp_path / "key.json").write_text("{}")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    assert f"{tmp_path}/key.json exists" in credentials_hint("gs://bucket/x")
    assert "signature" in credentials_hint("https://example.org/x")


def test_what_is_shown() -> None:
    assert shown("https://a.org/b?token=c#d") == "https://a.org/b"
    assert shown("text?.txt") == "text?.txt"
