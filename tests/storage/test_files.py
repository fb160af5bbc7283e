"""A file appears whole or not at all; what is no plain file is never turned into one; locks end with their process."""

from __future__ import annotations

import ast
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

import discern
from discern.errors import DataError
from discern.storage.files import alone_in, held, partial_name, whole_file, write_bytes, write_text

fcntl = pytest.importorskip("fcntl")

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


def test_a_file_is_replaced_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    with whole_file(path) as file:
        file.write("old")
    path.chmod(0o640)
    write_bytes(path, b"new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o640)
    with pytest.raises(TypeError), whole_file(path) as file:
        file.writelines(["half", 1])  # type: ignore[list-item]
    assert (path.read_text(), names(path.parent)) == ("new", ["page.html"])


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    for link in ("link", "dangling"):
        (tmp_path / link).symlink_to("real")
        write_text(tmp_path / link, link)
        assert (tmp_path / link).is_symlink()
        assert (tmp_path / "real").read_text() == link


def test_a_pipe_gets_the_text_and_stays_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_text(tmp_path / "pipe", "through")
    reader.join(10)
    assert (read, names(tmp_path), (tmp_path / "pipe").is_fifo()) == (["through"], ["pipe"], True)


def test_devices_sockets_and_folders_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/null")
    write_text(tmp_path / "link", "gone")
    assert Path("/dev/null").is_char_device()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for path, problem in (
            (Path("/dev/full"), "No space"),
            (tmp_path / "socket", "No such device"),
            (tmp_path, "Is a directory"),
        ):
            with pytest.raises(DataError, match=f"cannot write {path}: {problem}"), whole_file(path) as file:
                file.write("x")
    assert names(tmp_path) == ["link", "socket"]


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(DataError, match=r"another process is writing .*found\.jsonl\n.*wait"), whole_file(path):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert names(tmp_path) == [".found.jsonl.partial"]
    with whole_file(path) as file:
        file.write("ours")
    assert (path.read_text(), names(tmp_path)) == ("ours", ["found.jsonl"])


def test_a_partial_file_that_leads_elsewhere_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    (tmp_path / partial_name("out")).symlink_to("precious")
    with pytest.raises(OSError, match="symbolic links"):
        write_text(tmp_path / "out", "new")
    assert (tmp_path / "precious").read_text() == "keep"


def test_writers_of_the_same_small_file_take_turns(tmp_path: Path) -> None:
    path, texts = tmp_path / "figures.json", [str(number) * 10_000 for number in range(8)]
    with ThreadPoolExecutor(len(texts)) as pool:
        list(pool.map(partial(write_text, path), texts))
    assert path.read_text() in texts
    assert names(tmp_path) == ["figures.json"]


def test_a_lock_is_held_by_one_and_by_all_where_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(tmp_path / "lock") as first, held(tmp_path / "lock") as second:
        assert (first, second) == (True, False)
    with alone_in(tmp_path), pytest.raises(DataError, match="another process is using"), alone_in(tmp_path, 0.0):
        pass

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held(tmp_path / "lock") as first, held(tmp_path / "lock") as second:
        assert (first, second) == (True, True)


# Modules that write or remove files by themselves: in a folder that is not published yet, or that belongs to nobody else.
ALLOWED = {
    *("api/estimators.py", "compare/run.py", "data/dataset/remote.py", "data/prepare.py", "finetuning/results.py"),
    *("finetuning/run.py", "model_files/onnx.py"),
    *("model_files/serving.py", "training/checkpoint.py", "training/distributed.py"),
}
WRITES = {"copyfile", "move", "rename", "rmtree", "tofile", "truncate", "unlink", "write_bytes", "write_text"}


def test_all_writing_goes_through_storage() -> None:
    source = Path(discern.__file__).parent
    found = set()
    for path in source.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        called = {
            node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        if called & WRITES and path.parent.name not in ("storage", "kernels"):
            found.add(path.relative_to(source).as_posix())
    assert found == ALLOWED, f"{found ^ ALLOWED}: write with discern.storage.files"
