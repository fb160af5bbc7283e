"""Pre-training on a data set elsewhere, through a cache that cannot hold it: the weights of local data, bit for bit."""

from __future__ import annotations

import hashlib
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from discern.data.dataset.build import BuildOptions
from discern.data.prepare import prepare
from discern.data.sources import object_stores, remote
from discern.data.tokenizer.choice import TokenizerChoice
from discern.pretraining.run import pretrain
from discern.progress import Silent
from tests.data.small_text import made_up, plain, write_vocabulary
from tests.s3_server import s3_server, s3_variables

STEPS, KILLED_AT = 24, 4
SETTINGS = (
    *(f"train.max_steps={STEPS}", "train.checkpoint_every_steps=2", "train.sequences_per_step=4", "optimizer.warmup_steps=4"),
    *("model.hidden_dropout=0", "model.attention_dropout=0"),  # drawn by each process for itself
)


@dataclass(frozen=True)
class Place:
    """Where a data set is.

    Attributes:
        address: what `--data` gets.
        interrupt: waits for the moment in which the process is to be killed, once its first checkpoints are there.
        release: lets go of what the server has held back until then.
    """

    address: str
    interrupt: Callable[[], object] = lambda: None
    release: Callable[[], object] = lambda: None


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of several shards on this machine."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "text").write_text(plain(made_up(200)))
    choice, build = TokenizerChoice(write_vocabulary(folder / "vocab.txt")), BuildOptions(workers=1, shard_tokens=1500)
    prepare([str(folder / "text")], out=folder / "data", tokenizer=choice, build=build, progress=Silent())
    return folder / "data"


@pytest.fixture(scope="module")
def expected(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a run on it that nothing interrupts."""
    out = tmp_path_factory.mktemp("expected") / "run"
    pretrain(data=data, out=out, preset="tiny", overrides=SETTINGS, progress=Silent())
    return last_checkpoint(out)


@pytest.fixture
def small_cache(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for half of the data set."""
    size = sum(path.stat().st_size for path in data.glob("train-*"))
    monkeypatch.setenv("DISCERN_DATA_CACHE", f"{size // 2}B")
    monkeypatch.setenv("DISCERN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def bucket(data: Path, small_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """The data set in a bucket of an S3 server."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("nanio", reason="the S3 server of the tests is not installed")
    (tmp_path / "s3").mkdir()
    with s3_server(tmp_path / "s3") as address:
        for name, value in s3_variables(address, small_cache).items():
            monkeypatch.setenv(name, value)
        object_stores._s3.cache_clear()
        for path in data.iterdir():
            object_stores.write_object(f"s3://bucket/data/{path.name}", path)
        yield Place("s3://bucket/data")
    object_stores._s3.cache_clear()


class _Unreliable(BaseHTTPRequestHandler):
    """A server of a folder: of seven requests it refuses one with 503, and breaks off two in the middle."""

    folder = Path()
    numbers = itertools.count()
    holds = threading.Event()
    held = threading.Event()
    goes_on = threading.Event()

    def do_GET(self) -> None:
        number = next(self.numbers) % 7
        content = (self.folder / self.path.rpartition("/")[2]).read_bytes()
        asked = self.headers.get("Range")
        body = content[int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0 :]
        self.send_response(503 if number == 3 else 206 if asked else 200)
        self.send_header("Content-Length", str(0 if number == 3 else len(body)))
        self.send_header("ETag", hashlib.sha256(content).hexdigest())
        self.end_headers()
        if number == 3:
            return
        half = len(body) // 2 + 1
        self.wfile.write(body[:half])
        if self.holds.is_set() and "train-" in self.path:
            self.held.set()
            self.goes_on.wait(60)
        if number not in (1, 5):
            self.wfile.write(body[half:])

    def log_message(self, *_: object) -> None: ...

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # the client was killed
            return


@pytest.fixture
def web(data: Path, small_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """The data set on an unreliable web server. The process is killed in the middle of a file."""
    monkeypatch.setattr(remote, "_FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setattr(_Unreliable, "folder", data)
    monkeypatch.setattr(_Unreliable, "numbers", itertools.count())
    for name in ("holds", "held", "goes_on"):
        monkeypatch.setattr(_Unreliable, name, threading.Event())

    def interrupt() -> None:
        _Unreliable.holds.set()
        assert _Unreliable.held.wait(60), "the run fetches nothing more"

    def release() -> None:
        _Unreliable.holds.clear()
        _Unreliable.goes_on.set()

    with ThreadingHTTPServer(("127.0.0.1", 0), _Unreliable) as running:
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield Place(f"http://127.0.0.1:{running.server_address[1]}/data", interrupt, release)
        release()
        running.shutdown()


def last_checkpoint(out: Path) -> Path:
    return out / "checkpoints" / f"step-{STEPS:08d}"


def start(address: str, out: Path, *more: str) -> subprocess.Popen[str]:
    given = [word for setting in SETTINGS for word in ("--set", setting)]
    line = [sys.executable, "-m", "discern", "pretrain", "--preset", "tiny", "--data", address, "--out", str(out), *given, *more]
    return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("where", ["bucket", pytest.param("web", marks=pytest.mark.slow)])
def test_a_killed_run_ends_with_the_weights_of_one_on_local_data(
    where: str, expected: Path, small_cache: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place: Place = request.getfixturevalue(where)
    out = tmp_path / "run"
    process = start(place.address, out)
    deadline = time.monotonic() + 120
    while not (out / "checkpoints" / f"step-{KILLED_AT:08d}").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    place.interrupt()
    assert process.poll() is None, process.stderr.read() if process.stderr else ""
    process.kill()
    process.communicate()
    place.release()
    assert not last_checkpoint(out).exists(), "the run was too fast to be killed; give it more steps"
    pretrain(data=Path(place.address), out=out, preset="tiny", overrides=SETTINGS, resume="must", progress=Silent())
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (last_checkpoint(out) / name).read_bytes() == (expected / name).read_bytes()
    assert not list(small_cache.rglob("*.partial"))


@pytest.mark.slow
def test_two_runs_with_three_processes_share_a_cache(bucket: Place, expected: Path, small_cache: Path, tmp_path: Path) -> None:
    outs = tmp_path / "alone", tmp_path / "together"
    processes = [start(bucket.address, outs[0]), start(bucket.address, outs[1], "--nproc", "2")]
    for process in processes:
        _, said = process.communicate(timeout=180)
        assert process.returncode == 0, said
    alone, together, local = (load_file(each / "model.safetensors") for each in (*map(last_checkpoint, outs), expected))
    for name, tensor in local.items():
        assert torch.equal(alone[name], tensor)
        torch.testing.assert_close(together[name], tensor, rtol=0, atol=1e-5)
    assert not list(small_cache.rglob("*.partial"))
