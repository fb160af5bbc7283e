"""Where results may be written, and folders that appear whole or not at all, whoever else writes or is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from discern.errors import ConfigError, DataError
from discern.storage.files import OutputFolder, check_apart, check_output

HOLDER = """
import sys, time
from pathlib import Path
from discern.storage.files import OutputFolder
with OutputFolder(Path(sys.argv[1])).staged() as folder:
    (folder.path / "weights").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def make(out: Path, text: str, *, replace: bool = True) -> None:
    with OutputFolder(out).staged() as folder:
        (folder.path / "file").write_text(text)
        folder.publish(replace=replace)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "first"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("run.json", "report.html", "checkpoints/model.safetensors"):
        (folder / name).write_text("old")
    return folder


def test_the_output_is_neither_a_folder_nor_the_input(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    check_output("--out", None, "found.jsonl", tmp_path / "a")
    check_output("--out", tmp_path / "b", "found.jsonl", tmp_path / "a", tmp_path, None)
    with pytest.raises(ConfigError, match=r"is a folder\n.*--html .*/page\.html"):
        check_output("--html", tmp_path, "page.html", tmp_path / "a")
    with pytest.raises(ConfigError, match="would create a file named '-'"):
        check_output("--out", Path("-"), "found.jsonl")
    with pytest.raises(ConfigError, match="is the input"):
        check_output("--out", tmp_path / "a", "found.jsonl", None, tmp_path / "link")


@pytest.mark.parametrize(
    "marks",
    [
        *("manifest.json tokenizer.json", "run.json", "finetuned.json"),
        *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"),
    ],
)
def test_nothing_is_written_inside_a_data_set_a_run_or_a_model(marks: str, tmp_path: Path) -> None:
    made, elsewhere = tmp_path / "project" / "made", tmp_path / "elsewhere"
    (made / "parts" / "step-1").mkdir(parents=True)
    elsewhere.mkdir()
    (made.parent / "link").symlink_to(made / "parts")
    (made.parent / "dangling").symlink_to(made / "not-there-yet")
    for name in marks.split():
        (made / name).touch()
    for name in (*marks.split(), "new.jsonl", "parts/../x", "not/there/yet", "../link/new.jsonl", "../dangling"):
        with pytest.raises(ConfigError, match=r"lies inside .*made, which is"):
            check_output("--out", made / name, "found.jsonl", None)
        with pytest.raises(ConfigError, match=r"lies inside .*\n.*hint: .*project/made-"):
            check_apart(made / name)
    for out in (made.parent / "results.json", made / ".." / "shard", elsewhere / "new.jsonl"):
        check_apart(out, made)


def test_a_file_that_is_made_for_a_folder_may_be_written_there(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run.parent / "alias").symlink_to(run)
    monkeypatch.chdir(run.parent)
    for folder in (run, Path("first"), Path("../runs/alias")):
        check_output("--out", folder / "report.html", "report.html", run, own=("report.html",))
        with pytest.raises(ConfigError, match="lies inside"):
            check_output("--out", folder / "checkpoints" / "report.html", "report.html", run, own=("report.html",))
    (run / "report.html").unlink()
    (run / "report.html").symlink_to("run.json")
    with pytest.raises(ConfigError, match="lies inside"):
        check_output("--out", run / "report.html", "report.html", run, own=("report.html",))


def test_an_output_folder_stands_apart_from_what_is_read(run: Path, tmp_path: Path) -> None:
    check_apart(run.parent / "second", run, None, tmp_path / "not-there")
    with pytest.raises(ConfigError, match=r"lies inside .*\n.*hint: .*--out .*first-export"):
        check_apart(run / "export", run)
    with pytest.raises(ConfigError, match="is the input"):
        check_apart(run / "checkpoints" / "..", run)
    with pytest.raises(ConfigError, match=r"holds .*first, which the command reads"):
        check_apart(run.parent, run)


def test_devices_and_pipes_may_be_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for stream in ("/dev/null", "/dev/stdout", "/dev/fd/1", tmp_path / "pipe"):
        check_output("--out", Path(stream), "found.jsonl", tmp_path)


def test_a_living_process_is_left_alone_and_a_killed_one_cleared_up_after(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(out)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(DataError, match=r"another process is writing .*b\n.*wait until"):
            make(out, "mine")
        assert (out.parent / ".b.partial" / "weights").read_text() == "half"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert names(out.parent) == [".b.partial", ".b.partial.lock"]
    make(out, "mine")
    assert (names(out.parent), names(out)) == (["b"], ["file"])


@pytest.mark.parametrize("failing", [1, 2])
def test_a_replacement_that_fails_puts_the_old_folder_back(tmp_path: Path, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "out", "old")
    real, calls = Path.rename, []

    def rename(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == failing:
            raise KeyboardInterrupt
        return real(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path / "out", "new")
    assert ((tmp_path / "out" / "file").read_text(), names(tmp_path)) == ("old", ["out"])
    with pytest.raises(DataError, match="not empty"):
        make(tmp_path / "out", "new", replace=False)


@pytest.mark.parametrize("meanwhile", ["nothing", "an empty folder", "a new one"])
def test_what_a_killed_process_had_moved_aside_comes_back(tmp_path: Path, meanwhile: str) -> None:
    out = tmp_path / "out"
    make(out, "old")
    out.rename(tmp_path / ".out.partial.previous")
    if meanwhile != "nothing":
        out.mkdir()
    if meanwhile == "a new one":
        (out / "file").write_text("newer")
    with pytest.raises(RuntimeError), OutputFolder(out).staged():
        raise RuntimeError
    assert (out / "file").read_text() == ("newer" if meanwhile == "a new one" else "old")
    assert names(tmp_path) == ["out"]


def test_single_files_are_replaced(tmp_path: Path) -> None:
    make(tmp_path / "out", "old")
    (tmp_path / "out" / "other").write_text("stays")
    with OutputFolder(tmp_path / "out").staged() as folder:
        (folder.path / "file").write_text("new")
        folder.replace_files(["file"])
    assert [(tmp_path / "out" / name).read_text() for name in ("file", "other")] == ["new", "stays"]
    assert names(tmp_path) == ["out"]
