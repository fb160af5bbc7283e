"""Where results may be written: never over or around what the command reads, and in no data set, run or model."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from discern.errors import ConfigError
from discern.storage.output import check_apart, check_output


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "first"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("run.json", "report.html", "checkpoints/model.safetensors"):
        (folder / name).write_text("old")
    return folder


def test_the_output_is_neither_a_folder_nor_the_input(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    check_output("--out", None, "found.jsonl", tmp_path / "a")
    check_output("--out", tmp_path / "b", "found.jsonl", tmp_path / "a", None)
    check_output("--out", tmp_path / "a", "found.jsonl", Path("-"))
    with pytest.raises(ConfigError, match=r"is a folder\n.*--html .*/page\.html"):
        check_output("--html", tmp_path, "page.html", tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match="is the input"):
        check_output("--out", tmp_path / "a", "found.jsonl", None, tmp_path / "link")


@pytest.mark.parametrize(
    "name", ["run.json", "new.html", "checkpoints/model.safetensors", "checkpoints/../run.json", "new/folder/page.html"]
)
def test_nothing_is_written_inside_what_is_read(run: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.parent / "alias").symlink_to(run)
    monkeypatch.chdir(run.parent)
    for read in (run, Path("first"), Path("../runs/alias")):
        for out in (run / name, Path("first") / name, Path("alias") / name, run / "checkpoints" / ".." / name):
            with pytest.raises(ConfigError, match="lies inside"):
                check_output("--out", out, "page.html", read)


def test_links_do_not_get_round_it(run: Path, tmp_path: Path) -> None:
    (tmp_path / "soft").symlink_to(run / "run.json")
    with pytest.raises(ConfigError, match="lies inside"):
        check_output("--out", tmp_path / "soft", "page.html", run)
    os.link(run / "run.json", tmp_path / "hard")
    with pytest.raises(ConfigError, match=r"the same file as .*run\.json"):
        check_output("--out", tmp_path / "hard", "page.html", run)
    (tmp_path / "dangling").symlink_to(run / "not-there-yet")
    with pytest.raises(ConfigError, match="lies inside"):
        check_output("--out", tmp_path / "dangling", "page.html", run)


def test_the_file_that_is_made_for_a_folder(run: Path, tmp_path: Path) -> None:
    check_output("--out", run / "report.html", "report.html", run, own=("report.html",))
    with pytest.raises(ConfigError, match="lies inside"):
        check_output("--out", run / "checkpoints" / "report.html", "report.html", run, own=("report.html",))
    (run / "report.html").unlink()
    (run / "report.html").symlink_to("run.json")
    with pytest.raises(ConfigError, match="lies inside"):
        check_output("--out", run / "report.html", "report.html", run, own=("report.html",))


@pytest.mark.parametrize(
    "marks",
    [
        ("manifest.json", "tokenizer.json"),
        ("plan.json", "tokenizer.json"),
        ("run.json",),
        ("finetuned.json",),
        ("comparison.json",),
        ("model.safetensors",),
    ],
)
def test_nothing_is_written_inside_any_result_though_it_is_not_read(marks: tuple[str, ...], tmp_path: Path) -> None:
    made, elsewhere = tmp_path / "project" / "made", tmp_path / "elsewhere"
    (made / "parts" / "step-1").mkdir(parents=True)
    elsewhere.mkdir()
    (elsewhere / "shard").touch()
    (made / "shard").symlink_to(elsewhere / "shard")
    for name in marks:
        (made / name).touch()
    (made.parent / "link").symlink_to(made / "parts")
    names = (*marks, "new.jsonl", "parts/step-1/state.json", "not/there/yet", "shard", "report.html", "../link/new.jsonl")
    for out in [made / name for name in names]:
        with pytest.raises(ConfigError, match=r"lies inside .*made, which is"):
            check_output("--out", out, "found.jsonl", None, own=("report.html",))
        with pytest.raises(ConfigError, match=r"lies inside .*\n.*hint: .*project/made-"):
            check_apart("--out", out)
    for out in (made.parent / "results.json", made / ".." / "shard", elsewhere / "new.jsonl"):
        check_output("--out", out, "found.jsonl", None)
        check_apart("--out", out, made)


def test_what_cannot_be_reached_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for check in (partial(check_output, "--out", example="found.jsonl"), partial(check_apart, "--out")):
        for out in (tmp_path / "loop", tmp_path / "loop" / "run"):
            with pytest.raises(ConfigError, match=r"cannot write to .*loop.*: Too many levels of symbolic links\n.*hint: "):
                check(out=out)


def test_a_plain_folder_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").touch()
    check_output("--out", tmp_path / "texts" / "b.jsonl", "b.jsonl", tmp_path / "texts")
    check_apart("--out", tmp_path / "texts" / "data", tmp_path / "texts")


def test_an_output_folder_stands_apart_from_what_is_read(run: Path, tmp_path: Path) -> None:
    check_apart("--out", run.parent / "second", run, None, Path("-"), tmp_path / "not-there")
    with pytest.raises(ConfigError, match=r"lies inside .*\n.*hint: .*first-export") as found:
        check_apart("--out", run / "export", run)
    assert "--out" in str(found.value)
    with pytest.raises(ConfigError, match="is read by the command"):
        check_apart("--out", run / "checkpoints" / "..", run)
    with pytest.raises(ConfigError, match=r"holds .*first, which the command reads"):
        check_apart("--out", run.parent, run)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to everything")
def test_a_write_protected_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").touch(mode=0o444)
    with pytest.raises(ConfigError, match="write-protected"):
        check_output("--out", tmp_path / "mine", "found.jsonl")


def test_devices_and_pipes_may_be_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for stream in ("/dev/null", "/dev/stdout", "/dev/fd/1"):
        check_output("--out", Path(stream), "found.jsonl", tmp_path)
    check_output("--out", tmp_path / "pipe", "found.jsonl", tmp_path)
