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

from discern.errors import DataError
from discern.storage.output import OutputFolder
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
        while not (folder / ".data.partial").exists() and time.monotonic() < deadline:
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
    assert messages.count("Run the same command again") == 1
    assert not any(word in messages for word in ("error", "Traceback"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe", "vocab.txt"]
    assert gone(workers)


def test_after_a_kill_the_next_run_clears_up(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        workers = workers_of(process)
        process.kill()
        process.communicate(timeout=30)
    assert sorted(path.name for path in tmp_path.glob(".data.*")) == [".data.partial", ".data.partial.lock"]
    assert gone(workers)
    with OutputFolder(tmp_path / "data").staged() as folder:
        assert sorted(tmp_path.glob(".data.*")) == [folder.path, tmp_path / ".data.partial.lock"]
        assert not list(folder.path.iterdir())
    assert not list(tmp_path.glob(".data.*"))


def test_the_second_of_two_is_told_that_another_is_at_work(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        made = sorted((tmp_path / ".data.partial").iterdir())
        with (
            pytest.raises(DataError, match=r"another process is writing .*data\n.*wait") as refused,
            OutputFolder(tmp_path / "data").staged(),
        ):
            pass
        assert "space" not in str(refused.value)
        assert sorted((tmp_path / ".data.partial").iterdir()) == made
        assert process.poll() is None


def test_what_was_put_there_meanwhile_stays(tmp_path: Path) -> None:
    def make() -> None:
        with OutputFolder(tmp_path / "data").staged() as folder:
            (tmp_path / "data").mkdir()
            (tmp_path / "data" / "other").write_text("made meanwhile")
            folder.publish(replace=False)

    with pytest.raises(DataError, match="cannot write"):
        make()
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["other"]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
