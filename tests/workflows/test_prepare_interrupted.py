"""A run that is interrupted, terminated or killed leaves no half-made data set."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from discern.data.publish import publish, staging
from discern.errors import DataError
from tests.data.small_text import made_up, plain, write_vocabulary

TEXT = plain(made_up(4000)).encode()


@contextmanager
def running(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`discern prepare` in the middle of its work: its input is a pipe that gives some text, and then waits."""
    vocabulary = write_vocabulary(folder / "vocab.txt")
    os.mkfifo(folder / "pipe")
    command = ["prepare", folder / "pipe", "--out", folder / "data", "--tokenizer", vocabulary, "--workers", "2", *options]
    program = [sys.executable, "-c", "from discern.cli.main import main; main()", *map(str, command)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    release = threading.Event()

    def feed() -> None:
        with contextlib.suppress(BrokenPipeError), (folder / "pipe").open("wb") as pipe:
            pipe.write(TEXT)
            pipe.flush()
            release.wait(60)

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    try:
        deadline = time.monotonic() + 30
        while not list(folder.glob(".data.*/*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        yield process
    finally:
        release.set()
        process.kill()
        process.communicate()
        os.close(os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK))  # if it was never opened for reading
        feeder.join(10)


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(child) for child in children.read_text().split()] if children.exists() else []


def gone(workers: list[int]) -> bool:
    """Whether the worker processes end: one that was just being started sees the end of its input a little later."""
    deadline = time.monotonic() + 10
    while (left := any(Path(f"/proc/{worker}").exists() for worker in workers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not left


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_removes_what_it_made(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with running(tmp_path) as process:
        workers = workers_of(process)
        process.send_signal(number)
        _, messages = process.communicate(timeout=30)
    assert process.returncode == code
    assert "give the same command again" in messages
    assert "Traceback" not in messages
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "vocab.txt"]
    assert gone(workers)


def test_after_a_kill_the_next_run_clears_up(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        workers = workers_of(process)
        process.kill()
        process.communicate(timeout=30)
    (leftover,) = tmp_path.glob(".data.*")
    assert gone(workers)
    with staging(tmp_path / "data") as folder:
        assert not leftover.exists()
        assert list(tmp_path.glob(".data.*")) == [folder]
    assert not list(tmp_path.glob(".data.*"))


def test_a_run_at_work_is_left_alone(tmp_path: Path) -> None:
    with staging(tmp_path / "data") as first:
        (first / "shard").write_text("x")
        with staging(tmp_path / "data") as second:
            assert first.exists()
            publish(second, tmp_path / "data", replace=False)
        (tmp_path / "data" / "other").write_text("made meanwhile")
        with pytest.raises(DataError, match="cannot be written"), staging(tmp_path / "data") as third:
            publish(third, tmp_path / "data", replace=False)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["other"]


def test_replacing_keeps_the_old_one_until_the_new_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "data"
    out.mkdir()
    (out / "old").write_text("")
    rename = os.rename
    calls: list[object] = []

    def fail_second(*paths: object) -> None:
        calls.append(paths)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        rename(*paths)  # type: ignore[arg-type]

    monkeypatch.setattr("discern.data.publish.os.rename", fail_second)
    with pytest.raises(DataError, match="No space left"), staging(out) as folder:
        publish(folder, out, replace=True)
    assert [path.name for path in out.iterdir()] == ["old"]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
