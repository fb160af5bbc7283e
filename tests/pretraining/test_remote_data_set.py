"""Pre-training on a data set elsewhere, through a cache that cannot hold it: the weights of local data, bit for bit."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from discern.data.job import PrepareOptions
from discern.data.prepare import prepare
from discern.data.remote import write_remote
from discern.data.tokenizer.choice import TokenizerChoice
from discern.progress import Silent
from tests.data.small_text import made_up, plain, write_vocabulary
from tests.pretraining.commands import LIMIT, start, train
from tests.s3_server import s3_server, s3_variables

STEPS, FEW_ROWS = 15, "train.sequences_per_step=2"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of several shards on this machine."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "text").write_text(plain(made_up(200)))
    choice, build = TokenizerChoice(write_vocabulary(folder / "vocab.txt")), PrepareOptions(workers=1, shard_tokens=1500)
    prepare([str(folder / "text")], out=folder / "data", tokenizer=choice, options=build, progress=Silent())
    return folder / "data"


@pytest.fixture(scope="module")
def expected(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The last checkpoint of a run on it that nothing interrupts."""
    out = tmp_path_factory.mktemp("expected")
    train(data, out, STEPS, FEW_ROWS)
    return last_checkpoint(out)


@pytest.fixture
def small_cache(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for half of the data set."""
    size = sum(path.stat().st_size for path in data.glob("train-*"))
    monkeypatch.setenv("DISCERN_DATA_CACHE", f"{size // 2}B")
    monkeypatch.setenv("DISCERN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class _Unreliable(BaseHTTPRequestHandler):
    """A server of a folder that breaks off every fifth answer in the middle, and halts in the middle of a shard when told to."""

    folder = Path()
    numbers = itertools.count()
    halts, halted, released = threading.Event(), threading.Event(), threading.Event()

    def do_GET(self) -> None:
        content = (self.folder / self.path.rpartition("/")[2]).read_bytes()
        begin = self.headers.get("Range")
        body = content[int(begin.removeprefix("bytes=").removesuffix("-")) if begin else 0 :]
        half = len(body) // 2 + 1
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", hashlib.sha256(content).hexdigest())
        self.end_headers()
        self.wfile.write(body[:half])
        if self.halts.is_set() and "train-" in self.path:
            self.halted.set()
            self.released.wait(LIMIT)
        if next(self.numbers) % 5 != 1:
            self.wfile.write(body[half:])

    def log_message(self, *_: object) -> None: ...

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # the client was killed
            return


def test_a_run_on_an_unreliable_server_that_is_killed_in_the_middle_of_a_file_ends_with_the_weights_of_local_data(
    data: Path, expected: list[bytes], small_cache: Path, tmp_path: Path
) -> None:
    out, deadline, _Unreliable.folder = tmp_path / "run", time.monotonic() + LIMIT, data
    with ThreadingHTTPServer(("127.0.0.1", 0), _Unreliable) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}/data"
        with start(address, out, STEPS, FEW_ROWS) as process:
            while not (out / "checkpoints" / "step-00000003").exists() and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            _Unreliable.halts.set()
            assert _Unreliable.halted.wait(LIMIT), process.stderr and process.stderr.read()
            process.kill()
        _Unreliable.halts.clear()
        _Unreliable.released.set()
        train(Path(address), out, STEPS, FEW_ROWS, resume="must")
        server.shutdown()
    assert last_checkpoint(out) == expected
    assert not list(small_cache.rglob("partial"))


def test_a_run_on_a_bucket_has_the_weights_of_local_data(
    data: Path, expected: list[bytes], small_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3fs = pytest.importorskip("s3fs")
    pytest.importorskip("nanio", reason="the S3 server of the tests is not installed")
    (tmp_path / "s3").mkdir()
    with s3_server(tmp_path / "s3") as address:
        for name, value in s3_variables(address, small_cache).items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        for path in data.iterdir():
            write_remote(f"s3://bucket/data/{path.name}", path)
        train(Path("s3://bucket/data"), tmp_path / "run", STEPS, FEW_ROWS)
    s3fs.S3FileSystem.clear_instance_cache()
    assert last_checkpoint(tmp_path / "run") == expected
    assert not list(small_cache.rglob("partial"))


def last_checkpoint(out: Path) -> list[bytes]:
    folder = out / "checkpoints" / f"step-{STEPS:08d}"
    return [(folder / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]
