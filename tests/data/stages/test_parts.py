"""The stages give the bytes of one process, whatever was interrupted, damaged or run twice."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from discern.data.dataset.build import BuildOptions
from discern.data.prepare import merge, prepare, prepare_part
from discern.data.reports import warnings_of
from discern.data.stages import plan as planning
from discern.data.stages.plan import read_plan, work_folder
from discern.data.stages.run import Work
from discern.data.stages.tasks import perform
from discern.data.tokenizer.choice import TokenizerChoice
from discern.errors import ConfigError, DataError, DiscernError
from discern.progress import Silent
from tests.data.small_text import WORDS, made_up, plain, tar_of, write_vocabulary

PARTS = 3


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of files that are pieces of their own: text with copies, an archive, and what is reported."""
    monkeypatch.setattr(planning, "SMALLEST_PIECE", 1)
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(plain(made_up(60, seed=number % 3)))
    (folder / "bad.txt").write_bytes(b"a red cat.\nbad \xff line\n\n\xff the old dog.\n")
    (folder / "image.png").write_bytes(bytes(300))
    (folder / "more.tar").write_bytes(tar_of({"a.txt": plain(made_up(40, seed=9)).encode(), "b": plain(made_up(20)).encode()}))
    return folder


def request(text: Path, out: str, **changes: Any) -> dict[str, Any]:
    """Arguments of `prepare` and `prepare_part`."""
    settings: dict[str, Any] = {
        "inputs": (str(text),),
        "out": text.parent / out,
        "tokenizer": TokenizerChoice(write_vocabulary(text.parent / "vocab.txt")),
        "build": BuildOptions(heldout=0.1, workers=1, shard_tokens=2500),
        "progress": Silent(),
    }
    return settings | changes


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run_part(text: Path, part: int, out: str = "parts", **changes: Any) -> None:
    prepare_part(part=part, parts=PARTS, **request(text, out, **changes))


def do(text: Path, *tasks: Any, out: str = "parts") -> None:
    """Do tasks in this process."""
    work = work_folder(text.parent / out)
    plan = read_plan(work)
    assert plan is not None
    for task in tasks:
        perform(str(work), plan.fingerprint, task)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"build": BuildOptions(heldout=0, workers=1)},
        {"build": BuildOptions(heldout=0.0005, workers=2, shard_tokens=600)},
        {"tokenizer": TokenizerChoice(train="wordpiece", vocab_size=290)},
    ],
    ids=["shards", "nothing held out", "one held out, tiny shards", "trained tokenizer"],
)
def test_parts_in_any_order_are_the_bytes_of_one_process(text: Path, changes: dict[str, Any]) -> None:
    (text / "unknown.txt").write_text("a ☂ ☃\n\nthe ☂\n")
    whole = prepare(**request(text, "whole", **changes))
    for part in (2, 0, 1):
        run_part(text, part, **changes)
    report = merge(text.parent / "parts", workers=1, progress=Silent())
    assert warnings_of(report.manifest) == warnings_of(whole.manifest)
    assert contents(text.parent / "parts") == contents(text.parent / "whole")
    assert [problem.kind for problem in report.manifest.problems] == [
        "invalid UTF-8, replaced",
        "file skipped, as it is not text",
    ]
    assert not list(text.parent.glob(".*"))


def test_the_bytes_have_not_changed(text: Path) -> None:
    """Recorded before data sets were made in stages."""
    for name in ("3.txt", "bad.txt", "image.png", "more.tar"):
        (text / name).unlink()
    report = prepare(**request(text, "whole"))
    statistics = hashlib.sha256(report.manifest.statistics.model_dump_json().encode()).hexdigest()
    assert report.manifest.fingerprint == "dfdb62906f75f6ea822a799bf66efd5b705fbaf5c9c0ce8d08975b54d2dae8f8"
    assert report.manifest.token_counts.sha256 == "8cc83a638777a2440c81fe4b119b64309aae3268392689f53fc64f5cc71cd807"
    assert statistics == "864743012d00b73c5e1b15e17349f37d0e37bf0a06230a8049744ae58ba06ed9"


def test_a_missing_part_is_named(text: Path) -> None:
    run_part(text, 0)
    with pytest.raises(DataError, match=r"from parts 1/3, 2/3") as raised:
        merge(text.parent / "parts", workers=1, progress=Silent())
    assert "--part 1/3" in str(raised.value.hint)
    assert not (text.parent / "parts").exists()


def test_nothing_to_merge(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no parts"):
        merge(tmp_path / "data", workers=1, progress=Silent())


def test_parts_with_other_settings_are_refused(text: Path) -> None:
    run_part(text, 0)
    other = write_vocabulary(text.parent / "other.txt", leave_out="cat")
    with pytest.raises(ConfigError, match="tokenizer: "):
        run_part(text, 1, tokenizer=TokenizerChoice(other))
    with pytest.raises(ConfigError, match=r"heldout: 0\.1 -> 0\.2"):
        run_part(text, 1, build=BuildOptions(heldout=0.2, workers=1, shard_tokens=2500))
    with (text / "1.txt").open("a") as file:
        file.write("more")
    with pytest.raises(ConfigError, match=r"input .*1\.txt has changed since: \d+ -> \d+ bytes"):
        run_part(text, 1)


def touched(path: Path) -> None:
    """Change a file to another text of the same size."""
    content = path.read_bytes()
    path.write_bytes(content.replace(b"cat", b"dog", 1))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))  # tests are quicker than the clocks of some file systems


def test_an_input_of_the_same_size_that_has_changed(text: Path) -> None:
    run_part(text, 0)
    work = work_folder(text.parent / "parts")
    touched(text / "1.txt")
    with pytest.raises(ConfigError, match=r"different input \(input .*1\.txt has changed since: modified 20") as raised:
        run_part(text, 1)
    assert raised.value.hint == f"to start over: rm -r '{work}'"
    prepare(**request(text, "parts", overwrite=True, build=BuildOptions(workers=1, near_duplicates=0.9)))
    (text / "new.txt").write_text("a cat")
    run_part(text, 0, out="more")
    (text / "new.txt").unlink()
    with pytest.raises(ConfigError, match=r"input .*new\.txt is gone"):
        run_part(text, 1, out="more")


def test_an_input_that_changes_before_its_task(text: Path) -> None:
    for part in range(PARTS):
        run_part(text, part)
    shutil.rmtree(work_folder(text.parent / "parts") / "pieces" / "000001")
    touched(text / "1.txt")
    with pytest.raises(DataError, match=r"input .*1\.txt has changed since the work was started: modified 20"):
        do(text, ("pieces", 0), ("pieces", 1), ("pieces", 2))
    (text / "1.txt").unlink()
    with pytest.raises(DataError, match=r"1\.txt cannot be read"):
        do(text, ("pieces", 0), ("pieces", 1), ("pieces", 2))


def test_what_differs_is_told_without_signatures(text: Path) -> None:
    run_part(text, 0)
    plan = read_plan(work_folder(text.parent / "parts"))
    assert plan is not None
    piece = (replace(plan.pieces[0][0], name="https://here/a", address="https://here/a?Signature=0ld"),)
    before = replace(plan, inputs=("https://here/a?Signature=0ld",), pieces=(piece,))
    now = replace(
        plan,
        inputs=("https://here/a?Signature=n3w",),
        pieces=((replace(piece[0], address="https://here/a?Signature=n3w"),),),
    )
    assert planning.differences(before, now) == ["inputs: the query or signature of an address in https://here/a"]
    assert planning.differences(plan, replace(plan, inputs=("b",))) == [f"inputs: {text} -> b"]


def test_overwriting_trains_another_tokenizer(text: Path) -> None:
    run_part(text, 0, tokenizer=TokenizerChoice(train="wordpiece", vocab_size=100))
    other = {"tokenizer": TokenizerChoice(train="wordpiece", vocab_size=80)}
    build = BuildOptions(heldout=0.1, workers=1, near_duplicates=0.8)
    with pytest.raises(ConfigError, match="vocab_size: 100 -> 80"):
        prepare(**request(text, "parts", build=build, **other))
    assert prepare(**request(text, "parts", build=build, overwrite=True, **other)).manifest.tokenizer.vocab_size == 80


OTHER_VERSIONS = (
    {"versions": {"discern": "0.0.1", "tokenizers": "0.1"}},
    "different command (versions: discern 0.0.1, tokenizers 0.1 ->",
)


@pytest.mark.parametrize(
    ("tokenizer", "cases"),
    [
        ({}, [OTHER_VERSIONS, ({"format": "discern-plan"}, "of another version of discern"), ({"bands": 3}, "is damaged")]),
        ({"tokenizer": TokenizerChoice(train="wordpiece", vocab_size=100)}, [OTHER_VERSIONS]),
    ],
    ids=["tokenizer", "trained tokenizer"],
)
def test_unfinished_work_of_another_version_is_replaced_and_not_continued(
    text: Path, tokenizer: dict[str, Any], cases: list[tuple[dict[str, Any], str]]
) -> None:
    build = BuildOptions(heldout=0.1, workers=1, near_duplicates=0.8)
    prepare(**request(text, "whole", build=build, **tokenizer))
    work = work_folder(text.parent / "parts")

    def left_by(**changes: Any) -> None:
        """Unfinished work of another command, in which a piece has other tokens."""
        shutil.rmtree(work, ignore_errors=True)
        run_part(text, 0, build=build, **tokenizer)
        plan = json.loads((work / "plan.json").read_text())
        (work / "plan.json").write_text(json.dumps({**plan, "parts": None, **changes}, indent=1))
        shutil.copytree(work / "pieces" / "000003", work / "pieces" / "000001")

    for changes, says in cases:
        left_by(**changes)
        with pytest.raises(DiscernError, match=re.escape(says)) as raised:
            prepare(**request(text, "parts", build=build, **tokenizer))
        assert f"rm -r '{work}'" in str(raised.value.hint)
        prepare(**request(text, "parts", build=build, overwrite=True, **tokenizer))
        assert contents(text.parent / "parts") == contents(text.parent / "whole")
        assert not work.exists()
        shutil.rmtree(text.parent / "parts")


def test_an_interrupted_removal_leaves_no_results_without_their_plan(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in range(PARTS):
        run_part(text, part)
    work = work_folder(text.parent / "parts")
    removed: list[str] = []

    def interrupted(path: Path) -> None:
        removed.append(path.name)
        raise KeyboardInterrupt

    monkeypatch.setattr("discern.data.stages.run.shutil.rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Work.begun(text.parent / "parts").discard()
    assert removed == ["pieces"]
    assert (work / planning.PLAN_NAME).is_file()


def test_damaged_and_half_written_results_are_made_again(text: Path) -> None:
    prepare(**request(text, "whole"))
    for part in range(PARTS):
        run_part(text, part)
    pieces = work_folder(text.parent / "parts") / "pieces"
    with (pieces / "000001" / "block.tokens").open("rb+") as file:
        file.write(b"\xff")
    (pieces / "000002" / "digests").unlink()
    (pieces / "000003" / "done.json").write_text("{")
    shutil.copytree(pieces / "000000", pieces / ".000000.a-machine-that-died")
    merge(text.parent / "parts", workers=1, progress=Silent())
    assert contents(text.parent / "parts") == contents(text.parent / "whole")


def test_two_attempts_at_a_task_do_no_harm(text: Path) -> None:
    run_part(text, 0)
    work = work_folder(text.parent / "parts")
    before = contents(work / "pieces" / "000000")
    moved = work / "pieces" / "moved"
    (work / "pieces" / "000000").rename(moved)
    do(text, ("pieces", 0), ("pieces", 0))
    assert contents(work / "pieces" / "000000") == before


def test_a_machine_that_does_not_see_the_folder(text: Path) -> None:
    run_part(text, 0)
    work = work_folder(text.parent / "parts")
    with pytest.raises(DataError, match="does not see") as raised:
        perform(str(work.with_name("elsewhere")), "0", ("pieces", 0))
    assert "mounts" in str(raised.value.hint)
    with pytest.raises(DataError, match="sees another plan"):
        perform(str(work), "0", ("pieces", 0))


def test_another_version_on_one_machine(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_part(text, 0)
    planning.job_of_task.cache_clear()
    monkeypatch.setattr(planning, "library_versions", lambda _: {"discern": "0.0.1", "tokenizers": "0"})
    with pytest.raises(DataError, match=r"discern 0\.0\.1"):
        do(text, ("pieces", 0))


def test_an_input_that_fails_stops_without_losing_the_rest(text: Path) -> None:
    (text / "cut.tar").write_bytes(tar_of({"a": b"x" * 5000})[:2000])
    with pytest.raises(DataError, match=r"cut\.tar"):
        prepare_part(part=0, parts=1, **request(text, "parts"))
    done = sorted(path.name for path in (work_folder(text.parent / "parts") / "pieces").iterdir())
    assert done
    assert not any(name.startswith(".") for name in done)
    plan = json.loads((work_folder(text.parent / "parts") / "plan.json").read_text())
    assert len(plan["pieces"]) == 8


def planted(folder: Path) -> tuple[list[str], list[str]]:
    """Sixty different documents, then copies of half of them with one word in a hundred changed, in files of ten."""
    draw = random.Random(3)
    words = [f"{first}{second}" for first in WORDS for second in WORDS]
    originals = [[draw.choice(words) for _ in range(150)] for _ in range(60)]
    copies = []
    for words_of_one in originals[::2]:
        copy = list(words_of_one)
        copy[draw.randrange(150)] = "a"
        copies.append(copy)
    texts = [" ".join(document) for document in originals + copies]
    for first in range(0, len(texts), 10):
        (folder / f"{first:03d}.txt").write_text("\n\n".join(texts[first : first + 10]))
    return texts[:60], texts[60:]


def test_planted_near_duplicates_are_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SMALLEST_PIECE", 1)
    text = tmp_path / "text"
    text.mkdir()
    planted(text)
    build = BuildOptions(heldout=0.2, workers=1, near_duplicates=0.8)
    report = prepare(**request(text, "whole", build=build))
    found = report.manifest.near_duplicates
    assert found is not None
    assert (found.removed, found.clusters, found.cluster_sizes) == (30, 30, {"2": 30})
    assert (found.bands, found.rows, found.kept) == (21, 6, "first")
    assert report.values()["near_duplicates"] == 30
    for part in range(PARTS):
        run_part(text, part, build=build)
    merge(tmp_path / "parts", workers=1, progress=Silent())
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")

    # What is left is the originals: the data set of the first six files, with the same documents held out.
    for path in sorted(text.iterdir())[6:]:
        path.unlink()
    alone = prepare(**request(text, "alone", build=replace(build, near_duplicates=None)))
    assert alone.manifest.fingerprint == report.manifest.fingerprint
    same = {"documents", "tokens", "words", "characters", "duplicates", "document_lengths"}
    assert alone.manifest.statistics.model_dump(include=same) == report.manifest.statistics.model_dump(include=same)


def test_damage_to_signatures_is_noticed_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SMALLEST_PIECE", 1)
    (tmp_path / "text").mkdir()
    planted(tmp_path / "text")
    for part in range(PARTS):
        run_part(tmp_path / "text", part, build=BuildOptions(heldout=0.2, workers=1, near_duplicates=0.8))
    path = tmp_path / ".parts.parts" / "pieces" / "000000" / "signatures"
    content = bytearray(path.read_bytes())
    content[8] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="signatures is damaged"):
        do(tmp_path / "text", *(("buckets", band) for band in range(21)))
    assert not list((tmp_path / ".parts.parts").glob("buckets/.*"))
    found = merge(tmp_path / "parts", workers=1, progress=Silent()).manifest.near_duplicates
    assert found is not None
    assert (found.removed, found.cluster_sizes) == (30, {"2": 30})


def test_a_stage_that_was_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SMALLEST_PIECE", 1)
    text = tmp_path / "text"
    text.mkdir()
    planted(text)
    build = BuildOptions(heldout=0.2, workers=1, near_duplicates=0.8)
    whole = prepare(**request(text, "whole", build=build))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr("discern.data.stages.duplicates.make_clusters", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(**request(text, "again", build=build))
    assert not (tmp_path / "again").exists()
    links = tmp_path / ".again.parts" / "buckets" / "000003" / "links"
    content = bytearray(links.read_bytes())
    content[0] ^= 1
    links.write_bytes(content)
    with pytest.raises(ConfigError, match=r"unfinished work .*near_duplicates: 0\.8 -> 0\.9"):
        prepare(**request(text, "again", build=replace(build, near_duplicates=0.9)))
    with monkeypatch.context() as broken:
        broken.setattr("discern.data.stages.pieces.make_piece", interrupted)  # not needed a second time
        again = prepare(**request(text, "again", build=build))
    assert again.manifest == whole.manifest
    assert not list(tmp_path.glob(".*"))
