"""A file appears whole or not at all; what is no plain file is never turned into one."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from discern.errors import DataError
from discern.storage.files import partial_name, whole_file, write_bytes, write_text

HOLDER = """
import sys, time
from pathlib import Path
from discern.storage.files import whole_file
with whole_file(Path(sys.argv[1])) as file:
    file.write("theirs")
    file.flush()
    print("ready", flush=True)
    time.sleep(60)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def another_writer(path: Path) -> subprocess.Popen[str]:
    """A process in the middle of writing a file."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_text(path, "old")
    path.chmod(0o640)
    before = path.stat().st_ino
    write_bytes(path, b"new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode), names(tmp_path)) == ("new", 0o640, ["page.html"])
    assert path.stat().st_ino != before
    with pytest.raises(TypeError), whole_file(path) as file:
        file.writelines(["half", 1])  # type: ignore[list-item]
    assert (path.read_text(), names(tmp_path)) == ("new", ["page.html"])


def test_parents_are_made_and_long_names_fit(tmp_path: Path) -> None:
    path = tmp_path / "new" / ("ä" * 120 + ".jsonl")
    with whole_file(path) as file:
        file.write("line\n")
    assert path.read_text() == "line\n"
    assert len(partial_name(path.name)) < 100
    assert partial_name("a" * 200) != partial_name("a" * 201)


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file").write_text("old")
    for link, target in (("link", "real/file"), ("dangling", "real/new")):
        (tmp_path / link).symlink_to(target)
        write_text(tmp_path / link, link)
        assert (tmp_path / link).is_symlink()
        assert (tmp_path / target).read_text() == link
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        write_text(tmp_path / "a", "x")
    assert names(tmp_path / "real") == ["file", "new"]


def test_a_pipe_gets_the_text_and_stays_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    with whole_file(tmp_path / "pipe") as file:
        file.write("through")
    reader.join(10)
    assert read == ["through"]
    assert (tmp_path / "pipe").is_fifo()
    assert names(tmp_path) == ["pipe"]


def test_devices_stay_devices(tmp_path: Path) -> None:
    write_text(Path("/dev/null"), "gone")
    assert Path("/dev/null").is_char_device()
    (tmp_path / "link").symlink_to("/dev/null")
    write_text(tmp_path / "link", "gone")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(OSError, match="No space"):
        write_text(Path("/dev/full"), "full")
    assert Path("/dev/full").is_char_device()


def test_sockets_and_folders_are_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for path, kind in ((tmp_path / "socket", "a socket"), (tmp_path, "a folder")):
            with pytest.raises(OSError, match=kind):
                write_text(path, "x")
            with pytest.raises(DataError, match=f"cannot write .*{kind}"), whole_file(path):
                pass


def test_standard_output_by_its_name(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from discern.storage.files import write_text\n"
        "print('before'); write_text(Path('/dev/stdout'), 'results\\n'); print('after')"
    )
    with (tmp_path / "all").open("w") as file:
        subprocess.run([sys.executable, "-c", program], stdout=file, check=True)
    assert (tmp_path / "all").read_text() == "before\nresults\nafter\n"


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    with another_writer(path) as process:
        assert names(tmp_path) == [".found.jsonl.partial"]
        with pytest.raises(DataError, match=r"another process is writing .*found\.jsonl\n.*wait") as refused, whole_file(path):
            pass
        assert "space" not in str(refused.value)
        assert names(tmp_path) == [".found.jsonl.partial"]
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert names(tmp_path) == [".found.jsonl.partial"]
    with whole_file(path) as file:
        file.write("ours")
    assert (path.read_text(), names(tmp_path)) == ("ours", ["found.jsonl"])


def test_a_partial_file_that_leads_elsewhere_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    for make in (os.symlink, os.link):
        make(tmp_path / "precious", tmp_path / partial_name("out"))
        write_text(tmp_path / "out", "new")
        assert ((tmp_path / "precious").read_text(), (tmp_path / "out").read_text()) == ("keep", "new")
    assert names(tmp_path) == ["out", "precious"]


def test_writers_of_the_same_small_file_take_turns(tmp_path: Path) -> None:
    path, texts = tmp_path / "figures.json", [str(number) * 10_000 for number in range(8)]
    threads = [threading.Thread(target=write_text, args=(path, text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert names(tmp_path) == ["figures.json"]
