"""Data sets in an object store: a real S3 server on this machine, written to and read through a cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from discern.data import remote
from discern.data.dataset import remote as data_sets
from discern.data.dataset.manifest import MANIFEST_NAME
from discern.data.dataset.remote import RemoteFolder, cache_size
from discern.data.dataset.shards import TokenData
from discern.data.job import PrepareOptions
from discern.data.prepare import PrepareReport, prepare
from discern.data.remote import ResumingStream, read_whole, remote_file, remote_files, remove_remote, write_remote
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import ConfigError, DataError, DiscernError
from discern.progress import Silent
from tests.data.small_text import made_up, plain, write_vocabulary
from tests.s3_server import KEY, SECRET, s3_server, s3_variables

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("nanio", reason="the S3 server of the tests is not installed")
DATA = "s3://bucket/data"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of an S3 server with the bucket `bucket`, and its folder."""
    folder = tmp_path_factory.mktemp("s3")
    with s3_server(folder) as address:
        yield address, folder


@pytest.fixture
def bucket(server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of an empty bucket `bucket`, with credentials in the environment and a cache of its own; a text to prepare."""
    for name, value in s3_variables(server[0], tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "_WAITS", [0.0] * 6)
    s3fs.S3FileSystem.clear_instance_cache()
    RemoteFolder.array.cache_clear()
    (tmp_path / "text").write_text(plain(made_up(200)))
    yield server[1] / "bucket"
    s3fs.S3FileSystem.clear_instance_cache()
    shutil.rmtree(server[1] / "bucket")
    (server[1] / "bucket").mkdir()


def make(tmp_path: Path, out: str = DATA, text: str = "", *, seed: int = 0, overwrite: bool = False) -> PrepareReport:
    choice = TokenizerChoice(write_vocabulary(tmp_path / "vocab.txt"))
    build = PrepareOptions(workers=1, seed=seed, shard_tokens=900)
    inputs = [text or str(tmp_path / "text")]
    return prepare(inputs, out=Path(out), tokenizer=choice, options=build, overwrite=overwrite, progress=Silent())


def largest_file(report: PrepareReport) -> int:
    return max(file.size for split in report.manifest.splits.values() for shard in split.shards for file in shard.files.values())


def test_from_a_bucket_to_a_bucket_and_back(bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_remote("s3://bucket/text/a.txt", tmp_path / "text")
    near = make(tmp_path, str(tmp_path / "near"))
    far = make(tmp_path, DATA, "s3://bucket/text/*.txt")
    assert (far.folder, far.unchanged, far.manifest.fingerprint) == (DATA, False, near.manifest.fingerprint)
    assert os.listdir(tmp_path / "cache" / "outgoing") == ["unfinished"]
    local = TokenData.open(tmp_path / "near").split("train")
    limit = 2 * largest_file(far)
    monkeypatch.setenv("DISCERN_DATA_CACHE", f"{limit}B")  # far less than the data set
    data = TokenData.open(Path(DATA))
    train = data.split("train")
    assert data.location == DATA
    assert len(train.shards) > 4
    for start in np.random.default_rng(0).integers(0, train.num_tokens - 50, 40).tolist():
        np.testing.assert_array_equal(train.read(start, start + 50), local.read(start, start + 50))
        np.testing.assert_array_equal(train.word_starts(start, start + 50), local.word_starts(start, start + 50))
        assert sum(path.stat().st_size for path in data.folder.rglob("train-*") if path.is_file()) <= limit


def test_an_existing_data_set(bucket: Path, tmp_path: Path) -> None:
    make(tmp_path)
    assert make(tmp_path).unchanged
    with pytest.raises(ConfigError, match=rf"{DATA} holds a data set made with different settings"):
        make(tmp_path, seed=1)
    remove_remote(f"{DATA}/train-00000.words")
    assert make(tmp_path).repaired == ("train-00000.words",)
    (tmp_path / "text").write_text(plain(made_up(20)))
    with pytest.raises(ConfigError, match=rf"{DATA} holds a data set made from different text"):
        make(tmp_path)
    report = make(tmp_path, seed=1, overwrite=True)
    assert TokenData.open(DATA).fingerprint == report.manifest.fingerprint
    assert not [name for name in os.listdir(bucket / "data") if name.startswith("train-00002")]


def test_a_half_written_data_set_is_none(bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(address: str, source: Path) -> None:
        if address.endswith(MANIFEST_NAME):
            raise KeyboardInterrupt
        write_remote(address, source)

    with monkeypatch.context() as patched:
        patched.setattr(data_sets, "write_remote", fail)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path)
    with pytest.raises(DataError, match=r"nothing at \S+/manifest.json"):
        TokenData.open(DATA)
    report = make(tmp_path)
    assert TokenData.open(DATA).fingerprint == report.manifest.fingerprint


def test_damage_in_the_bucket_and_in_the_cache(bucket: Path, tmp_path: Path) -> None:
    make(tmp_path)
    data = TokenData.open(DATA)
    expected = data.split("train").read(0, 100)
    cached = data.folder / "train-00000.tokens"
    for content in (bytes(cached.stat().st_size), b""):
        cached.unlink()
        cached.write_bytes(content)
        RemoteFolder.array.cache_clear()
        np.testing.assert_array_equal(TokenData.open(DATA).split("train").read(0, 100), expected)
    damaged = tmp_path / "damaged"
    damaged.write_bytes(bytes(cached.stat().st_size))
    write_remote(f"{DATA}/train-00000.tokens", damaged)
    cached.unlink()
    RemoteFolder.array.cache_clear()
    with pytest.raises(DataError, match=rf"{DATA}/train-00000.tokens is damaged: its SHA-256 is"):
        TokenData.open(DATA).split("train").read(0, 100)


READER = """
import hashlib
import sys
import numpy as np
from discern.data.dataset.shards import TokenData

train, digest = TokenData.open(sys.argv[1]).split("train"), hashlib.sha256()
for start in np.random.default_rng(0).integers(0, train.num_tokens - 50, 60).tolist():
    digest.update(train.read(start, start + 50).tobytes() + train.word_starts(start, start + 50).tobytes())
print(digest.hexdigest())
"""


def test_processes_that_share_a_cache_never_read_half_a_file(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = make(tmp_path, str(tmp_path / "near"))
    make(tmp_path)
    monkeypatch.setenv("DISCERN_DATA_CACHE", f"{2 * largest_file(report)}B")  # each removes what the others fetch
    readers = [
        subprocess.Popen([sys.executable, "-c", READER, address], stdout=subprocess.PIPE, text=True)
        for address in (str(tmp_path / "near"), DATA, DATA, DATA)
    ]
    local, *found = [process.communicate(timeout=120)[0] for process in readers]
    assert len(local.strip()) == 64
    assert found == [local] * 3
    assert not list((tmp_path / "cache").rglob("partial"))


def test_an_object_that_changes(bucket: Path, tmp_path: Path) -> None:
    address, file = "s3://bucket/a.bin", tmp_path / "a.bin"
    file.write_bytes(bytes(30_000_000))
    write_remote(address, file)
    before = remote_file(address)
    assert list(remote_files("s3://bucket/*")) == [before]
    stream = ResumingStream(address)
    stream.read(1)
    file.write_bytes(bytes(29_999_999) + b"1")
    write_remote(address, file)
    assert remote_file(address).version != before.version
    with pytest.raises(DataError, match="changed while it was read"):
        list(iter(stream.read, b""))


@pytest.mark.parametrize(
    "given", [{"AWS_SECRET_ACCESS_KEY": "wr0ng"}, {"AWS_ACCESS_KEY_ID": "wr0ng"}, {"AWS_ACCESS_KEY_ID": ""}, {}]
)
def test_what_is_refused_or_does_not_answer(
    given: dict[str, str], bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for name, value in (given or {"AWS_ENDPOINT_URL": "http://me:s3cr3t@127.0.0.1:1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    reads = ("s3://bucket/text", "s3://bucket/text/a.txt", "s3://bucket/*/a.txt", "s3://none/a.txt")
    acts = [partial(make, tmp_path, str(tmp_path / "out"), address) for address in reads]
    for act in (*acts, partial(make, tmp_path), partial(TokenData.open, DATA)):
        with pytest.raises(DataError, match=r"access to s3://\S+ is refused: " if given else "cannot be reached: ") as raised:
            act()
        assert ("export AWS_ACCESS_KEY_ID=" if given else "AWS_ENDPOINT_URL") in (raised.value.hint or "")
        assert not [secret for secret in ("wr0ng", f" {KEY} ", SECRET) if secret in f"{raised.value} {raised.value.__cause__}"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("address", ["s3://bucket/nothing", "s3://bucket/nothing/*.txt", "s3://none/a.txt"])
def test_what_is_not_there_is_named(address: str, bucket: Path, tmp_path: Path) -> None:
    for act in (partial(make, tmp_path, str(tmp_path / "out"), address), partial(read_whole, address)):
        with pytest.raises(DataError, match="there is nothing at s3://"):
            act()


def test_what_is_not_written_to(bucket: Path, tmp_path: Path) -> None:
    write_remote(f"{DATA}/thesis.txt", tmp_path / "text")
    for address, says in (
        (DATA, rf"{DATA} contains thesis\.txt"),
        ("https://example.org/data", "web servers are read only"),
        ("s3://none/data", "nothing at s3://none/data/unfinished"),
    ):
        with pytest.raises(DiscernError, match=says):
            make(tmp_path, address, overwrite=True)


def test_the_size_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_size() == 64_000_000_000
    monkeypatch.setenv("DISCERN_DATA_CACHE", "1.5 GB")
    assert cache_size() == 1_500_000_000
    monkeypatch.setenv("DISCERN_DATA_CACHE", "lots")
    with pytest.raises(ConfigError, match="expected a size"):
        cache_size()
