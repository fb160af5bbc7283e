"""A folder appears whole or not at all, two processes never make the same, and what a killed one left goes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from discern.errors import DataError
from discern.storage.output import OutputFolder

HOLDER = """
import sys, time
from pathlib import Path
from discern.storage.output import OutputFolder
with OutputFolder(Path(sys.argv[1])).staged() as folder:
    (folder.path / "weights").write_text("half")
    print("ready", flush=True)
    time.sleep(60)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def make(out: Path, text: str) -> None:
    with OutputFolder(out).staged() as folder:
        (folder.path / "file").write_text(text)
        folder.publish(replace=True)


def test_a_folder_and_those_above_it(tmp_path: Path) -> None:
    make(tmp_path / "a" / "b", "new")
    assert (tmp_path / "a" / "b" / "file").read_text() == "new"
    assert names(tmp_path / "a") == ["b"]
    with pytest.raises(RuntimeError), OutputFolder(tmp_path / "c" / "d").staged():
        raise RuntimeError
    assert names(tmp_path) == ["a"]


def test_a_living_process_is_left_alone_and_a_killed_one_cleared_up_after(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "e")], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(DataError, match=r"another process is writing .*e\n.*wait until") as refused:
            make(tmp_path / "e", "mine")
        assert "space" not in str(refused.value)
        assert (tmp_path / ".e.partial" / "weights").read_text() == "half"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert names(tmp_path) == [".e.partial", ".e.partial.lock"]
    make(tmp_path / "e", "mine")
    assert names(tmp_path) == ["e"]
    assert names(tmp_path / "e") == ["file"]


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
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert names(tmp_path) == ["out"]


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


def test_a_filled_folder_makes_way_only_if_told(tmp_path: Path) -> None:
    make(tmp_path / "out", "old")
    with OutputFolder(tmp_path / "out").staged() as folder:
        (folder.path / "file").write_text("new")
        with pytest.raises(OSError, match="not empty"):
            folder.publish(replace=False)
    assert (tmp_path / "out" / "file").read_text() == "old"


def test_single_files_are_replaced(tmp_path: Path) -> None:
    make(tmp_path / "out", "old")
    (tmp_path / "out" / "other").write_text("stays")
    with OutputFolder(tmp_path / "out").staged() as folder:
        (folder.path / "file").write_text("new")
        folder.replace_files(["file"])
    assert [(tmp_path / "out" / name).read_text() for name in ("file", "other")] == ["new", "stays"]
    assert names(tmp_path) == ["out"]


def test_a_link_in_the_place_of_the_lock_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    os.symlink(tmp_path / "precious", tmp_path / ".out.partial.lock")
    make(tmp_path / "out", "new")
    assert (tmp_path / "precious").read_text() == "keep"
    assert names(tmp_path) == ["out", "precious"]
