"""Data sets in an object store: a real S3 server on this machine, written to and read through a cache."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from discern.data.dataset import remote as cache
from discern.data.dataset.build import BuildOptions
from discern.data.dataset.manifest import MANIFEST_NAME
from discern.data.dataset.shards import TokenData
from discern.data.prepare import prepare, prepare_part
from discern.data.reports import PrepareReport
from discern.data.sources import object_stores, remote
from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import CorpusOptions
from discern.data.sources.object_stores import write_object
from discern.data.sources.remote import read_whole, remote_address
from discern.data.stages import plan as planning
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import ConfigError, DataError
from discern.progress import Silent
from tests.data.small_text import made_up, plain, write_vocabulary

pytest.importorskip("pyarrow")
pytest.importorskip("nanio", reason="the S3 server of the tests is not installed")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of an S3 server with the bucket `bucket`, and its folder."""
    folder = tmp_path_factory.mktemp("s3")
    (folder / "bucket").mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "from nanio.cli import main; main()", "serve", "--data-dir", str(folder)]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port), "--no-access-log"],
        env=os.environ | {"NANIO_ACCESS_KEY": "me", "NANIO_SECRET_KEY": "s3cr3t"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "the server does not start"
                assert process.poll() is None, "the server has stopped"
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}", folder
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def bucket(server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of an empty bucket `bucket`, with credentials in the environment and a cache of its own."""
    found = {
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": "s3cr3t",
        "AWS_ENDPOINT_URL": server[0],
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        "DISCERN_CACHE": str(tmp_path / "cache"),
    }
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "_FIRST_WAIT_SECONDS", 0.001)
    object_stores._s3.cache_clear()
    yield server[1] / "bucket"
    object_stores._s3.cache_clear()
    shutil.rmtree(server[1] / "bucket")
    (server[1] / "bucket").mkdir()


def make(tmp_path: Path, out: str, *inputs: str, seed: int = 0, overwrite: bool = False) -> PrepareReport:
    choice, build = (
        TokenizerChoice(write_vocabulary(tmp_path / "vocab.txt")),
        BuildOptions(workers=1, seed=seed, shard_tokens=900),
    )
    return prepare(inputs, out=Path(out), tokenizer=choice, build=build, overwrite=overwrite, progress=Silent())


def test_from_a_bucket_to_a_bucket_and_back(bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = plain(made_up(200)).encode()
    (tmp_path / "text").write_bytes(text)
    write_object("s3://bucket/text/a.txt", text)
    near = make(tmp_path, str(tmp_path / "near"), str(tmp_path / "text"))
    far = make(tmp_path, "s3://bucket/data", "s3://bucket/text")
    assert far.folder == "s3://bucket/data"
    assert far.manifest.fingerprint == near.manifest.fingerprint
    assert not any("outgoing" in str(path) for path in (tmp_path / "cache").rglob("*.tokens"))
    assert make(tmp_path, "s3://bucket/data", "s3://bucket/text").unchanged
    with pytest.raises(ConfigError, match=r"s3://bucket/data holds a data set made with other settings"):
        make(tmp_path, "s3://bucket/data", "s3://bucket/text", seed=1)

    local = TokenData.open(tmp_path / "near").split("train")
    largest = max(file.size for split in far.manifest.splits.values() for shard in split.shards for file in shard.files.values())
    monkeypatch.setenv("DISCERN_DATA_CACHE", f"{2 * largest}B")  # far less than the data set
    data = TokenData.open(Path("s3://bucket/data"))
    train = data.split("train")
    assert data.location == "s3://bucket/data"
    assert len(train.shards) > 4
    for start in np.random.default_rng(0).integers(0, train.num_tokens - 50, 40).tolist():
        np.testing.assert_array_equal(train.read(start, start + 50), local.read(start, start + 50))
        np.testing.assert_array_equal(train.word_starts(start, start + 50), local.word_starts(start, start + 50))
        held = [path for path in data.folder.glob("train-*") if path.suffix != ".used"]
        assert sum(path.stat().st_size for path in held) <= 2 * largest

    monkeypatch.setenv("DISCERN_DATA_CACHE", "100B")
    with pytest.raises(ConfigError, match="more than the cache may hold"):
        TokenData.open("s3://bucket/data")


def test_an_object_that_changes_before_the_work_is_finished(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "SMALLEST_PIECE", 1)
    for name in ("a", "b"):
        write_object(f"s3://bucket/text/{name}.txt", b"a red cat sees the old dog\n")
    listed, alone = (Corpus([text], CorpusOptions()).inputs for text in ("s3://bucket/text", "s3://bucket/text/b.txt"))
    assert (listed[1].size, listed[1].version) == (alone[0].size, alone[0].version)
    assert listed[1].version is not None
    assert [item.now() for item in (*listed, *alone)] == [*listed, *alone]
    choice, build = TokenizerChoice(write_vocabulary(tmp_path / "vocab.txt")), BuildOptions(workers=1)
    asked: dict[str, Any] = {"out": tmp_path / "data", "tokenizer": choice, "build": build, "progress": Silent()}
    prepare_part(["s3://bucket/text"], part=0, parts=2, **asked)
    time.sleep(1.1)  # listings of this server have no fractions of seconds
    write_object("s3://bucket/text/b.txt", b"a red dog sees the old cat\n")
    with pytest.raises(ConfigError, match=r"input s3://bucket/text/b\.txt has changed since: version 20\S+ -> 20"):
        prepare_part(["s3://bucket/text"], part=1, parts=2, **asked)


def test_a_half_written_data_set_is_none(bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text(plain(made_up(60)))
    write = remote.write_object

    def fail(address: str, content: Path | bytes) -> int | None:
        if address.endswith(MANIFEST_NAME):
            raise KeyboardInterrupt
        return write(address, content)

    with monkeypatch.context() as patched:
        patched.setattr(remote, "write_object", fail)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path, "s3://bucket/data", str(tmp_path / "text"))
    with pytest.raises(DataError, match="is not a data set"):
        TokenData.open("s3://bucket/data")
    report = make(tmp_path, "s3://bucket/data", str(tmp_path / "text"))
    assert TokenData.open("s3://bucket/data").fingerprint == report.manifest.fingerprint
    assert not any(path.name.startswith("unfinished") for path in bucket.rglob("*"))


def test_damage_in_the_bucket_and_in_the_cache(bucket: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(plain(made_up(60)))
    make(tmp_path, "s3://bucket/data", str(tmp_path / "text"))
    data = TokenData.open("s3://bucket/data")
    expected = data.split("train").read(0, 100)
    cached = data.folder / "train-00000.tokens"
    cached.write_bytes(bytes(cached.stat().st_size))
    np.testing.assert_array_equal(TokenData.open("s3://bucket/data").split("train").read(0, 100), expected)
    cached.unlink()
    content = read_whole("s3://bucket/data/train-00000.tokens")
    write_object("s3://bucket/data/train-00000.tokens", bytes(len(content)))
    with pytest.raises(DataError, match="is damaged"):
        TokenData.open("s3://bucket/data").split("train").read(0, 100)


def test_wrong_credentials_are_refused_before_any_work(bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text(plain(made_up(20)))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wr0ng")
    object_stores._s3.cache_clear()
    for act in (
        lambda: make(tmp_path, "s3://bucket/data", str(tmp_path / "text")),
        lambda: TokenData.open("s3://bucket/data"),
    ):
        with pytest.raises(DataError, match="credentials are missing or wrong") as raised:
            act()
        assert "wr0ng" not in str(raised.value)


def test_other_files_and_web_servers_are_not_written_over(bucket: Path, tmp_path: Path) -> None:
    write_object("s3://bucket/data/thesis.txt", b"mine")
    with pytest.raises(ConfigError, match=r"s3://bucket/data contains thesis\.txt"):
        make(tmp_path, "s3://bucket/data", "text", overwrite=True)
    with pytest.raises(ConfigError, match="web servers are read only"):
        make(tmp_path, "https://example.org/data", "text")


def test_addresses_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert remote_address(Path("s3://bucket/a/b")) == "s3://bucket/a/b"
    assert remote_address(tmp_path) is None
    monkeypatch.setenv("DISCERN_DATA_CACHE", "1.5 GB")
    assert cache.cache_size() == 1_500_000_000
    monkeypatch.setenv("DISCERN_DATA_CACHE", "lots")
    with pytest.raises(ConfigError, match="expected a size"):
        cache.cache_size()
