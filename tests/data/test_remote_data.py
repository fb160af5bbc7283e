"""Data sets in an object store: a real S3 server on this machine, written to and read through a cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from discern.data.curation.contamination import EvaluationFiles
from discern.data.dataset import remote as cache
from discern.data.dataset.build import BuildOptions
from discern.data.dataset.manifest import MANIFEST_NAME
from discern.data.dataset.remote import RemoteFolder
from discern.data.dataset.shards import TokenData
from discern.data.object_stores import write_object
from discern.data.prepare import prepare, prepare_part
from discern.data.remote import read_whole, remote_address
from discern.data.reports import PrepareReport
from discern.data.sources import object_stores, remote
from discern.data.sources.corpus import Corpus
from discern.data.sources.documents import CorpusOptions
from discern.data.stages import plan as planning
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import ConfigError, DataError
from discern.progress import Silent
from discern.storage import checksums
from tests.data.small_text import made_up, plain, write_vocabulary
from tests.s3_server import KEY, SECRET, s3_server, s3_variables

pytest.importorskip("pyarrow")
pytest.importorskip("nanio", reason="the S3 server of the tests is not installed")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of an S3 server with the bucket `bucket`, and its folder."""
    folder = tmp_path_factory.mktemp("s3")
    with s3_server(folder) as address:
        yield address, folder


@pytest.fixture
def bucket(server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of an empty bucket `bucket`, with credentials in the environment and a cache of its own."""
    for name, value in s3_variables(server[0], tmp_path / "cache").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "_FIRST_WAIT_SECONDS", 0.001)
    object_stores._s3.cache_clear()
    yield server[1] / "bucket"
    object_stores._s3.cache_clear()
    shutil.rmtree(server[1] / "bucket")
    (server[1] / "bucket").mkdir()


def make(
    tmp_path: Path, out: str, *inputs: str, seed: int = 0, overwrite: bool = False, against: EvaluationFiles | None = None
) -> PrepareReport:
    choice, build = (
        TokenizerChoice(write_vocabulary(tmp_path / "vocab.txt")),
        BuildOptions(workers=1, seed=seed, shard_tokens=900),
    )
    return prepare(inputs, out=Path(out), tokenizer=choice, build=build, overwrite=overwrite, against=against, progress=Silent())


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
    with pytest.raises(ConfigError, match=r"s3://bucket/data holds a data set made with different settings"):
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


@pytest.mark.parametrize(
    ("owner", "step"), [(Path, "stat"), (checksums, "_stamp"), (checksums, "checksum")], ids=["stat", "_stamp", "checksum"]
)
def test_a_file_that_another_process_removes_is_fetched_again(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, step: str
) -> None:
    (tmp_path / "text").write_text(plain(made_up(200)))
    make(tmp_path, "s3://bucket/data", str(tmp_path / "text"))
    expected = TokenData.open("s3://bucket/data").split("train").read(0, 50)  # now in the cache
    monkeypatch.setattr(checksums, "_hashed", {})
    original, removed = getattr(owner, step), []

    def removing(path: Path, **options: Any) -> object:
        goes = path.suffix == ".tokens" and not removed
        found = original(path, **options) if goes and step == "stat" else None  # what it says is no longer true
        if goes:
            path.unlink()
            removed.append(path)
        return found or original(path, **options)

    monkeypatch.setattr(owner, step, removing)
    np.testing.assert_array_equal(TokenData.open("s3://bucket/data").split("train").read(0, 50), expected)
    assert removed
    monkeypatch.setattr(cache, "cached_checksum", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(DataError, match=r"tokens cannot be read: Permission denied"):
        TokenData.open("s3://bucket/data").split("train").read(0, 50)


READER = """
import hashlib
import sys
import numpy as np
from discern.data.dataset.shards import TokenData

train, digest = TokenData.open(sys.argv[1]).split("train"), hashlib.sha256()
for start in np.random.default_rng(0).integers(0, train.num_tokens - 50, int(sys.argv[2])).tolist():
    digest.update(train.read(start, start + 50).tobytes() + train.word_starts(start, start + 50).tobytes())
print(digest.hexdigest())
"""


def test_processes_that_share_a_cache_never_read_half_a_file(
    bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text(plain(made_up(200)))
    report = make(tmp_path, str(tmp_path / "near"), str(tmp_path / "text"))
    make(tmp_path, "s3://bucket/data", str(tmp_path / "text"))
    files = (file.size for split in report.manifest.splits.values() for shard in split.shards for file in shard.files.values())
    monkeypatch.setenv("DISCERN_DATA_CACHE", f"{2 * max(files)}B")  # each removes what the others fetch

    def read(address: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", READER, address, "60"], stdout=subprocess.PIPE, text=True)

    readers = [read(str(tmp_path / "near")), *(read("s3://bucket/data") for _ in range(3))]
    local, *found = [process.communicate(timeout=120)[0] for process in readers]
    assert len(local.strip()) == 64
    assert found == [local] * 3
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_two_threads_read_one_data_set(bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training reads ahead while the held-out rows are read."""
    (tmp_path / "text").write_text(plain(made_up(200)))
    make(tmp_path, "s3://bucket/data", str(tmp_path / "text"))
    data = TokenData.open("s3://bucket/data")
    shards = [(file, size) for shard in data.manifest.splits["train"].shards for file, size in shard.files.items()] * 8
    folder = RemoteFolder("s3://bucket/data", data.folder)
    monkeypatch.setattr(RemoteFolder, "_mapped", lambda *_: np.memmap(tmp_path / "text", np.uint8, "r"))
    monkeypatch.setattr(RemoteFolder, "note", lambda *_: None)

    def read(of: str) -> None:
        for _ in range(30):
            for number, (name, file) in enumerate(shards):
                folder.array(f"{of}-{number}-{name}", file, np.dtype(np.uint16))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(read, ("train", "heldout")))


def test_what_is_recorded_later_removes_nothing(bucket: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(plain(made_up(50)).encode())
    (tmp_path / "dev.txt").write_bytes(plain(made_up(5)).encode())
    make(tmp_path, "s3://bucket/data", str(tmp_path / "text"))
    before = sorted(path.name for path in (bucket / "data").iterdir())
    again = make(tmp_path, "s3://bucket/data", str(tmp_path / "text"), against=EvaluationFiles([tmp_path / "dev.txt"]))
    assert again.repaired == ()
    assert again.unchanged
    assert sorted(path.name for path in (bucket / "data").iterdir()) == before
    opened = TokenData.open("s3://bucket/data")
    assert opened.manifest.overlap is not None
    assert opened.split("train").read(0, 5).size == 5


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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wr0ng"}, "AWS_ACCESS_KEY_ID is set, AWS_SECRET_ACCESS_KEY is set"),
        ({"AWS_ACCESS_KEY_ID": "wr0ng"}, "AWS_ACCESS_KEY_ID is set, AWS_SECRET_ACCESS_KEY is set"),
        (
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
            "AWS_ACCESS_KEY_ID is not set, AWS_SECRET_ACCESS_KEY is not set",
        ),
    ],
    ids=["secret", "key", "none"],
)
def test_wrong_and_missing_credentials_are_refused_before_any_work(
    given: dict[str, str], said: str, bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text(plain(made_up(20)))
    write_object("s3://bucket/text/a.txt", tmp_path / "text")
    for name, value in {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"), "AWS_CONFIG_FILE": str(tmp_path), **given}.items():
        monkeypatch.setenv(name, value)
        if not value:
            monkeypatch.delenv(name)
    object_stores._s3.cache_clear()
    read = ("s3://bucket/text", "s3://bucket/text/a.txt", "s3://bucket/*/a.txt", "s3://bucket/nothing", "s3://none/a.txt")
    acts = [partial(make, tmp_path, str(tmp_path / "out"), address) for address in read]
    acts += [partial(make, tmp_path, "s3://bucket/data", str(tmp_path / "text"))]
    for act in [*acts, partial(TokenData.open, "s3://bucket/data")]:
        with pytest.raises(DataError, match=r"access to s3://\S+ is refused: credentials are missing or wrong") as raised:
            act()
        assert "export AWS_ACCESS_KEY_ID=" in (raised.value.hint or "")
        assert f"{said}, AWS_SESSION_TOKEN is not set" in (raised.value.hint or "")
        shown = f"{raised.value} {raised.value.hint} {raised.value.__cause__}"
        assert not [secret for secret in ("wr0ng", KEY, SECRET) if re.search(rf"\b{secret}\b", shown)]
    assert not (tmp_path / "out").exists()


def test_a_server_that_does_not_answer_is_named(bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:s3cr3t@127.0.0.1:1")
    object_stores._s3.cache_clear()
    for act in (partial(make, tmp_path, str(tmp_path / "out"), "s3://bucket/text"), partial(TokenData.open, "s3://bucket/data")):
        with pytest.raises(DataError, match="the server does not answer") as raised:
            act()
        assert "127.0.0.1:1" in (raised.value.hint or "")
        assert "s3cr3t" not in f"{raised.value} {raised.value.hint}"


def test_what_is_not_there_is_named(bucket: Path, tmp_path: Path) -> None:
    for address in ("s3://bucket/nothing", "s3://bucket/nothing/*.txt"):
        with pytest.raises(DataError, match=f"there is nothing at {re.escape(address)}"):
            make(tmp_path, str(tmp_path / "out"), address)
    (tmp_path / "text").write_text(plain(made_up(20)))
    for act in (
        partial(make, tmp_path, str(tmp_path / "out"), "s3://none/a.txt"),
        partial(make, tmp_path, "s3://none/data", str(tmp_path / "text")),
    ):
        with pytest.raises(DataError, match="there is no bucket none"):
            act()


def test_other_files_and_web_servers_are_not_written_over(bucket: Path, tmp_path: Path) -> None:
    write_object("s3://bucket/data/thesis.txt", b"mine")
    with pytest.raises(ConfigError, match=r"s3://bucket/data contains thesis\.txt"):
        make(tmp_path, "s3://bucket/data", "text", overwrite=True)
    with pytest.raises(ConfigError, match="web servers are read only"):
        make(tmp_path, "https://example.org/data", "text")


def test_files_that_arrive_count_for_the_size_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISCERN_DATA_CACHE", "300B")
    folder = tmp_path / "version"
    folder.mkdir()
    for number, name in enumerate(("train-00000.tokens", "train-00001.tokens", ".train-00002.tokens.partial")):
        (folder / name).write_bytes(bytes(100))
        os.utime(folder / name, (number, time.time() - 100 + number))
    cache._make_room(tmp_path, 100, folder / "train-00003.tokens")
    assert sorted(path.name for path in folder.iterdir()) == [".train-00002.tokens.partial", "train-00001.tokens"]
    long_ago = time.time() - 2 * 24 * 3600  # left by a process that was killed
    os.utime(folder / ".train-00002.tokens.partial", (long_ago, long_ago))
    cache._make_room(tmp_path, 100, folder / "train-00003.tokens")
    assert [path.name for path in folder.iterdir()] == ["train-00001.tokens"]


def test_addresses_and_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert remote_address(Path("s3://bucket/a/b")) == "s3://bucket/a/b"
    assert remote_address(tmp_path) is None
    monkeypatch.setenv("DISCERN_DATA_CACHE", "1.5 GB")
    assert cache.cache_size() == 1_500_000_000
    monkeypatch.setenv("DISCERN_DATA_CACHE", "lots")
    with pytest.raises(ConfigError, match="expected a size"):
        cache.cache_size()
