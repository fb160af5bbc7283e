"""Pieces and parts: the bytes of one process, whatever was interrupted, and wherever the work runs."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from discern.data import job as module
from discern.data.check import check
from discern.data.job import PrepareOptions, make_piece
from discern.data.prepare import prepare
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import DataError
from discern.progress import Silent
from tests.data.small_text import WORDS, contents, made_up, plain, tar_of, write_vocabulary


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of files that are pieces of their own, in several parts: text with copies, an archive, and what is reported."""
    monkeypatch.setattr(module, "SMALLEST_PIECE", 1)
    monkeypatch.setattr(module, "CHUNK_CHARACTERS", 1000)
    monkeypatch.setattr(module, "PART_CHUNKS", 2)
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(plain(made_up(60, seed=number % 3)))
    (folder / "bad.txt").write_bytes(b"a red cat.\n" * 9 + b"bad \xff line\n\n\xff the old dog.\n" + b"a blue bird.\n" * 9)
    (folder / "image.png").write_bytes(bytes(300))
    (folder / "more.tar").write_bytes(tar_of({"a.txt": plain(made_up(40, seed=9)).encode(), "b": plain(made_up(20)).encode()}))
    return folder


OPTIONS = PrepareOptions(heldout=0.1, workers=1, shard_tokens=2500)


def request(text: Path, out: str, **changes: Any) -> dict[str, Any]:
    """Arguments of `prepare`."""
    settings: dict[str, Any] = {
        "inputs": (str(text),),
        "out": text.parent / out,
        "tokenizer": TokenizerChoice(write_vocabulary(text.parent / "vocab.txt")),
        "options": OPTIONS,
        "progress": Silent(),
    }
    return settings | changes


def folders(text: Path) -> list[Path]:
    """The folders of unfinished work."""
    return list(text.parent.glob(".*"))


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int, request: dict[str, Any]) -> Path:
    """Stop `prepare` after some parts; returns the folder of its work."""
    left = after

    def written(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return make(*arguments, **options)

    make = module._written
    with monkeypatch.context() as broken:
        broken.setattr(module, "_written", written)
        with pytest.raises(KeyboardInterrupt, match="Run the same command again to continue"):
            prepare(**request)
    (folder,) = Path(request["out"]).parent.glob(".*")
    return folder


def test_the_bytes_have_not_changed(text: Path) -> None:
    """Golden: they follow from the text, the settings and the vocabulary."""
    for name in ("3.txt", "bad.txt", "image.png", "more.tar"):
        (text / name).unlink()
    report = prepare(**request(text, "whole"))
    statistics = hashlib.sha256(report.manifest.statistics.model_dump_json().encode()).hexdigest()
    assert report.manifest.fingerprint == "dfdb62906f75f6ea822a799bf66efd5b705fbaf5c9c0ce8d08975b54d2dae8f8"
    assert report.manifest.token_counts.sha256 == "8cc83a638777a2440c81fe4b119b64309aae3268392689f53fc64f5cc71cd807"
    assert statistics == "70528e5efe29b4e9641b7f71f3e6ebaf3f95ce9146ec43b1b1e23576010d04a4"
    assert not folders(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"options": PrepareOptions(heldout=0.0005, workers=2, shard_tokens=600)},
        {"options": replace(OPTIONS, near_duplicates=0.8)},
        {"tokenizer": TokenizerChoice(train="wordpiece", vocab_size=290)},
    ],
    ids=["tiny shards", "near-duplicates", "trained tokenizer"],
)
def test_interrupted_work_continues_and_gives_the_same_bytes(
    text: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare(**request(text, "whole", **changes)).manifest
    assert [problem.kind for problem in whole.problems] == ["invalid UTF-8, replaced", "file skipped, as it is not text"]
    work = interrupt(monkeypatch, 3, request(text, "parts", **changes))
    first = {path: path.stat().st_mtime_ns for path in work.glob("*.part")}
    assert len(first) == 3
    interrupt(monkeypatch, 2, request(text, "parts", **changes))
    assert first.items() <= {path: path.stat().st_mtime_ns for path in work.glob("*.part")}.items(), "made again"
    monkeypatch.setattr("discern.data.prepare.train_on", None)  # a tokenizer is trained once
    assert prepare(**request(text, "parts", **changes)).manifest == whole
    assert contents(text.parent / "parts") == contents(text.parent / "whole")
    assert not folders(text)


def test_work_on_other_text_or_with_other_settings_is_not_continued(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = interrupt(monkeypatch, 3, request(text, "data"))
    other = replace(OPTIONS, heldout=0.2)
    prepare(**request(text, "other", options=other))
    prepare(**request(text, "data", options=other))
    assert contents(text.parent / "data") == contents(text.parent / "other")
    assert not work.exists()
    work = interrupt(monkeypatch, 3, request(text, "more"))
    path = text / "1.txt"
    path.write_bytes(path.read_bytes().replace(b"cat", b"dog", 1))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))  # tests are quicker than the clocks of some file systems
    prepare(**request(text, "again"))
    prepare(**request(text, "more"))
    assert contents(text.parent / "more") == contents(text.parent / "again")


def test_an_input_that_changes_while_it_is_read(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = module._written

    def written(path: Path, *arguments: Any, **options: Any) -> Any:
        with (text / "1.txt").open("a") as file:
            file.write("more")
        return original(path, *arguments, **options)

    monkeypatch.setattr(module, "_written", written)
    with pytest.raises(DataError, match=r"1\.txt has changed while it was read"):
        prepare(**request(text, "data"))
    assert not (text.parent / "data").exists()


def test_an_input_that_fails_keeps_what_is_done(text: Path) -> None:
    (text / "cut.tar").write_bytes(tar_of({"a": b"x" * 5000})[:2000])
    with pytest.raises(DataError, match=r"cut\.tar"):
        prepare(**request(text, "data"))
    (work,) = folders(text)
    assert len(list(work.glob("*.json"))) > 4
    for path in text.iterdir():
        if path.name != "cut.tar":
            path.unlink()
    with pytest.raises(DataError, match=r"cut\.tar"):
        prepare(**request(text, "alone"))
    assert folders(text) == [work], "nothing is worth keeping"


def test_a_machine_that_does_not_see_the_folder_or_has_other_versions(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = interrupt(monkeypatch, 1, request(text, "data"))
    with pytest.raises(DataError, match="does not see") as raised:
        make_piece(str(work.with_name("elsewhere")), 0)
    assert "mounts" in str(raised.value.hint)
    found = json.loads((work / "job.json").read_text())
    (work / "job.json").write_text(json.dumps(found | {"versions": {"discern": "0.0.1"}}))
    module.job_of.cache_clear()
    with pytest.raises(DataError, match=r"'discern': '0\.0\.1'"):
        make_piece(str(work), 0)


def planted(folder: Path) -> None:
    """Sixty different documents, then copies of half of them with one word in a hundred changed, in files of ten."""
    draw = random.Random(3)
    words = [f"{first}{second}" for first in WORDS for second in WORDS]
    originals = [[draw.choice(words) for _ in range(150)] for _ in range(60)]
    copies = [list(words_of_one) for words_of_one in originals[::2]]
    for copy in copies:
        copy[draw.randrange(150)] = "a"
    texts = [" ".join(document) for document in originals + copies]
    folder.mkdir()
    for first in range(0, len(texts), 10):
        (folder / f"{first:03d}.txt").write_text("\n\n".join(texts[first : first + 10]))


def test_planted_near_duplicates_are_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALLEST_PIECE", 1)
    text = tmp_path / "text"
    planted(text)
    options = PrepareOptions(heldout=0.2, workers=1, near_duplicates=0.8)
    (advice,) = (line for line in check([str(text)], options=options, progress=Silent()).advice if "near-duplicates" in line)
    assert advice.startswith("30 documents are near-duplicates of others (similarity of 0.8), and ")
    report = prepare(**request(text, "whole", options=options))
    found = report.manifest.near_duplicates
    assert found is not None
    assert (found.removed, found.clusters, found.cluster_sizes) == (30, 30, {"2": 30})
    assert (found.bands, found.rows) == (21, 6)
    assert report.values()["near_duplicates"] == 30

    # What is left is the originals: the data set of the first six files, with the same documents held out.
    for path in sorted(text.iterdir())[6:]:
        path.unlink()
    alone = prepare(**request(text, "alone", options=replace(options, near_duplicates=None)))
    assert alone.manifest.fingerprint == report.manifest.fingerprint
    same = {"documents", "tokens", "words", "characters", "duplicates", "document_lengths"}
    assert alone.manifest.statistics.model_dump(include=same) == report.manifest.statistics.model_dump(include=same)


def test_a_ray_cluster_gives_the_bytes_of_one_process(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options = PrepareOptions(heldout=0.1, workers=2, shard_tokens=3000, near_duplicates=0.9)
    prepare(**request(text, "whole", options=options))
    prepare(**request(text, "ray", options=options, engine="ray"))
    assert contents(text.parent / "ray") == contents(text.parent / "whole")
    assert not folders(text)


@pytest.mark.slow
def test_a_machine_that_dies_in_the_middle_costs_nothing(tmp_path: Path) -> None:
    """Two machines of one processor each, as processes of this machine."""
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="the extra 'ray' is not installed")
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    text = tmp_path / "text"
    text.mkdir()
    for number in range(8):  # each file is larger than the smallest piece
        (text / f"{number}.txt").write_text(plain(made_up(6000, seed=number)))
    options = ["--tokenizer", str(write_vocabulary(tmp_path / "vocab.txt"))]
    program = [sys.executable, "-m", "discern", "prepare", str(text), *options]
    second = cluster.add_node(num_cpus=1)
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    arguments = [*program, "--out", str(tmp_path / "ray"), "--engine", "ray", "--json"]
    with subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True) as running:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and not any(tmp_path.glob(".ray.*/*.part")):
            time.sleep(0.1)
        assert running.poll() is None, "the command ended before the machine died"
        cluster.remove_node(second, allow_graceful=False)
        printed, _ = running.communicate(timeout=600)
    cluster.shutdown()
    assert running.returncode == 0
    assert json.loads(printed)["documents"] == 48000
    subprocess.run([*program, "--out", str(tmp_path / "whole"), "--workers", "1"], check=True, capture_output=True)
    assert contents(tmp_path / "ray") == contents(tmp_path / "whole")
